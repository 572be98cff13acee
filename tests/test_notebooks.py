"""Test that notebooks keep their contract, and run from end to end with small values."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from listening import watched
from sample_calibrations import calibration
from sample_runs import write_run

from labkit.cluster.lease import HOLD, Hold
from labkit.compression import Float16
from labkit.experiment import Experiment
from labkit.jobs.gallery.check import check_notebook, check_specs
from labkit.jobs.notebook import execute
from labkit.jobs.parameters import declared
from labkit.records.run import load_runs
from labkit.strategies import AllReduce, ParameterServer, Pipeline
from labkit.worker.devices import DeviceRequest

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
PLOTLY = "application/vnd.plotly.v1+json"
TOP_K = {"name": "ErrorFeedback", "inner": {"name": "TopK", "ratio": 0.01}}
SMALL = {
    "dataset": "digits",
    "model_options": {"widths": [64]},
    "batch_size": 64,
    "epochs": 2,
    "steps_per_epoch": 12,
    "repeats": 2,
}


@pytest.fixture(scope="module", autouse=True)
def engines_stay_up() -> Iterator[None]:
    """Let notebooks with equal clusters share engines, as the members of a sweep do."""
    held = Hold()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOLD, str(held.path))
        yield
    held.release()


def outputs(path: Path) -> list[dict[str, Any]]:
    cells = json.loads((path / "output.ipynb").read_text())["cells"]
    return [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]


def said(path: Path) -> str:
    """Return all text that the cells have printed."""
    cells = json.loads((path / "output.ipynb").read_text())["cells"]
    printed = [output.get("text", "") for cell in cells for output in cell.get("outputs", [])]
    return "".join("".join(each) for each in printed)


def text(data: dict[str, Any], kind: str) -> str:
    return "".join(data.get(kind, ""))


def test_the_parameters_of_collectives_mean_what_they_mean_in_an_experiment() -> None:
    parameters = declared(NOTEBOOKS / "collectives.ipynb")
    shared = {name: p for name, p in parameters.items() if name in Experiment.model_fields}
    assert list(shared) == ["workers", "network", "repeats"]
    Experiment(**{name: p.default for name, p in shared.items()})
    assert all(parameter.help for parameter in parameters.values())


@pytest.mark.slow
@pytest.mark.alone
def test_collectives_measures_what_it_predicts(tmp_path: Path) -> None:
    given = {"sizes": [65536, 16777216], "repeats": 5, "ranks_drawn": 3, "ranks_simulated": 5}
    job = execute(NOTEBOOKS / "collectives.ipynb", given | {"algorithm": "butterfly"}, tmp_path)
    assert job.state == "completed", job.cause
    found = outputs(job.path)
    figures = [data[PLOTLY] for data in found if PLOTLY in data]
    titles = [figure["layout"]["title"]["text"] for figure in figures]
    assert [title.split(",")[0].split(" · ")[0] for title in titles] == [
        "Butterfly allreduce",
        "Master worker allreduce",
        "Allreduce on 5 ranks",
        "Link utilisation",
        "Predicted and measured",
        "Predicted and measured",
    ]
    assert len(figures[0]["frames"]) == 1 + 3  # 3 ranks need the rounds fold, swap and unfold
    assert all("simulation" in title for title in titles[:4])
    assert all("wall clock" in title for title in titles[4:])
    readings = [text(data, "text/markdown") for data in found if "text/markdown" in data]
    assert "22 of 22 rows equal the formula" in readings[0]
    # The measurement on this machine decides which of the two is slower.
    assert re.search(r"At 16 MiB, \w+ takes [\d.]+ times as long as \w+ \(measured", readings[-1])
    assert "wrong sums" not in "".join(readings)


@pytest.mark.slow
def test_data_parallel_runs_from_the_command_line_as_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["-p", "workers", "2", "-p", "epochs", "3", "-p", "scaling", "weak"]
    labkit = Path(sys.executable).with_name("labkit")
    command = [labkit, "run", NOTEBOOKS / "data_parallel.ipynb", *given]
    monkeypatch.delenv(HOLD)  # without the shared engines
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "result: runs/data_parallel/001_" in done.stdout
    one, two = load_runs(tmp_path / "runs")
    assert [run.metrics["equivalence"]["verdict"] for run in (one, two)] == [
        "not applicable",
        "passed",
    ]
    for run, workers in ((one, 1), (two, 2)):
        kept = json.loads((run.path / "metrics.json").read_text())
        assert kept["test_accuracy"] > 0.7
        assert kept["samples_per_second"] > 0
        steps = 3 * -(-1437 // (128 * workers))  # one row per step and rank
        assert len(run.history) == workers * steps


def test_the_parameters_of_scheduling_mean_what_they_mean_in_an_experiment() -> None:
    parameters = declared(NOTEBOOKS / "scheduling.ipynb")
    shared = {name: p for name, p in parameters.items() if name in Experiment.model_fields}
    assert list(shared) == [
        "workers",
        "network",
        "model_options",
        "batch_size",
        "steps_per_epoch",
        "seed",
    ]
    own = {name: parameters[name].default for name in ("algorithm", "bucket_bytes")}
    given = {name: p.default for name, p in shared.items()}
    Experiment(**given, dataset="synthetic", strategy=AllReduce(**own))
    assert all(parameter.help for parameter in parameters.values())


@pytest.mark.exhaustive
def test_scheduling_shows_the_timelines_of_all_schedules_and_what_they_hid(tmp_path: Path) -> None:
    given = {"model_options": {"widths": [64, 64]}, "batch_size": 64, "bucket_bytes": 8192}
    job = execute(NOTEBOOKS / "scheduling.ipynb", given | {"steps_per_epoch": 14}, tmp_path)
    assert job.state == "completed", job.cause
    found = outputs(job.path)
    [figure] = [data[PLOTLY] for data in found if PLOTLY in data]
    assert figure["layout"]["title"]["text"] == "Timeline, 2 ranks · wall clock · network 1GbE"
    schedules = ("sequential", "overlap", "priority", "staggered")
    panels = " ".join(note["text"] for note in figure["layout"]["annotations"])
    assert all(f"<b>schedule {name}</b>" in panels for name in schedules)
    readings = [text(data, "text/markdown") for data in found if "text/markdown" in data]
    assert all(f"**schedule {name}**: a step takes" in readings[0] for name in schedules)
    runs = load_runs(job.path)
    assert [run.metrics["equivalence"]["verdict"] for run in runs] == ["passed"] * 4
    for run in runs:
        trace = json.loads((run.path / "trace.json").read_text())
        assert {event.get("cat") for event in trace["traceEvents"]} >= {"communicate", "wait"}


def test_the_parameters_of_placement_can_be_asked() -> None:
    parameters = declared(NOTEBOOKS / "placement.ipynb")
    shared = {
        name: p.default for name, p in parameters.items() if name in DeviceRequest.model_fields
    }
    assert len(shared) == 8
    DeviceRequest(**{name: tuple(v) if isinstance(v, list) else v for name, v in shared.items()})
    assert not set(parameters) & {"workers", "strategy"}  # no parameter belongs to an experiment
    assert all(parameter.help for parameter in parameters.values())


@pytest.mark.exhaustive
def test_placement_draws_what_ran_and_holds_plans_against_it(tmp_path: Path) -> None:
    given = yaml.safe_load((NOTEBOOKS / "check.yaml").read_text())["placement"][0]
    job = execute(NOTEBOOKS / "placement.ipynb", given, tmp_path)
    assert job.state == "completed", job.cause
    found = outputs(job.path)
    titles = [data[PLOTLY]["layout"]["title"]["text"] for data in found if PLOTLY in data]
    assert titles[:3] == [
        "The step with a device scope a tower · wall clock · network not emulated",
        "Step time by placement, 2 devices · simulation and wall clock · network by panel",
        "Planned placements of a step's operations · simulation · network in each title",
    ]
    readings = [text(data, "text/markdown") for data in found if "text/markdown" in data]
    assert (
        "MatMul of int32: TensorFlow's registry has a kernel for CPU, but none for GPU"
        in readings[0]
    )
    assert "placement log of this step names" in readings[0]
    assert "losses are bitwise equal" in readings[-1]
    assert (
        "The number of tensors and control signals that TensorFlow sent between devices equals "
        "the number in each plan" in readings[-1]
    )
    assert "memory exceeded: all on one" in readings[-1]


def test_the_parameters_of_compression_mean_what_they_mean_in_an_experiment() -> None:
    parameters = declared(NOTEBOOKS / "compression.ipynb")
    shared = {name: p.default for name, p in parameters.items() if name in Experiment.model_fields}
    assert {"workers", "network", "dataset", "repeats", "seed", "batch_size"} <= set(shared)
    own = {
        name: parameters[name].default for name in ("algorithm", "methods", "examined_compressor")
    }
    for network in shared.pop("network"):
        for method in [*own["methods"], own["examined_compressor"]]:
            strategy = AllReduce(algorithm=own["algorithm"], compressor=method)
            Experiment(**shared, network=network, strategy=strategy)
    assert all(parameter.help for parameter in parameters.values())


@pytest.mark.exhaustive
def test_compression_says_who_wins_where_and_what_error_feedback_does(tmp_path: Path) -> None:
    given = SMALL | {"network": ["100Mb"], "methods": ["Int8"], "examined_compressor": TOP_K}
    given |= {"feedback_seeds": 2, "feedback_steps": 40}
    job = execute(NOTEBOOKS / "compression.ipynb", given, tmp_path)
    assert job.state == "completed", job.cause
    found = outputs(job.path)
    titles = [data[PLOTLY]["layout"]["title"]["text"] for data in found if PLOTLY in data]
    assert [title.split(" · ")[0] for title in titles] == [
        "Accuracy × bytes × seconds",
        "Parts of the step time",
        "Fastest method by bandwidth",
        "Compression statistics",
        "Learning",
    ]
    assert all("wall clock · network" in title for title in titles)
    readings = [text(data, "text/markdown") for data in found if "text/markdown" in data]
    assert "**Int8** against no compression" in readings[1]
    assert "the fastest method is" in readings[1]
    assert "On the data set digits, after 40 steps on 2 workers" in readings[2]
    assert "of 2 seeds**" in readings[2]
    assert "The question is about MNIST; these figures are of digits" in said(job.path)
    runs = load_runs(job.path)
    assert len(runs) == 2 + 1 + 2
    assert {run.metrics["equivalence"]["verdict"] for run in runs} == {"passed"}


def test_the_parameters_of_mixed_precision_mean_what_they_mean_in_an_experiment() -> None:
    parameters = declared(NOTEBOOKS / "mixed_precision.ipynb")
    shared = {name: p.default for name, p in parameters.items() if name in Experiment.model_fields}
    assert {"workers", "network", "precision", "dataset", "repeats"} <= set(shared)
    for precision in shared.pop("precision"):
        for compressor in parameters["wire_compressors"].default:
            Experiment(**shared, precision=precision, strategy=AllReduce(compressor=compressor))
    assert all(parameter.help for parameter in parameters.values())


@pytest.mark.exhaustive
def test_mixed_precision_tells_the_computation_from_the_wire(tmp_path: Path) -> None:
    job = execute(NOTEBOOKS / "mixed_precision.ipynb", SMALL | {"repeats": 1}, tmp_path)
    assert job.state == "completed", job.cause
    found = outputs(job.path)
    titles = [data[PLOTLY]["layout"]["title"]["text"] for data in found if PLOTLY in data]
    assert titles == [
        "Accuracy × bytes × seconds · wall clock · network 1GbE",
        "Parts of the step time · wall clock · network 1GbE",
        "Fastest method by bandwidth · simulation · measured: wall clock · network 1GbE",
    ]
    readings = [text(data, "text/markdown") for data in found if "text/markdown" in data]
    assert "precision mixed_float16** against no compression, precision float32" in readings[0]
    assert "precision float64** keeps" in readings[1]
    assert readings[2] == (
        "Skipped: step 5 by all ranks. The ranks had the same loss scale after every step."
    )
    runs = load_runs(job.path)
    payloads = [run.metrics["payload_bytes_per_step"] for run in runs]
    assert [each / payloads[0] for each in payloads] == [1, 1, 1, 2, 0.5, 0.5]
    policies = runs[:4]  # runs without a compressor are exact in every precision
    assert [run.metrics["equivalence"]["verdict"] for run in policies] == ["passed"] * 4


def test_the_parameters_of_compare_are_none_of_an_experiment() -> None:
    parameters = declared(NOTEBOOKS / "compare.ipynb")
    assert list(parameters) == ["runs", "x", "y", "columns", "rows"]
    assert not set(parameters) & set(Experiment.model_fields)
    assert all(parameter.help for parameter in parameters.values())


@pytest.mark.slow
def test_compare_shows_any_set_of_runs_and_says_what_to_do_without(tmp_path: Path) -> None:
    for workers in (1, 2):
        for rate in (0.1, 0.2):
            write_run(tmp_path / f"some-{workers}", workers=workers, learning_rate=rate)
    write_run(tmp_path / "other", model="cnn")
    job = execute(NOTEBOOKS / "compare.ipynb", {"runs": str(tmp_path / "some-*")}, tmp_path)
    assert job.state == "completed", job.cause
    found = outputs(job.path)
    titles = [data[PLOTLY]["layout"]["title"]["text"] for data in found if PLOTLY in data]
    assert [title.split(" · ")[0] for title in titles] == [
        "4 runs",
        "Accuracy × bytes × seconds",
        "Parameters and results",
        "Test accuracy by training time, s",
        "Results by workers and learning rate",
    ]
    readings = [text(data, "text/markdown") for data in found if "text/markdown" in data]
    assert "4 runs that differ in workers, learning_rate" in readings[-1]
    (tmp_path / "empty").mkdir()
    job = execute(NOTEBOOKS / "compare.ipynb", {"runs": str(tmp_path / "empty")}, tmp_path)
    assert job.state == "failed"
    assert "run a notebook first (labkit run notebooks/tour.ipynb;" in str(job.cause)


def test_the_parameters_of_pipeline_mean_what_they_mean_in_an_experiment() -> None:
    parameters = declared(NOTEBOOKS / "pipeline.ipynb")
    shared = {name: p.default for name, p in parameters.items() if name in Experiment.model_fields}
    assert {"workers", "network", "model_options", "batch_size", "steps_per_epoch"} <= set(shared)
    own = {name: parameters[name].default for name in ("partition", "recompute")}
    for schedule in parameters["schedules"].default:
        for count in parameters["microbatches"].default:
            strategy = Pipeline(schedule=schedule, microbatches=count, **own)
            Experiment(**shared, strategy=strategy)
    assert all(parameter.help for parameter in parameters.values())


@pytest.mark.slow
def test_pipeline_sets_the_measured_beside_the_predicted(tmp_path: Path) -> None:
    given = {"model_options": {"widths": [64, 64, 64]}, "batch_size": 64, "microbatches": [1, 4]}
    given |= {"schedules": ["1f1b", "interleaved"], "network": "1GbE", "partition": "parameters"}
    job = execute(NOTEBOOKS / "pipeline.ipynb", given | {"microbatches": [1, 5]}, tmp_path)
    assert job.state == "failed"  # refused in one sentence: the two groups are unequal
    assert "5 make 2 unequal groups; give 4 or 6 micro-batches" in str(job.cause)
    (lost,) = load_runs(job.path)  # the run failed before any rank started
    assert "schedules" in lost.experiment
    job = execute(NOTEBOOKS / "pipeline.ipynb", given | {"schedules": ["1f1b", "gpipe"]}, tmp_path)
    assert job.state == "completed", job.cause
    found = outputs(job.path)
    titles = [data[PLOTLY]["layout"]["title"]["text"] for data in found if PLOTLY in data]
    assert titles == [
        "Pipeline gpipe, 2 stages, 4 micro-batches · schedule, no clock",
        "Pipeline · simulation · network none (messages take no time)",
        "Pipeline · wall clock and simulation · network 1GbE",
        "Pipeline speed-up · wall clock · network 1GbE, none (by run)",
    ]
    readings = [text(data, "text/markdown") for data in found if "text/markdown" in data]
    assert readings[0].count("bubble simulated with the measured times of the stages") == 4
    assert (
        "**1f1b** on 2 ranks: from 1 to 4 micro-batches, the speed-up changes from" in readings[0]
    )
    assert "largest difference:" in said(job.path)
    verdicts = [run.metrics["equivalence"]["verdict"] for run in load_runs(job.path)]
    assert sorted(verdicts) == ["not applicable", *["passed"] * 4]


def test_the_parameters_of_model_parallel_mean_what_they_mean_in_an_experiment() -> None:
    parameters = declared(NOTEBOOKS / "model_parallel.ipynb")
    shared = {name: p.default for name, p in parameters.items() if name in Experiment.model_fields}
    assert {"workers", "network", "model_options", "optimizer", "learning_rate"} <= set(shared)
    for method in parameters["methods"].default:
        Experiment(**shared, strategy=method)
    assert all(parameter.help for parameter in parameters.values())


@pytest.mark.slow
def test_model_parallel_compares_all_cuts_of_one_model(tmp_path: Path) -> None:
    given = {"model_options": {"widths": [64, 64]}, "batch_size": 64, "steps_per_epoch": 14}
    cuts = ["Layerwise", {"name": "Pipeline", "microbatches": 2}, "DelayedGradients"]
    given |= {"methods": [*cuts, "TensorParallel"]}
    job = execute(NOTEBOOKS / "model_parallel.ipynb", given, tmp_path)
    assert job.state == "completed", job.cause
    found = outputs(job.path)
    titles = [data[PLOTLY]["layout"]["title"]["text"] for data in found if PLOTLY in data]
    assert [title.split(" · ")[0] for title in titles] == [
        "Pipeline",
        "Bytes per layer and step",
        "Traffic between 1 × 2 machines",
        "5 runs",
    ]
    readings = [text(data, "text/markdown") for data in found if "text/markdown" in data]
    names = ("Layerwise", "Pipeline", "DelayedGradients", "TensorParallel")
    assert all(f"**{name}**" in readings[0] for name in names)
    assert "Least memory on a rank: **" in readings[0]
    verdicts = [run.metrics["equivalence"]["verdict"] for run in load_runs(job.path)]
    assert verdicts.count("passed") == 4
    assert verdicts.count("not applicable") == 2  # one process, and the intentionally stale run


@pytest.mark.parametrize("name", ["parameter_servers", "replay"])
def test_the_parameters_of_played_notebooks_mean_what_they_mean_in_an_experiment(name: str) -> None:
    parameters = declared(NOTEBOOKS / f"{name}.ipynb")
    shared = {name: p.default for name, p in parameters.items() if name in Experiment.model_fields}
    assert {"workers", "clock", "network", "seed"} <= set(shared)
    servers = parameters["servers"].default
    for clock in ("virtual", "wall"):
        given = shared | {"clock": clock}
        asked = Experiment(**given, strategy=ParameterServer(servers))
        assert asked.ranks == (1 if clock == "virtual" else asked.workers + servers)


@pytest.mark.slow
def test_parameter_servers_says_where_the_cliff_is_and_which_shapes_came(tmp_path: Path) -> None:
    given = {
        "virtual_workers": [1, 4],
        "servers": 2,
        "steps_per_epoch": 3,
        "repeats": 2,
        "clock": "virtual",
    }
    job = execute(NOTEBOOKS / "parameter_servers.ipynb", given, tmp_path)
    assert job.state == "completed", job.cause
    found = outputs(job.path)
    titles = [data[PLOTLY]["layout"]["title"]["text"] for data in found if PLOTLY in data]
    assert titles == [
        "Parameter servers and allreduce · virtual clock · network 1GbE",
        "Update log, 4 workers · virtual clock · network 1GbE",
    ]
    (reading,) = [text(data, "text/markdown") for data in found if "text/markdown" in data]
    assert "On 4 workers: **AllReduce**" in reading
    for shape in (
        "More servers give a higher throughput",
        "Co-located servers",
        "A backup worker shortens",
    ):
        assert shape in reading
    held = [run for run in load_runs(job.path) if run.experiment["verify"]]
    assert [run.metrics["equivalence"]["verdict"] for run in held] == ["passed"] * 3


@pytest.mark.exhaustive
def test_transport_tells_memory_from_tcp_and_measured_from_predicted(tmp_path: Path) -> None:
    given = {"sizes": [8], "compared_size": 65536, "transports": ["two_sided", "one_sided"]}
    given |= {"namespaces": False, "rounds": 1, "epochs": 1, "widths": [16], "trainings": 1}
    job = execute(NOTEBOOKS / "transport.ipynb", given, tmp_path)
    assert job.state == "completed", job.cause
    found = outputs(job.path)
    titles = [data[PLOTLY]["layout"]["title"]["text"] for data in found if PLOTLY in data]
    assert [title.split(" · ")[0] for title in titles] == [
        "Time to transfer an array, by transport",
        "Training step by transport",
    ]
    (reading,) = [text(data, "text/markdown") for data in found if "text/markdown" in data]
    assert "64 KiB, RDMA, predicted and not measured: **one_sided**" in reading
    assert "Ratio of the two-sided to the one-sided time by shared memory, 64 KiB" in reading
    assert reading.count("Training step, ") >= 2


@pytest.mark.exhaustive
def test_hosts_measures_sums_over_a_link_beside_what_is_predicted(tmp_path: Path) -> None:
    given = yaml.safe_load((NOTEBOOKS / "check.yaml").read_text())["hosts"][0]
    given |= {"workers": 3, "repeats": 2, "widths": [16]}
    job = execute(NOTEBOOKS / "hosts.ipynb", given, tmp_path)
    assert job.state == "completed", job.cause
    found = outputs(job.path)
    titles = [data[PLOTLY]["layout"]["title"]["text"] for data in found if PLOTLY in data]
    assert [title.split(" · ")[0] for title in titles] == [
        "Speed-up over the ring",
        "Predicted and measured, 3 ranks",
        "Parts of the step time",
    ]
    reading = [text(data, "text/markdown") for data in found if "text/markdown" in data][-1]
    assert re.search(r"Speed-up of \*\*two_level\*\* over ring, 1 MiB, predicted \d", reading)
    assert "Training step, speed-up of **two_level** over ring: " in reading
    ring, levels = load_runs(job.path)
    assert [run.metrics["equivalence"]["verdict"] for run in (ring, levels)] == ["passed"] * 2
    if ring.experiment["network"] is None:  # a testbed was available
        assert "3 ranks on 2 hosts of an emulated testbed" in said(job.path)
        sent = [run.metrics["link_bytes_per_step"] for run in (ring, levels)]
        # The ring sends two thirds of 2n bytes, and two_level sends n bytes.
        assert sent[0] == pytest.approx(4 / 3 * sent[1], rel=0.05)


@pytest.mark.exhaustive
def test_faults_have_a_league_of_who_goes_on(tmp_path: Path) -> None:
    given = yaml.safe_load((NOTEBOOKS / "check.yaml").read_text())["faults"][0]
    job = execute(NOTEBOOKS / "faults.ipynb", given, tmp_path)
    assert job.state == "completed", job.cause
    found = outputs(job.path)
    titles = [data[PLOTLY]["layout"]["title"]["text"] for data in found if PLOTLY in data]
    assert titles == ["Faults · virtual clock · network 1GbE"] * 2
    reading = [text(data, "text/markdown") for data in found if "text/markdown" in data][-1]
    assert re.search(r"Did not finish: \d+ of \d+; .*\*\*AllReduce\*\*", reading)
    assert "Keeps the most of its goodput: **" in reading


@pytest.mark.slow
def test_scaling_is_forecast_and_what_can_be_run_stands_on_the_curve(tmp_path: Path) -> None:
    given = yaml.safe_load((NOTEBOOKS / "check.yaml").read_text())["scaling"][0]
    calibration().save(tmp_path / "machine.json")
    given |= {"model_options": {}, "calibration": str(tmp_path / "machine.json")}
    job = execute(NOTEBOOKS / "scaling.ipynb", given, tmp_path)
    assert job.state == "completed", job.cause
    found = outputs(job.path)
    titles = [data[PLOTLY]["layout"]["title"]["text"] for data in found if PLOTLY in data]
    assert len(titles) == 3
    assert all(title.startswith("Scaling · forecast · 1GbE") for title in titles)
    readings = [text(data, "text/markdown") for data in found if "text/markdown" in data]
    assert "1 run with several ranks, median error of the forecasts" in readings[0]
    assert re.search(r"\*\*ring\*\* keeps an efficiency of 70%: up to \d+ worker", readings[-1])
    assert "Price to reach the target with 2 workers: " in readings[-1]


@pytest.mark.exhaustive
def test_break_even_begins_with_the_null_hypothesis_and_runs_what_it_says(tmp_path: Path) -> None:
    given = yaml.safe_load((NOTEBOOKS / "check.yaml").read_text())["break_even"][0]
    calibration(Float16()).save(tmp_path / "machine.json")  # to calibrate takes minutes
    given |= {"model_options": {}, "calibration": str(tmp_path / "machine.json")}
    job = execute(NOTEBOOKS / "break_even.ipynb", given, tmp_path)
    assert job.state == "completed", job.cause
    found = outputs(job.path)
    titles = [data[PLOTLY]["layout"]["title"]["text"] for data in found if PLOTLY in data]
    assert titles[0].startswith("Fastest way · forecast · mlp")
    reading = [text(data, "text/markdown") for data in found if "text/markdown" in data][-1]
    assert re.match(
        r"- Settings with compression on links of at least 10 Gb/s that .*: \d of 2\.", reading
    )
    assert re.search(r"Run: \*\*float16, 1GbE\*\*: predicted .* measured .* error", reading)


@pytest.mark.slow
def test_a_run_that_is_played_again_comes_out_the_same(tmp_path: Path) -> None:
    asked = check_specs([NOTEBOOKS / "replay.ipynb"])[0]
    job = execute(asked.notebook, asked.values, tmp_path)
    assert job.state == "completed", job.cause
    assert check_notebook(asked, job.path).faults == ()  # its words follow from its numbers
    first, again, slower = load_runs(job.path)
    assert [run.metrics["equivalence"]["verdict"] for run in (first, slower)] == ["passed"] * 2
    weights = [run.model().get_weights() for run in (first, again, slower)]
    assert all((one == other).all() for one, other in zip(*weights[:2], strict=True))
    assert any((one != other).any() for one, other in zip(*weights[::2], strict=True))


@pytest.mark.battery(0, 1)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "staleness",
            (
                "**softsync 4, at α₀/τ**, ",
                "staleness** (Gupta 2015): ",
                "with rare exchanges** (Dean 2012): ",
            ),
        ),
        ("asynchronous", ("With one slow worker", "stale synchronous, s = 2", "downpour, every 4")),
        (
            "local_training",
            (
                *("**every step**, ", "**averaging, every 8**, ", "Nesterov, every 2"),
                *("Elastic averaging tolerates long periods", "without delayed Nesterov"),
                *(
                    "**codistilled by weights**, ",
                    "Accuracy of an ensemble trained on as many gradients",
                ),
            ),
        ),
        (
            "gossip",
            (
                "**all workers**, ",
                "spectral gap 1, consensus distance ",
                "**random pairs**, ",
                "An epoch of asynchronous gossip",
            ),
        ),
        ("scheduled_blocks", ("**priority**", "**round_robin**", "**random**", "relative gap")),
        (
            "large_batch",
            ("- **LAMB, square root, warm-up**: with 1 worker", "Fastest to 60% accuracy: **"),
        ),
    ],
)
def test_notebooks_on_the_virtual_clock_read_their_runs(
    name: str, said: tuple[str, ...], tmp_path: Path
) -> None:
    given = yaml.safe_load((NOTEBOOKS / "check.yaml").read_text())[name][0]
    job = execute(NOTEBOOKS / f"{name}.ipynb", given, tmp_path)
    assert job.state == "completed", job.cause
    texts = [text(data, "text/markdown") for data in outputs(job.path) if "text/markdown" in data]
    assert all(any(each in reading for reading in texts) for each in said), texts
    held = [run for run in load_runs(job.path) if run.experiment["verify"]]
    verdicts = [run.metrics["equivalence"]["verdict"] for run in held]
    assert verdicts.count("passed") == len(verdicts) - {"asynchronous": 1, "local_training": 2}.get(
        name, 0
    )


@pytest.mark.exhaustive
def test_gossip_runs_on_ranks(tmp_path: Path) -> None:
    given = yaml.safe_load((NOTEBOOKS / "check.yaml").read_text())["gossip"][0]
    small = {"clock": "wall", "workers": 2, "rows": 120, "epochs": 1, "repeats": 1}
    more = {"topologies": ["ring"], "network": "1GbE", "straggler_factor": 2.0}
    job = execute(NOTEBOOKS / "gossip.ipynb", given | small | more, tmp_path)
    assert job.state == "completed", job.cause
    runs = load_runs(job.path)
    assert [run.experiment["clock"] for run in runs] == ["wall"] * 5
    sent = [run.metrics["wire_bytes_per_step"] for run in runs]
    assert sent[1] == pytest.approx(sent[0], rel=0.01)  # a pair's allreduce sends as many bytes


@pytest.mark.exhaustive
def test_tf_distribute_holds_tensorflows_strategy_and_runs_a_script_on_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HOLD)  # the script needs ranks on which TensorFlow has not started
    given = yaml.safe_load((NOTEBOOKS / "check.yaml").read_text())["tf_distribute"][0]
    job = execute(NOTEBOOKS / "tf_distribute.ipynb", given | {"kinds": ["mirrored"]}, tmp_path)
    assert job.state == "completed", job.cause
    runs = load_runs(job.path)
    assert [run.experiment["strategy"]["name"] for run in runs] == ["TFDistribute", "AllReduce"]
    assert [run.metrics["equivalence"]["verdict"] for run in runs] == ["passed"] * 2
    trained = re.findall(r"rank (\d) of 2: losses (.+), weights \[(.+)\]", said(job.path))
    assert sorted(rank for rank, _, _ in trained) == ["0", "1"]
    losses = [[float(each) for each in told.split()] for _, told, _ in trained]
    assert all(first > last > 0 for first, _, last in losses)
    assert losses[0] != losses[1]  # each rank has its own samples
    assert len({weights for _, _, weights in trained}) == 1
    readings = [text(data, "text/markdown") for data in outputs(job.path)]
    assert any("final accuracy" in reading for reading in readings)


@pytest.mark.exhaustive
def test_dataflow_traces_a_step_sweeps_threads_and_feeds_it_in_every_way(tmp_path: Path) -> None:
    given = yaml.safe_load((NOTEBOOKS / "check.yaml").read_text())["dataflow"][0]
    job = execute(NOTEBOOKS / "dataflow.ipynb", given, tmp_path)
    assert job.state == "completed", job.cause
    found = outputs(job.path)
    figures = [data[PLOTLY] for data in found if PLOTLY in data]
    assert [figure["layout"]["title"]["text"].split(" · ")[0] for figure in figures] == [
        "Training step",
        "Ready queue of operations in one training step",
        "Control dependencies in one training step",
        "Training step on two devices",
        "Threads of a training step, 1 process",
        "Input of a training step, 1 process",
        "Synthetic and real input, 1 process",
    ]
    assert len(figures[1]["frames"]) > 20
    told = "\n".join(text(data, "text/markdown") for data in found if "text/markdown" in data)
    # These sentences hold for every trace, whatever the times on this machine.
    assert re.search(r"- 0 of \d+ operations started before all their dependencies ended", told)
    gated = (
        r"updates wait for all gradients\*\*: 0 of 6 updates started "
        r".*updates before the last gradient are not allowed, and none occurred"
    )
    assert re.search(gated, told)
    assert re.search(
        "[4-9] pairs of send and receive operations, one for each edge between devices", told
    )
    ways = ("in the step", "map", "parallel calls", "prefetch", "cache")
    assert all(f"- **{way}**: a step takes" in told for way in ways)
    assert len(re.findall(r"I/O overhead -?\d+% \(repeats ", told)) == 5
    assert len(re.findall(r"\*\*32 samples per step\*\*: with", told)) == 2


@pytest.mark.exhaustive
def test_inference_shows_latency_throughput_and_memory_of_three_ways(tmp_path: Path) -> None:
    given = yaml.safe_load((NOTEBOOKS / "check.yaml").read_text())["inference"][0]
    with watched() as open_to_others:
        job = execute(NOTEBOOKS / "inference.ipynb", given | {"repeats_timed": 2}, tmp_path)
    assert open_to_others == set()
    assert job.state == "completed", job.cause
    [run] = load_runs(job.path)
    assert run.experiment["workers"] == 1
    figures = [data for data in outputs(job.path) if "application/vnd.plotly.v1+json" in data]
    assert "Parallel inference · 2 ranks × 1 thread" in text(figures[0], "text/plain")
    reading = [text(data, "text/markdown") for data in outputs(job.path) if "text/markdown" in data]
    for words in (
        "Lowest latency with batches of 1 row, 1GbE: **",
        "Slices, 1GbE: lowest latency relative to one process: ",
        "Bytes of weights on",
    ):
        assert words in reading[-1]
    assert "All strategies return the same predictions as one process" in reading[-1]
