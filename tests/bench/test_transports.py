"""Test exchanges by several transports: options, results, and one-sided communication."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from listening import watched

from labkit.bench.timing import Row
from labkit.bench.transports import measuring, transports_command
from labkit.bench.transports.measuring import summary
from labkit.bench.transports.starting import (
    APART,
    GRPC,
    LOOPBACK,
    PLACE,
    PLACES,
    SHARED,
    UNATTACHED,
    WAYS,
    WITHIN,
    chosen,
    hosts_wanted,
    predict,
)
from labkit.cli.app import app
from labkit.common.errors import InvalidInput
from labkit.communicator import TRANSPORTS
from labkit.network import Network


def test_one_sided_and_two_sided_are_rows_of_their_own_in_memory_and_over_tcp() -> None:
    for transport in TRANSPORTS:
        assert [way.place for way in chosen([transport], [])] == list(PLACES)
    assert [way.place for way in chosen([GRPC], [])] == [LOOPBACK, APART]
    assert len(WAYS) == len(set(WAYS)) == 14


def test_static_placement_copies_least_and_every_copy_has_its_reason() -> None:
    for place in PLACES:
        static, dynamic = (
            len(WAYS[f"{name}, {place}"].copies) for name in ("one_sided", "one_sided_dynamic")
        )
        assert 1 <= static < dynamic
    two = [len(WAYS[f"two_sided, {place}"].copies) for place in (SHARED, UNATTACHED)]
    assert two == [1, 2]
    assert all(len(set(way.copies)) == len(way.copies) for way in WAYS.values())


def test_a_transport_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidInput, match="'pigeon' is not known; allowed: grpc, two_sided"):
        measuring.plan(["pigeon"])
    with pytest.raises(InvalidInput, match="rate='1 furlong' is impossible"):
        measuring.plan(rate="1 furlong")
    with pytest.raises(InvalidInput, match="at least 1 byte"):
        measuring.measure(measuring.plan(places=[SHARED]), [0])


@pytest.mark.heavy
def test_a_place_that_is_not_asked_for_is_left_out_with_a_sentence() -> None:
    wanted = measuring.plan(["two_sided"], namespaces=False)
    assert APART not in {way.place for way in wanted.ways}
    assert f"two_sided by {APART}: not requested" in wanted.left_out
    with pytest.raises(InvalidInput, match=r"none of the chosen transports: .*not requested"):
        measuring.plan(places=[APART], namespaces=False)


def test_what_is_predicted_says_so_and_follows_its_formula() -> None:
    network = Network(latency=1e-6, bandwidth=1e9)
    rows = {str(row["transport"]): row for row in predict([10**6], network, copy=1e10)}
    assert {row["clock"] for row in rows.values()} == {"simulation"}
    assert {row["place"] for row in rows.values()} == {PLACE}
    by_hand = {
        "one_sided": 1e-6 + 1e-3,
        "one_sided_dynamic": 3e-6 + 1e-3,
        "two_sided": 3e-6 + 1e-3 + 2e-4,
        GRPC: 20e-6 + 1e-3 + 3e-4,
    }
    for transport, seconds in by_hand.items():
        assert rows[transport]["median_ms"] == pytest.approx(1e3 * seconds)


def timed(transport: str, place: str, milliseconds: float) -> Row:
    return {
        "transport": transport,
        "place": place,
        "bytes": transports_command.FOUR,
        "what": "exchange",
        "median_ms": milliseconds,
    }


def test_grpc_on_loopback_is_held_against_a_put_within_the_host_and_tcp_against_tcp() -> None:
    rows = [timed("one_sided", SHARED, 1.0), timed("two_sided", SHARED, 2.5)]
    rows += [timed("one_sided", LOOPBACK, 8.0), timed(GRPC, LOOPBACK, 6.0)]
    assert list(transports_command.ratio_sentences(rows)) == [
        f"4 MiB, compared with one_sided by {SHARED}: grpc by {LOOPBACK} takes 6.00 times as long; "
        f"two_sided by {SHARED} takes 2.50 times as long",
        f"4 MiB, compared with one_sided by {LOOPBACK}: grpc by {LOOPBACK} takes 0.75 times as "
        "long",
    ]


def test_a_target_that_is_not_reached_has_no_time() -> None:
    epochs = [{"seconds": 1.0, "val_accuracy": 0.5}, {"seconds": 2.0, "val_accuracy": 0.8}]
    steps = [9.0] * 10 + [0.001, 0.002, 0.003]  # the first ten steps are warm-up
    found = summary(steps, epochs, 0.7)
    assert (found["median_ms"], found["seconds_to_target"]) == (pytest.approx(2.0), 2.0)
    assert summary(steps, epochs, 0.9)["seconds_to_target"] is None


def row_of(rows: list[dict[str, Any]], case: str) -> dict[str, Any]:
    (found,) = (row for row in rows if row["case"] == case)
    return found


@pytest.mark.slow
@pytest.mark.heavy
def test_what_is_exchanged_comes_back_bit_by_bit_and_only_tcp_uses_tcp(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    given = ["bench", "transport", "--bytes", "65536", "--repeats", "1", "--no-namespaces"]
    given += ["--transports", ",".join(TRANSPORTS), "--json", str(file)]
    with watched() as reached:
        result = CliRunner().invoke(app, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert reached == set()  # other machines: none was reached
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    measured = [row for row in rows if row["clock"] == "wall"]
    places = [*WITHIN] if hosts_wanted() else [*WITHIN, LOOPBACK]
    assert {row["case"] for row in measured} == {f"{t}, {p}" for t in TRANSPORTS for p in places}
    assert all(row["correct"] for row in measured)
    for transport in TRANSPORTS:
        assert all(row_of(measured, f"{transport}, {place}")["tcp"] == 0 for place in WITHIN)
        if LOOPBACK in places:
            assert row_of(measured, f"{transport}, {LOOPBACK}")["tcp"] >= 1
    fields = {"bench", "case", "what", "workers", "network", "clock", "bytes", "repeats"}
    assert fields | {"median_ms", "min_ms", "p90_ms", "copies"} <= set(rows[0])


@pytest.mark.slow
def test_tensorflow_s_grpc_moves_an_array_there_and_back() -> None:
    wanted = measuring.plan([GRPC], [LOOPBACK])
    with watched() as reached:
        (row,) = measuring.measure(wanted, [2**20], repeats=1)
    assert reached == set()  # other machines: none was reached
    assert row["correct"]
    assert float(row["tcp"] or 0.0) == pytest.approx(1.0, abs=0.1)
