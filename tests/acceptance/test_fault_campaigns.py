"""Test the campaigns of faults: their arguments, their stored rows, and one real kill and fault."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import labkit as lk
from labkit.strategies import STRATEGIES
from tests.acceptance.__main__ import campaigns
from tests.acceptance.faults import command, injection, kills, recovery, resumes
from tests.acceptance.faults.claims import claimed, named
from tests.acceptance.faults.command import summary, trouble

KILL = {"what": "kills", "network": "one host", "case": "AllReduce ring", "struck": True}
GOOD = {"finished": True, "exact": True, "within": True}


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(campaigns, ["faults", *arguments])


def test_a_part_that_is_not_there_is_answered_with_those_that_are() -> None:
    done = bench("--what", "killz")
    assert done.exit_code != 0
    assert f"what='killz' is not known; allowed: {', '.join(command.PARTS)}" in done.output


def test_only_who_outlives_ranks_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {named(each) for each in claimed()}
    assert {"AllReduce ring overlap OneBit", "AllReduce shared_memory sequential"} <= names
    assert not any("priority" in name or "Pipeline" in name for name in names)
    assert not any("shared_memory" in named(each) for each in claimed(apart=True))
    monkeypatch.setattr(STRATEGIES["Pipeline"], "fault_tolerant", True)
    assert "Pipeline" in {named(each).split()[0] for each in claimed()}


def test_kills_that_did_not_strike_do_not_count_and_bad_ones_are_named() -> None:
    rows: list[Any] = [
        KILL | GOOD | {"number": 0, "seconds": 0.25, "trace_s": 1.0},
        KILL | GOOD | {"number": 1, "exact": False, "seconds": 0.75},
        KILL | GOOD | {"number": 2, "struck": False, "within": False},
    ]
    (told,) = summary(rows)
    assert (told["count"], told["finished"], told["exact"], told["seconds"]) == (2, 2, 1, 0.5)
    assert trouble(rows) == ["kills 1, AllReduce ring: not exact"]


def test_rows_that_a_file_has_are_not_run_again_and_new_ones_are_kept_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    asked: list[tuple[int, list[Any]]] = []

    def measure(repeats: int, known: Sequence[Any]) -> Iterator[Any]:
        asked.append((repeats, [each["number"] for each in known]))
        row: Any = {"bench": "faults", "case": "x", "what": "planted", "network": None}
        yield row | {"number": len(known), "found": True}
        assert len(file.read_text().splitlines()) == len(known)
        yield row | {"number": 9, "found": len(known) < 3}

    part = command.PARTS["planted"]._replace(measure=measure)
    monkeypatch.setitem(command.PARTS, "planted", part)
    first = bench("--what", "planted", "--json", str(file))
    assert first.exit_code == 0, first.output
    second = bench("--what", "planted", "--repeats", "4", "--json", str(file))
    assert "failed: planted 9, x: not found" in second.output
    assert second.exit_code != 0
    assert asked[0] == (30, [])
    assert [json.loads(line)["number"] for line in file.read_text().splitlines()] == [0, 9, 2, 9]


@pytest.mark.slow
def test_a_rank_that_is_killed_at_a_random_moment_is_outlived_with_an_exact_ledger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kills, "EPOCHS", 8)
    band = {"what": "band", "case": "exact", "network": "one host", "seconds": 2.0}
    known: list[Any] = [band | {"accuracy": 0.5}, band | {"accuracy": 0.9}]
    (row,) = kills.measure(1, known)
    assert row["struck"]
    assert (row["finished"], row["exact"], row["within"]) == (True, True, True), row


def test_who_goes_on_by_a_copy_or_a_checkpoint_has_a_part_of_its_own() -> None:
    waiting = {type(each.strategy).__name__ for each in resumes.kept() if each.clock == "wall"}
    assert waiting >= {"Pipeline", "TensorParallel", "ParameterServer", "ParameterAveraging"}
    assert "ExternalFramework" not in waiting


@pytest.mark.slow
def test_a_pipeline_whose_rank_is_killed_at_a_random_moment_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (pipeline,) = (each for each in resumes.kept() if type(each.strategy) is lk.Pipeline)
    monkeypatch.setattr(recovery, "kept", lambda: [pipeline.replace(epochs=40)])
    rows = list(recovery.measure(1, []))
    assert (rows[-1]["finished"], rows[-1]["same"]) == (True, True), rows[-1]
    assert rows[-1]["source"] in ("memory", "checkpoint", "the begin")


@pytest.mark.slow
def test_a_fault_that_is_planted_at_random_is_found(cluster: lk.Cluster) -> None:
    row = injection.one(cluster, 0)
    assert (row["kind"], row["found"]) == ("nan", True), row
