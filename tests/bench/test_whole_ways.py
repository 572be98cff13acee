"""Test calibrations of whole steps: enough steps, no failed runs, nothing that notebooks verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sample_runs
from sample_calibrations import calibration, experiment

import labkit as lk
from labkit.bench.calibration_runs.measure import (
    FULL,
    QUICK,
    experiments_to_run,
    measured_ways,
    step_seconds,
)
from labkit.cluster import RankError
from labkit.common.errors import InvalidInput
from labkit.forecast import WayCost
from labkit.jobs import cells
from labkit.network import PRESETS, Network
from labkit.records import store
from labkit.records.run import Run
from labkit.strategies import Strategy

LINK = Network(name="a link", latency=1e-4, bandwidth=1e7)
NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
STEP, MEETING = 1e-3, 0.1  # s


class Ranks:
    """A fake cluster that only stores records of runs, in which one step per period is longer."""

    def __init__(self, folder: Path, refused: str = "", period: int = 1) -> None:
        self._folder, self._refused, self._period = folder, refused, period

    def run(self, asked: lk.Experiment, show: bool) -> Run:
        if getattr(asked.strategy, "algorithm", "") == self._refused:
            raise RankError("rank 1 has no memory left", 1)
        assert asked.steps_per_epoch is not None
        steps, period = asked.steps_per_epoch, self._period or asked.steps_per_epoch
        rows = sample_runs.history(2, asked.epochs, steps)
        rows["seconds"] = np.where((rows["step"] + 1) % period == 0, MEETING, STEP)
        directory = store.new_run_directory(self._folder, "run")
        store.start(directory, asked.to_json())
        store.finish(directory, sample_runs.metrics(2, asked.epochs, steps), rows)
        return Run(directory)


def whole(ranks: Ranks, lines: list[str], *strategies: Strategy) -> list[WayCost]:
    ways = [experiment(workers=2, network=LINK, strategy=each) for each in strategies]
    known = calibration()
    return measured_ways(ranks, ways, known, 2, 0.0, lines.append)  # type: ignore[arg-type]


@pytest.mark.parametrize("period", [1, 4, 24, 190, "epoch"])
def test_each_run_has_some_periods_of_its_way(tmp_path: Path, period: Any) -> None:
    length = (experiment().rows or 0) // 64 if period == "epoch" else period
    ranks = Ranks(tmp_path, "none", 0 if period == "epoch" else period)
    (way,) = whole(ranks, [], lk.ParameterAveraging(period=period))
    assert way.runs == pytest.approx([STEP + (MEETING - STEP) / length] * 2)


def test_a_run_without_two_periods_has_no_typical_step(tmp_path: Path) -> None:
    short = experiment(steps_per_epoch=30, strategy=lk.ParameterAveraging(period=24), workers=2)
    with pytest.raises(
        InvalidInput,
        match="has fewer than two blocks of 24 steps after the warm-up; train for more",
    ):
        step_seconds(Ranks(tmp_path).run(short, show=False))


def test_a_way_that_fails_is_left_out_with_its_words(tmp_path: Path) -> None:
    lines: list[str] = []
    tree, ring = (lk.AllReduce(algorithm=each) for each in ("tree", "ring"))
    (way,) = whole(Ranks(tmp_path, "tree"), lines, tree, ring)
    assert way.strategy == ring.to_json()
    assert len(way.runs) == 2
    (told,) = (line for line in lines if line.startswith("left out: "))
    assert told.endswith(": rank 1 has no memory left")


def test_no_network_with_a_name_is_calibrated() -> None:
    own = {(each.latency, each.bandwidth) for each in (*FULL.networks, *QUICK.networks)}
    assert not own & {(each.latency, each.bandwidth) for each in PRESETS.values()}


@pytest.mark.parametrize(
    ("notebook", "batch"), [("scaling", 1), ("scaling", 64), ("scaling", 512), ("break_even", 64)]
)
def test_what_a_notebook_verifies_was_not_calibrated(
    tmp_path: Path, notebook: str, batch: int
) -> None:
    calibration().save(tmp_path / "known.json")
    code = [each for each in cells.read(NOTEBOOKS / f"{notebook}.ipynb") if each.kind == "code"]
    names: dict[str, Any] = {}
    exec(code[0].source, names)
    names |= {"batch": batch, "calibration": str(tmp_path / "known.json")}
    exec(code[1].source, names)
    experiments = {"": names["experiments"].values()} if notebook == "break_even" else None
    verified = experiments or names["weak_experiments"]
    seen = {(each.workers, each.batch_size) for own in verified.values() for each in own}
    fields = names["calibration_experiments"], names["sizes"], QUICK.networks, 2
    known = experiments_to_run(*fields, lambda each: {"dataset": each.dataset, "verify": False})
    assert {each.workers for each in known} == {1, 2}
    assert not seen & {(each.workers, each.batch_size) for each in known}
