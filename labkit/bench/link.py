"""A comparison of the emulated network with a real link of equal rate and latency."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import click
import numpy as np

from labkit.bench import concurrent_flows
from labkit.bench.command import AS_JSON, format_rows, sizes, write_rows
from labkit.bench.linked_ranks import LinkedProcesses, linked_ranks
from labkit.bench.timing import Row, head, sweep
from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput
from labkit.common.nearest import refuse_unknown
from labkit.common.quantities import bits_of
from labkit.common.terminal import say
from labkit.frameworks.namespaces import FRAME, burst, require_tools
from labkit.network import Network
from labkit.schedules import ALLREDUCE
from labkit.simulate import closed_form

KIB = 2**10
SIZES = (64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
ALGORITHMS = ("ring", "master_worker")
RATES = ("100Mb", "1Gb")
Joined: TypeAlias = Callable[[int], AbstractContextManager[LinkedProcesses]]
BY_TCP: Joined = partial(linked_ranks, program="labkit.bench.linked_ranks")
SLICE = 0.5  # seconds spent on one algorithm and one size in one repeat

Case: TypeAlias = tuple[str, int, int]  # a case: algorithm, bytes, number of calls


def measure(
    rates: Sequence[str] = RATES,
    sizes: Sequence[int] = SIZES,
    algorithms: Sequence[str] = ALGORITHMS,
    repeats: int = 5,
    joined: Joined = BY_TCP,
) -> list[Row]:
    """Time float32 allreduces of two ranks on a real link and on its emulation, interleaved.

    The real link connects two network namespaces of this machine through `tbf` queues. Two
    processes at its ends execute the same schedules over TCP. The latency of the emulated network
    is half the median round-trip time of one byte, measured on the real link. The emulated network
    also has the payload rate of the real link: 1448 of the 1514 bytes of a full Ethernet frame are
    TCP payload.

    Args:
        rates: Rates of the link in bits/s per direction, such as "100Mb" or "1Gb".
        sizes: Buffer sizes in bytes.
        algorithms: Names of allreduce algorithms in `labkit.schedules.ALLREDUCE`.
        repeats: Number of rounds over both links, all algorithms and sizes; each round gives one
            median.
        joined: Function of a rate in bits/s. It returns a context manager that starts two ranks at
            the ends of a link with this rate; see `labkit.bench.linked_ranks`.

    Returns:
        One row per rate, algorithm and size. It contains median, minimum and maximum of the
        repeats' medians on the real link (`median_ms` …) and on the emulated link (`emulated_ms`
        …), and the closed-form time. `error` = emulated / real - 1 has a minimum and a maximum over
        repeats. The row also contains `correct` and the properties of the link.

    Raises:
        InvalidInput: A rate, size or algorithm is invalid.
        LabkitError: The process is not root, iproute2 is missing, or the kernel lacks a module.
    """
    bits = {rate: bits_of(rate) for rate in rates}
    refuse_unknown("algorithm", algorithms, ALLREDUCE)
    if min(sizes, default=0) < 4 or repeats < 1:
        raise InvalidInput(
            f"bytes={sizes}, repeats={repeats}: give sizes of 4 or more, and 1 or more repeats"
        )
    wanted = [(algorithm, nbytes) for nbytes in sizes for algorithm in algorithms]
    require_tools()
    with Cluster(workers=2) as cluster:
        return [
            row for rate in rates for row in _at(rate, bits[rate], cluster, wanted, repeats, joined)
        ]


def _at(
    rate: str,
    bits: int,
    cluster: Cluster,
    wanted: list[tuple[str, int]],
    repeats: int,
    joined: Joined,
) -> list[Row]:
    """Return the rows of all algorithms and sizes at one rate of the link."""
    with joined(bits) as ranks:
        link: dict[str, float] = json.loads(ranks.answer())
        network = Network(
            latency=link["latency"], bandwidth=bits / 8 * link["payload"] / FRAME, name=rate
        )
        forms = [closed_form(algorithm, 2, nbytes, network) for algorithm, nbytes in wanted]
        cases: list[Case] = [
            (algorithm, nbytes, int(np.clip(SLICE / form, 3, 50)))
            for (algorithm, nbytes), form in zip(wanted, forms, strict=True)
        ]
        real, emulated = [], []
        for _ in range(repeats):
            ranks.ask(cases)
            real.append([result[:2] for result in json.loads(ranks.answer())])
            emulated.append(cluster.call(sweep, cases, network=network)[0])
    free = burst(bits)
    facts: Row = {"rate": rate, "burst": free, "burst_ms": 8e3 * free / bits, **link}
    times = np.array([real, emulated])  # axes: link, repeat, case, (seconds, correct)
    return [
        _row(case, form, times[:, :, number], rate, facts)
        for number, (case, form) in enumerate(zip(cases, forms, strict=True))
    ]


def _row(case: Case, form: float, times: np.ndarray, rate: str, facts: Row) -> Row:
    algorithm, nbytes, calls = case
    real, emulated = 1e3 * times[:, :, 0]
    errors = emulated / real - 1
    name, network = f"{algorithm} {nbytes} bytes at {rate}", f"{rate} between two namespaces"
    row = head("link", name, "allreduce", 2, network, repeats=times.shape[1], bytes=nbytes)
    return row | {
        "algorithm": algorithm,
        "median_ms": float(np.median(real)),
        "min_ms": float(real.min()),
        "p90_ms": float(np.percentile(real, 90)),
        "max_ms": float(real.max()),
        "emulated_ms": float(np.median(emulated)),
        "emulated_min_ms": float(emulated.min()),
        "emulated_max_ms": float(emulated.max()),
        "closed_form_ms": 1e3 * form,
        "error": float(np.median(emulated) / np.median(real) - 1),
        "error_min": float(errors.min()),
        "error_max": float(errors.max()),
        "calls": calls * times.shape[1],
        "correct": bool(times[:, :, 1].all()),
        **facts,
    }


@click.command("link")
@click.option(
    "--rate", default="100Mb,1Gb", show_default=True, help="Rates in bits/s, separated by commas."
)
@click.option(
    "--algorithms", default="ring,master_worker", show_default=True, help="Allreduce algorithms."
)
@click.option(
    "--bytes", "sizes", default="64KiB,256KiB,1MiB,4MiB", callback=sizes, help="Buffer sizes."
)
@click.option("--repeats", default=5, show_default=True, help="Interleaved repeats.")
@AS_JSON
def command(
    rate: str,
    algorithms: str,
    sizes: list[int],
    repeats: int,
    file: Path | None,
) -> None:
    """Compare the emulated network with a real rate-limited link (Linux, root, iproute2)."""
    rows = measure(rate.split(","), sizes, algorithms.split(","), repeats)
    # One line is printed per rate, because all rows of a rate share one link.
    for facts in {row["rate"]: row for row in rows}.values():
        say(
            f"{facts['rate']}: latency {1e6 * float(facts['latency'] or 0):.0f} us, measured; "
            f"payload {facts['payload']} of {FRAME} bytes of a frame; after a pause, the first "
            f"{facts['burst']} bytes pass at line speed, which saves {facts['burst_ms']:.2g} ms"
        )
    columns = {name: name for name in ("rate", "algorithm", "bytes")}
    for kind, words in (("", "real ms"), ("emulated_", "emulated ms")):
        columns |= {f"{kind}ms" if kind else "median_ms": words}
        columns |= {f"{kind}min_ms": "min ms", f"{kind}max_ms": "max ms"}
    columns |= {"closed_form_ms": "formula ms", "error": "error", "correct": "correct"}
    say(format_rows(rows, columns))
    both = concurrent_flows.measure(rate.split(","), repeats)
    columns = {"flow": "concurrent flow", "rate": "rate", "median_ms": "real ms"}
    columns |= {"min_ms": "min ms", "max_ms": "max ms", "emulated_ms": "emulated ms"}
    say(format_rows(both, columns | {"max_min_ms": "max-min ms", "error": "error"}))
    write_rows([*rows, *both], file)
