"""Test that texts with units have the same meaning for all times, sizes and rates."""

from __future__ import annotations

import math
from collections.abc import Callable

import click
import numpy as np
import pytest
from click.testing import CliRunner

import labkit as lk
from labkit.cli.app import app
from labkit.common.errors import InvalidInput
from labkit.common.quantities import bits_of, parse_bytes, parse_limit, parse_rate, parse_seconds
from labkit.exchange.exchange import Exchange
from labkit.hosts.testbed_state import TestbedPlan

RATES = {
    **dict.fromkeys(("1Gb", "1Gb/s", "1Gbps", "1 Gbit/s", "1gbps", "1 Gb / s", "1000Mb"), 125e6),
    **dict.fromkeys(("1Gbits/s", "0.001Tb/s", "1e3 Mbit", "125MB/s", "125 MBps", "125e6"), 125e6),
    "100Mb": 12.5e6,
    "10GB/s": 1e10,
    "1KiB/s": 1024.0,
    "1Kib/s": 128.0,
    "8b/s": 1.0,
}
TIMES = {
    **dict.fromkeys(("5ms", "5 ms", " 0.005s", "5e-3", "5000us", "5000µs", "5000 μs"), 0.005),
    "0.1s": 0.1,
    "50us": 50e-6,
    "3ns": 3e-9,
    "2min": 120,
    "1.5h": 5400,
    "1 day": 86400,
    "0": 0,
}
SIZES = {"64KiB": 65536, "4MB": 4_000_000, "1.5 kB": 1500, "2 GiB": 2**31, "100": 100, "1e6": 10**6}
# Texts without a number, with an unknown unit, with bits for bytes, or with impossible values.
ODD = ["", " ", "nan", "inf", "-1", "1e400", "fast", "5 parsecs", "1_0", "1,5", "٣", True, math.nan]
BAD_RATES = [*ODD, "Gb/s", "5ms", "-1Gb/s", "infGb", "1G", "1Gb/min", -1.0]
BAD_TIMES = [*ODD, "ms", "5m", "5MS", "-3s", "1GB", math.inf]
BAD_SIZES = [*ODD, "4Mb", "4mb", "64K", "4MB/s", "KiB"]


@pytest.mark.parametrize(
    ("parse", "known"), [(parse_rate, RATES), (parse_seconds, TIMES), (parse_bytes, SIZES)]
)
def test_every_spelling_is_read(parse: Callable[[str], float], known: dict[str, float]) -> None:
    assert {text: parse(text) for text in known} == known
    assert parse(np.float32(4)) == parse(np.int64(4)) == parse(4) == 4  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parse", "wrong", "allowed"),
    [
        (parse_rate, BAD_RATES, "give a number of bytes/s, or a rate such as '1Gb/s'"),
        (parse_seconds, BAD_TIMES, "give a number of seconds, or a time such as '5ms'"),
        (parse_bytes, BAD_SIZES, "give a number of bytes, or a size such as '64KiB'"),
    ],
)
def test_what_is_no_quantity_is_refused_with_what_is_allowed(
    parse: Callable[[object, str], float], wrong: list[object], allowed: str
) -> None:
    for value in wrong:
        with pytest.raises(InvalidInput, match=r"^here=.* is impossible") as caught:
            parse(value, "here")
        assert allowed in str(caught.value), value


def test_a_limit_is_above_0() -> None:
    assert parse_limit("10min") == 600
    with pytest.raises(InvalidInput, match=r"timeout='0s' is impossible; give more than 0 s"):
        parse_limit("0s")


# Functions that read a quantity from a record's field, each with equal values in several notations.
GIVEN: dict[str, tuple[Callable[[object], object], tuple[object, ...]]] = {
    "latency": (lambda v: lk.Network(latency=v, bandwidth=1).latency, (0.005, "5ms", "0.005 s")),
    "jitter": (lambda v: lk.Network(latency=0, bandwidth=1, jitter=v).jitter, (1e-5, "10us")),
    "bandwidth": (lambda v: lk.Network(latency=0, bandwidth=v).bandwidth, (125e6, "1Gb", "1Gb/s")),
    "host bandwidth": (
        lambda v: lk.Network(latency=0, bandwidth=1, hosts=2, host_bandwidth=v).host_bandwidth,
        (1e10, "10GB/s"),
    ),
    "links": (
        lambda v: lk.Network(latency=0, bandwidth=1, links={(0, 1): v}).links,
        (125e3, "1Mb"),
    ),
    "pause": (lambda v: lk.Slowdown(pause=(0, v)).pause, (0.5, "500ms")),
    "compute_time": (lambda v: lk.VirtualClock(compute_time=v).compute_time, (0.005, "5ms")),
    "values": (lambda v: lk.ComputeTime(trace=[v]).trace, (0.005, "5ms")),
    "message_delays": (
        lambda v: lk.VirtualClock(message_delays=((0, 0, v),)).message_delays,
        (2, "2s"),
    ),
    "fault": (lambda v: lk.Fault("pause", rank=0, step=0, seconds=v).seconds, (0.2, "200 ms")),
    "checkpoint": (lambda v: lk.Checkpoint(v).interval(None), ("90s", "1.5min", "1.5 minutes")),
    "failures": (lambda v: lk.Checkpoint(mtbf=v).mtbf, (3600, "1h")),
    "buckets": (lambda v: lk.AllReduce(bucket_bytes=v).bucket_bytes, (65536, "64KiB")),
    "testbed": (lambda v: TestbedPlan(bandwidth=v).rate, ("1Gb", "1Gb/s", "1 Gbit/s", "125MB/s")),
    "bench": (bits_of, ("100Mb", "100Mbps")),
}


@pytest.mark.parametrize("what", GIVEN)
def test_a_quantity_is_the_same_however_it_is_given(what: str) -> None:
    read, values = GIVEN[what]
    assert [read(value) for value in values] == [read(values[0])] * len(values)
    for wrong in ("", "5 parsecs", "-1", "nan"):
        with pytest.raises(InvalidInput, match="is impossible"):
            read(wrong)


def test_equal_experiments_have_equal_hashes_however_their_units_are_written() -> None:
    one = lk.Experiment(network=lk.Network(latency=50e-6, bandwidth=125e6))
    assert lk.Experiment(network=lk.Network(latency="50us", bandwidth="1Gb/s")).hash8 == one.hash8


def test_a_bucket_of_the_exchange_and_a_limit_of_a_cluster_are_refused_at_once() -> None:
    with pytest.raises(
        InvalidInput, match=r"bucket_bytes='4Mb' is impossible; give a number of bytes"
    ):
        Exchange(_Ranks(), bucket_bytes="4Mb")  # type: ignore[arg-type]
    with pytest.raises(
        InvalidInput, match=r"timeout='5 parsecs' is impossible; give a number of seconds"
    ):
        lk.Cluster(2, timeout="5 parsecs")


class _Ranks:
    clock = None


@pytest.mark.parametrize(
    ("words", "exit_code", "told"),
    [
        (["simulate", "ring", "--bytes", "100MB"], 0, "100,000,000 bytes"),
        (
            ["simulate", "ring", "--bytes", "100Mb"],
            2,
            "--bytes='100Mb' is impossible; give a number",
        ),
        (["bench", "collectives", "--bytes", "1MiB,4 bits"], 2, "bytes='4 bits' is impossible"),
    ],
)
def test_commands_read_units(words: list[str], exit_code: int, told: str) -> None:
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, told in click.unstyle(done.output)) == (exit_code, True), done.output
