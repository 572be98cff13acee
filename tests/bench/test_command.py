"""Test `labkit bench exchange`: its table, options, other frameworks, and JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from labkit.bench import exchange, exchange_command
from labkit.cli.app import app


def row(what: str, **more: Any) -> dict[str, Any]:
    head = {"bench": "exchange", "case": "cnn", "what": what, "workers": 2, "network": None}
    return head | {"median_ms": 8.25, "min_ms": 8.0, "p90_ms": 9.5, "bytes": 4800000} | more


ADDED = {"added_ms": 2.5, "added_min_ms": 2.25, "added_max_ms": 3.5, "same_weights": True}
OWN = [
    row("local"),
    row("raw allreduce"),
    row(
        "overlap",
        **ADDED,
        recording_share=0.00123,
        algorithm="shared_memory",
        why="the fastest when timed with 4.8 MB on 2 ranks: shared_memory 0.5 ms, mpi 0.9 ms",
        schedule="overlap",
        saved_ms=60.25,
        saved_min_ms=59.5,
        saved_max_ms=61.5,
        ideal_saving_ms=71.5,
    ),
]
PEER = [
    row("ddp local", version="PyTorch 9"),
    row("ddp", **ADDED, ours_to_theirs=0.45, version="PyTorch 9"),
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return a list of the arguments of each requested measurement; nothing is measured."""
    calls: list[tuple[Any, ...]] = []

    def measure(*arguments: Any) -> list[dict[str, Any]]:
        *given, others, where = arguments
        calls.append((*given, where) if where else tuple(given))
        if others:
            others()
        return [dict(each) for each in OWN]

    class Others:
        def __init__(self, names: Sequence[str], *arguments: Any) -> None:
            calls.append((list(names), *arguments))
            self.remarks = [f"{name}: not here" for name in names[1:]]
            self.turn = lambda: calls.append(("turn",))

        def rows(self, own: list[dict[str, Any]]) -> list[dict[str, Any]]:
            assert own == OWN
            return PEER

    monkeypatch.setattr(exchange, "measure", measure)
    monkeypatch.setattr(exchange_command, "PeerComparison", Others)
    return calls


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "exchange", *arguments])


def test_the_table_has_median_spread_and_the_share_of_recording(asked: list[Any]) -> None:
    done = bench()
    assert done.exit_code == 0, done.output
    head, *lines = done.output.splitlines()
    for title in ("case", "what", "median ms", "min ms", "p90 ms", "added ms", "same weights"):
        assert title in head
    overlap = next(line for line in lines if "overlap" in line)
    for cell in (
        "8.25",
        "9.5",
        "2.5 (2.25 to 3.5)",
        "60.2 (59.5 to 61.5) of 71.5",
        "yes",
        "0.12% of the step",
    ):
        assert cell in overlap
    assert (
        "cnn overlap: shared_memory, the fastest when timed with 4.8 MB on 2 ranks" in done.output
    )


def test_options_reach_the_measurement(asked: list[Any]) -> None:
    done = bench(
        *("--workers", "3", "--cases", "cnn, deep-mlp", "--schedules", "overlap,staggered"),
        *("--algorithm", "ring", "--network", "1GbE", "--repeats", "2", "--bucket-bytes", "999"),
    )
    assert done.exit_code == 0, done.output
    assert asked == [(3, ["cnn", "deep-mlp"], ["overlap", "staggered"], "ring", "1GbE", 2, 999)]
    assert bench("--breakdown").exit_code == 0
    assert asked[1][-1] is True


def test_external_frameworks_stand_below_and_those_that_are_absent_are_remarked(
    asked: list[Any], tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    done = bench("--cases", "cnn", "--peer", "ddp,horovod", "--json", str(file), "--repeats", "3")
    assert done.exit_code == 0, done.output
    assert asked[0] == (["ddp", "horovod"], ["cnn"], 2)
    assert asked[2] == ("turn",)
    assert "PyTorch 9" in done.output
    assert "added by labkit / by peer" in done.output
    assert any("2.5 (2.25 to 3.5)" in line and "0.45" in line for line in done.output.splitlines())
    assert "peer horovod: not here" in done.stderr
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert written == OWN + PEER
    needed = {"bench", "case", "what", "workers", "network", "median_ms", "min_ms", "p90_ms"}
    assert all(needed <= set(each) for each in written)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--peer", "gossip"], "peer='gossip' is not known; allowed: multi_worker_mirrored, ddp"),
        (["--peer", "ddp", "--network", "1GbE"], "remove --network or --peer"),
        (["--schedules", "hasty"], "schedule='hasty' is not known; allowed: sequential"),
        (["--schedules", ""], "schedule=nothing"),
        (["--schedules", "priority", "--cases", "embedding"], "updates dense layers one by one"),
        (["--algorithm", "gossip"], "algorithm='gossip' is not known; allowed: auto, mpi"),
        (["--algorithm", "mpi", "--network", "1GbE"], "cannot run on the emulated network"),
        (["--workers", "1"], "give 2 or more workers"),
        (["--repeats", "0"], "1 or more repeats"),
        (["--breakdown", "--schedules", "overlap"], "--breakdown requires the schedule sequential"),
        (["--breakdown", "--cases", "cnn,embedding"], "'embedding' is sparse"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    asked: list[Any], arguments: list[str], told: str
) -> None:
    done = bench(*arguments)
    assert done.exit_code == 2
    assert told in done.output
    assert asked == []


def test_an_unknown_case_names_those_that_there_are() -> None:
    done = bench("--cases", "gpt")
    assert done.exit_code == 2
    assert "case='gpt' is not known; allowed: mlp-1024" in done.output


def test_repeats_of_all_turns_stand_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Engines:
        def __init__(self, workers: int) -> None: ...

        def __enter__(self) -> Engines:
            return self

        def __exit__(self, *_: object) -> None: ...

        def call(self, _: object, name: str, *given: Any, **more: Any) -> list[dict[str, Any]]:
            said.append(name)
            seconds = {"local": [0.01], "sequential": [0.01 + len(said) / 1e3]}
            return [
                {
                    "seconds": seconds,
                    "added": {kind: [value - 0.01 for value in of] for kind, of in seconds.items()},
                    "same": {"sequential": len(said) != 4},
                    "nbytes": 40,
                    "why": {"sequential": {}},
                    "events": {"sequential": {"events_per_step": 1.0, "seconds_per_event": 0.0}},
                    "delay": {"sequential": 0.0},
                    "where": {},
                }
            ]

    monkeypatch.setattr(exchange, "Cluster", Engines)
    cases, more = (
        ["cnn", "mlp-1024"],
        {"repeats": 3, "measure_others": lambda: said.append("others")},
    )
    rows = exchange.measure(2, cases, ["sequential"], **more)
    assert said == 3 * [*cases, "others"]
    of_cnn, of_mlp = (row for row in rows if row["what"] == "sequential")
    assert (of_cnn["added_min_ms"], of_cnn["added_max_ms"]) == pytest.approx((1, 7))
    assert of_cnn["added_ms"] == pytest.approx(4)
    assert of_mlp["same_weights"]
    assert not of_cnn["same_weights"]  # weights differ in the second repeat
    assert of_cnn["repeats"] == 3


@pytest.mark.slow
def test_the_real_thing_measures_and_ends_with_equal_weights(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    schedules = ("--schedules", "sequential,overlap,priority")
    done = bench("--cases", "mlp-1024", *schedules, "--repeats", "2", "--json", str(file))
    assert done.exit_code == 0, done.output
    found = {each["what"]: each for each in map(json.loads, file.read_text().splitlines())}
    assert set(found) == {"local", "raw allreduce", "sequential", "overlap", "priority"}
    for schedule in ("sequential", "overlap", "priority"):
        assert found[schedule]["same_weights"]
        recorded = found[schedule]["events_per_step"] * found[schedule]["seconds_per_event"]
        share = 1e3 * recorded / found[schedule]["median_ms"]
        assert found[schedule]["recording_share"] == pytest.approx(share)
        assert found[schedule]["algorithm"] in found[schedule]["why"]
