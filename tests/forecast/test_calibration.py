"""Test that a calibration is stored completely, and that invalid files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import labkit as lk
from labkit.common.errors import InvalidInput, LabkitError
from labkit.forecast import Calibration, LayerCost, ModelCost, Spread, StepCost, WayCost, model_of
from labkit.forecast.calibration_store import merged
from labkit.network import Network


def calibration() -> Calibration:
    exactly = Spread.of([1.0])
    steps = dict.fromkeys(("forward", "backward", "update", "other"), exactly)
    model = ModelCost(
        model={"model": "some"},
        layers=(LayerCost(name="last", kind="Dense", forward=1, backward=1, out=4),),
        steps=(StepCost(rows=8, threads=1, together=1, **steps),),
        read={8: exactly},
    )
    machine = {"cpu": "some"}
    return Calibration(made="2026-01-01T00:00:00+00:00", machine=machine, models=(model,))


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = calibration()
    made.save(tmp_path / "machine.json")
    assert Calibration.load(tmp_path / "machine.json") == made
    assert [path.name for path in tmp_path.iterdir()] == ["machine.json"]


def test_whole_steps_are_kept_and_later_ones_count(tmp_path: Path) -> None:
    network = Network(
        name="ring road", latency=1e-4, bandwidth=1e8, links={(0, 1): 1e8, (1, 0): 1e7}
    )
    fields = {"model": {"model": "mlp"}, "strategy": lk.AllReduce().to_json(), "threads": 1}
    fields |= {"workers": 2, "batch": 32}
    ways = [WayCost(**fields, network=each, runs=[1.0, 3.0, 2.0]) for each in (None, network)]
    old = calibration().model_copy(update={"ways": tuple(ways)})
    old.save(tmp_path / "machine.json")
    assert Calibration.load(tmp_path / "machine.json") == old
    assert ways[0].seconds.median == 2.0
    new = calibration().model_copy(update={"ways": (ways[1].model_copy(update={"runs": (4.0,)}),)})
    assert [way.runs for way in merged(old, new).ways] == [(1.0, 3.0, 2.0), (4.0,)]
    with pytest.raises(InvalidInput, match="runs"):
        WayCost(**fields, runs=[])


def test_its_name_is_its_content() -> None:
    assert calibration().hash8 == calibration().hash8
    assert calibration().hash8 != calibration().model_copy(update={"made": "later"}).hash8


def test_what_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInput, match="is not a file; write one with `labkit calibrate -o FILE`"
    ):
        Calibration.load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("no JSON")
    with pytest.raises(InvalidInput, match="holds no calibration"):
        Calibration.load(tmp_path / "text.json")


def test_one_that_knows_no_kinds_of_layers_is_stale(tmp_path: Path) -> None:
    calibration().save(tmp_path / "old.json")
    fields = json.loads((tmp_path / "old.json").read_text())
    del fields["models"][0]["layers"][0]["kind"]
    (tmp_path / "old.json").write_text(json.dumps(fields | {"schema_version": 1}))
    with pytest.raises(LabkitError, match="of another labkit version; measure again"):
        Calibration.load(tmp_path / "old.json")


def test_a_spread_is_the_median_and_the_middle_nine_tenths() -> None:
    spread = Spread.of([float(each) for each in range(101)])
    assert (spread.low, spread.median, spread.high, spread.count) == (5, 50, 95, 101)


def test_rows_do_not_change_what_a_model_takes() -> None:
    one, other = (
        lk.Experiment(dataset="synthetic", dataset_options={"rows": rows}) for rows in (64, 128)
    )
    assert model_of(one) == model_of(other)
    assert model_of(one) != model_of(one.replace(optimizer="adam"))
