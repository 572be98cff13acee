"""Test that runs, checkpoints and calibrations written under former names can be read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import labkit as lk
from labkit.cli.app import app
from labkit.cli.shared_options import experiment_of
from labkit.common import renamed as common_renamed
from labkit.common.errors import InvalidInput
from labkit.common.renamed import CLASSES, OPTIONS, rename_classes
from labkit.compression import COMPRESSORS
from labkit.experiment import Experiment
from labkit.forecast import Calibration
from labkit.jobs import listing
from labkit.records import shape
from labkit.records.checkpoints import FOLDER, read_manifest
from labkit.strategies import STRATEGIES
from tests.sample_calibrations import calibration

FORMER = Path(__file__).parent / "former"  # runs that were written with schema 1


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return shutil.copytree(FORMER, tmp_path / "runs" / "interactive").parent


def named(runs: Path, name: str) -> lk.Run:
    (run,) = (run for run in lk.load_runs(runs) if run.experiment["name"] == name)
    return run


def test_fields_of_experiments_have_their_names_of_today(runs: Path) -> None:
    compressed, servers = named(runs, "compressed").experiment, named(runs, "servers").experiment
    assert compressed["steps_per_epoch"] == 2
    assert compressed["batch_weights"] == [1.0, 3.0]
    assert compressed["data_partition"] == "by_label"
    assert compressed["on_nonfinite"] == "clip"
    assert (compressed["input_mode"], compressed["verify"]) == ("shard", False)
    assert compressed["strategy"]["compression_stats_every"] == 1
    assert servers["stragglers"]["1"]["distribution"] == "constant"
    assert servers["network"]["stragglers"]["0"]["compute"] == 1.5
    assert servers["virtual"]["compute_time"]["distribution"] == "lognormal"
    assert servers["virtual"]["message_delays"] == [[0, 1, 0.5]]
    assert servers["virtual"]["worker_failures"] == [[2, 0.02]]
    assert servers["strategy"]["staleness_correction"] == "mean"
    averaged = named(runs, "averaged").experiment["strategy"]
    assert (averaged["outer_optimizer"], averaged["optimizer_state"]) == ("nesterov", "average")


def test_each_experiment_is_one_of_today(runs: Path) -> None:
    for run in lk.load_runs(runs):
        experiment = Experiment(**run.experiment)
        assert json.loads(json.dumps(experiment.to_json())) == {"schema": 2} | run.experiment


def test_tables_and_metrics_are_found(runs: Path) -> None:
    assert not named(runs, "compressed").compression_stats.empty
    former = {"bad_numbers": {"steps": 1}, "stretches": [{"step": 0}]}
    today = {"nonfinite": {"steps": 1}, "membership_history": [{"step": 0}]}
    assert shape.with_names_of_today("metrics.json", former) == today
    assert not named(runs, "servers").update_log.empty


def test_a_folder_is_listed_compared_and_reported(runs: Path, tmp_path: Path) -> None:
    rows, skipped = listing.jobs_and_runs(runs)
    assert (len(rows), skipped) == (len(list(FORMER.iterdir())), [])
    assert {"on_nonfinite", "message_delays"} <= {*lk.table(lk.load_runs(runs)).columns}
    told = CliRunner().invoke(app, ["report", str(runs), "-o", str(tmp_path / "report.html")])
    assert told.exit_code == 0, told.output


def test_a_record_of_a_run_is_a_file_to_start_from(runs: Path) -> None:
    run = named(runs, "servers")
    assert experiment_of(run.path / "experiment.json", {}) == Experiment(**run.experiment)


def test_a_checkpoint_is_of_the_experiment_that_goes_on(runs: Path) -> None:
    run = named(runs, "kept")
    (kept,) = (run.path / FOLDER).iterdir()
    assert read_manifest(kept)["experiment"] == {"schema": 2} | run.experiment


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_to_the_same_weights(runs: Path, cluster: Any) -> None:
    run = named(runs, "kept")
    experiment = Experiment(**run.experiment)
    whole = cluster.run(experiment, show=False)
    resumed = cluster.run(experiment, show=False, resume=run.path)
    assert resumed.status["resumed"][0]["step"] == 15
    assert resumed.metrics["test_loss"] == whole.metrics["test_loss"]


def test_a_calibration_names_classes_of_today(tmp_path: Path) -> None:
    known = calibration(lk.SignSGD())
    path = tmp_path / "known.json"
    known.save(path)
    path.write_text(path.read_text().replace("SignSGD", "SignMajority"))
    assert Calibration.load(path) == known


KINDS: dict[str, Any] = {**STRATEGIES, **COMPRESSORS}


@pytest.mark.parametrize(("old", "new"), CLASSES.items())
def test_former_classes_are_classes_of_today(old: str, new: str) -> None:
    assert new in KINDS
    assert rename_classes([{"inner": old}]) == [{"inner": new}]
    with pytest.raises(AttributeError, match=f"its name is now '{new}'"):
        getattr(lk, old)


@pytest.mark.parametrize("kind", OPTIONS)
def test_former_options_are_options_of_today(kind: str) -> None:
    for old, new in OPTIONS[kind].items():
        assert new in KINDS[kind].model_fields
        assert rename_classes({"name": kind, old: 1}) == {"name": kind, new: 1}
        with pytest.raises(InvalidInput, match=f"did you mean '{new}'"):
            KINDS[kind](**{old: 1})


@pytest.mark.parametrize("old", [*shape.EXPERIMENT, *shape.VIRTUAL_CLOCK])
def test_a_former_field_is_refused_with_its_name_of_today(old: str, tmp_path: Path) -> None:
    new = shape.EXPERIMENT.get(old, "virtual")
    with pytest.raises(InvalidInput, match=f"did you mean '{new}'"):
        Experiment(**{old: 1})
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump({old: 1}))
    told = CliRunner().invoke(app, ["run", str(tmp_path / "experiment.yaml"), "--check"])
    assert (told.exit_code, f"did you mean '{new}'" in told.output) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "new"),
    [
        (["warm"], "prestart"),
        (["peers", "list"], "frameworks"),
        (["bench", "exchange", "--where"], "--breakdown"),
        (["forecast", "--node-hour", "2"], "--price-per-node-hour"),
    ],
)
def test_former_commands_and_options_are_refused(arguments: list[str], new: str) -> None:
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 2
    assert new in told.output


def test_former_attributes_and_arguments_are_refused() -> None:
    with pytest.raises(AttributeError, match="its name is now 'stragglers'"):
        _ = Experiment().slow  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="its name is now 'to_dataframe'"):
        _ = lk.frame  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="its name is now 'compression_stats'"):
        _ = lk.Run(Path()).microscope  # type: ignore[attr-defined]
    with pytest.raises(InvalidInput, match="did you mean 'timeout'"):
        lk.Cluster(limit=5)  # type: ignore[call-arg]


def test_no_name_of_today_is_a_former_name_of_itself() -> None:
    assert not [old for names in common_renamed.FORMER for old, new in names.items() if old == new]
