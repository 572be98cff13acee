"""Compare TensorFlow's strategies with labkit's; the runs are written by the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_runs import write_run

from labkit.figures import framework_table, summarize_framework, traffic_matrix
from labkit.records.run import Run
from labkit.strategies import TFDistribute

STEPS = 60  # number of steps of each run
RING = {"name": "AllReduce", "algorithm": "ring"}
ASYNCHRONOUS = {"name": "ParameterServer", "synchronous": False}


def theirs(
    folder: Path,
    kind: str,
    step_ms: float,
    bytes_a_step: int,
    options: dict[str, Any] | None = None,
    work: dict[str, Any] | None = None,
    **measured: object,
) -> Run:
    tasks = ["ps 0", "worker 0"] if kind == "parameter_server" else ["worker 0", "worker 1"]
    sent = {a: {b: (a != b) * bytes_a_step * STEPS for b in tasks} for a in tasks}
    exchange = {
        "algorithm": f"tensorflow.python.{kind}.Theirs",
        "sent_bytes": sent,
        "counted_steps": STEPS,
    }
    strategy = TFDistribute.model_validate({"kind": kind}).to_json()
    return write_run(
        folder / kind,
        strategy=strategy | (options or {}),
        step_ms=step_ms,
        measured={"exchange": exchange} | measured,
        **(work or {}),
    )


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    return [
        theirs(tmp_path, "multi_worker_mirrored", 20.0, 2048),
        theirs(tmp_path, "parameter_server", 5.0, 512),
        write_run(tmp_path / "ring", strategy=RING, step_ms=5.0),
        write_run(tmp_path / "servers", strategy=ASYNCHRONOUS, step_ms=5.0),
    ]


def test_who_sends_what_to_whom_a_step_is_drawn_for_each_of_theirs(runs: list[Run]) -> None:
    figure = traffic_matrix(runs)
    first, second = figure.data
    assert np.array_equal(first["z"], [[0, 2048], [2048, 0]])
    assert list(second["x"]) == ["ps 0", "worker 0"]
    assert "worker 0 sends 2 KiB to worker 1" in figure.alt
    assert "worker 0 sends 512 B to ps 0" in figure.alt


def test_each_stands_beside_the_one_of_ours_that_does_the_same(runs: list[Run]) -> None:
    table = framework_table(runs)
    assert list(table["architecture"]) == ["collective", "parameter servers"] * 2
    assert list(table["synchronization"]) == ["synchronous", "asynchronous"] * 2
    assert list(table["labkit's"]) == [
        "AllReduce(algorithm='ring')",
        "ParameterServer(synchronous=False, servers=1)",
        "itself",
        "itself",
    ]
    legacy = "Keras 3's fit does not support the strategy"
    assert list(table["legacy"]) == [legacy, legacy, "", ""]
    mirrored, served = summarize_framework(runs).splitlines()
    assert mirrored.startswith("- **Theirs**: final accuracy")
    assert "a step of labkit's AllReduce(algorithm='ring') takes 5 ms: 4 times as long" in mirrored
    assert served.endswith("equally fast.")


def test_what_failed_its_gate_has_no_speed(tmp_path: Path, runs: list[Run]) -> None:
    verdict = {"verdict": "failed", "max_abs_difference": 0.2, "tolerance": 1e-9, "reason": ""}
    failed = theirs(tmp_path / "failed", "mirrored", 5.0, 0, equivalence=verdict)
    assert np.isnan(framework_table([failed, *runs])["step_ms"].iloc[0])
    said = summarize_framework([failed, *runs]).splitlines()[0]
    assert "the equivalence check of Theirs failed, so its speed is not shown" in said
    assert "fast" not in said
    ours = write_run(
        tmp_path / "ours", strategy=RING, step_ms=5.0, measured={"equivalence": verdict}
    )
    assert "its speed is not shown" in summarize_framework([failed, ours])


def test_what_was_not_held_against_one_process_has_no_speed_either(tmp_path: Path) -> None:
    verdict = {"verdict": "not applicable", "max_abs_difference": None, "tolerance": None}
    unheld = verdict | {"reason": "TFDistribute is not exact"}
    runs = [
        theirs(tmp_path, "parameter_server", 5.0, 512, equivalence=unheld),
        write_run(tmp_path / "servers", strategy=ASYNCHRONOUS, step_ms=5.0),
    ]
    assert list(framework_table(runs)["step_ms"].isna()) == [True, False]
    said = summarize_framework(runs)
    assert "its speed is not shown: TFDistribute is not exact" in said
    assert "fast" not in said


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_options", {"widths": [8]}),
        ("dataset", "mnist"),
        ("batch_size", 64),
        ("optimizer", "adam"),
        ("seed", 1),
        ("precision", "float64"),
        ("threads", 2),
        ("workers", 4),
    ],
)
def test_other_work_is_not_compared(tmp_path: Path, field: str, value: object) -> None:
    run = theirs(tmp_path, "multi_worker_mirrored", 20.0, 2048)
    other = write_run(tmp_path / "ring", strategy=RING, step_ms=5.0, **{field: value})
    said = summarize_framework([run, other])
    assert (
        f"not compared, because labkit's AllReduce(algorithm='ring') has other work: {field}"
        in said
    )
    assert "ms" not in said


def test_another_number_of_servers_and_a_compressor_are_another_strategy(tmp_path: Path) -> None:
    two = theirs(tmp_path, "parameter_server", 5.0, 512, options={"servers": 2})
    one = write_run(tmp_path / "one", strategy=ASYNCHRONOUS)
    asked = (
        "labkit's ParameterServer(synchronous=False, servers=2) has no run with the same model, "
        "data and settings"
    )
    assert asked in summarize_framework([two, one])
    same = write_run(tmp_path / "two", strategy=ASYNCHRONOUS | {"servers": 2})
    assert "a step takes" in summarize_framework([two, same])
    ring = theirs(tmp_path, "multi_worker_mirrored", 20.0, 2048)
    packed = write_run(tmp_path / "packed", strategy=RING | {"compressor": {"name": "TopK"}})
    assert "has no run with the same model, data and settings" in summarize_framework(
        [ring, packed]
    )


@pytest.mark.parametrize(
    ("kind", "options", "algorithm", "ours"),
    [
        ("mirrored", {}, "auto (ring on processors)", "ring"),
        (
            "mirrored",
            {"cross_device_ops": "reduction_to_one_device"},
            "sum on one device, copied back",
            "master_worker",
        ),
        (
            "mirrored",
            {"cross_device_ops": "hierarchical_copy"},
            "hierarchical copy (two halves, then across)",
            "tree",
        ),
        ("multi_worker_mirrored", {}, "ring", "ring"),
        ("multi_worker_mirrored", {"communication": "auto"}, "auto (ring on processors)", "ring"),
    ],
)
def test_each_way_in_which_gradients_meet_has_its_own_name(
    tmp_path: Path, kind: str, options: dict[str, str], algorithm: str, ours: str
) -> None:
    table = framework_table([theirs(tmp_path, kind, 5.0, 0, options=options)])
    assert table["algorithm"].item() == algorithm
    assert table["labkit's"].item() == f"AllReduce(algorithm='{ours}')"


def test_bytes_that_nobody_has_counted_are_not_shown(tmp_path: Path) -> None:
    uncounted = {"algorithm": "tensorflow.Theirs", "sent_bytes": {}}
    run = theirs(tmp_path, "multi_worker_mirrored", 20.0, 0, exchange=uncounted)
    assert framework_table([run])["wire_bytes_per_step"].isna().all()
    assert not traffic_matrix([run]).data
