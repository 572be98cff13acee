"""Test other frameworks on the same experiment: refusals, and weights equal to labkit's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from listening import watched

from labkit import AllReduce, Cluster, Experiment, ExternalFramework, InvalidInput
from labkit.frameworks import environments
from labkit.frameworks.environments import MARKER_FILE, SET_UP, Installation, find
from labkit.records.analysis.scaling import compare_frameworks


@pytest.fixture
def set_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the marker file of an environment that is empty apart from this file."""
    monkeypatch.setattr(environments, "versions", lambda _: "")
    monkeypatch.delenv("LABKIT_TORCH_PYTHON", raising=False)
    monkeypatch.setenv("LABKIT_PEERS", str(tmp_path))
    mark = tmp_path / "ddp" / MARKER_FILE
    mark.parent.mkdir()
    mark.write_text(json.dumps({"name": "ddp", "version": "9.8"}))
    return mark


def given(**fields: Any) -> Experiment:
    plain: dict[str, Any] = {"optimizer": "sgd", "dataset": "digits", "workers": 2}
    return Experiment(**plain | {"strategy": ExternalFramework("ddp")} | fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"optimizer": "adam"}, "optimizer='adam' differs.*momentum and nesterov"),
        ({"optimizer_options": {"clipnorm": 1.0}}, "its clipnorm differs"),
        ({"precision": "mixed_bfloat16"}, "ExternalFramework supports float32, float64"),
        ({"network": "1GbE"}, "ExternalFramework does not support network"),
        ({"stragglers": {0: 2.0}}, "ExternalFramework does not support stragglers"),
        ({"callbacks": list}, "ExternalFramework does not support callbacks"),
        ({"input_mode": "scatter"}, "use input_mode='shard'"),
        ({"batch_size": 1436}, "1437 rows has 1 rows, fewer than workers=2"),
        ({"dataset": lambda: None, "model": lambda: None}, "a callable data set does not"),
        ({"clock": "virtual"}, "does not run on clock='virtual'"),
    ],
)
def test_what_is_not_the_same_elsewhere_is_refused_before_a_process_starts(
    set_up: Path, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        given(**fields)


def test_what_is_not_installed_is_refused_with_what_to_do(set_up: Path) -> None:
    assert given().strategy.environment_key == f"9.8 {set_up.parent}/bin/python"
    there = given()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environments, "versions", lambda modules: f"{modules[0]} 9.9")
        # A verdict of the equivalence check is kept for these versions only.
        assert there.strategy.environment_key == f"torch 9.9 {sys.executable}"
    set_up.unlink()
    with pytest.raises(InvalidInput, match=r"torch is not installed.*labkit frameworks setup ddp"):
        given()
    with pytest.raises(InvalidInput, match="framework='gossip'"):
        ExternalFramework("gossip")


CASES: dict[str, dict[str, Any]] = {
    "plain": {"model": "mlp", "model_options": {"widths": [64, 32]}},
    "momentum": {
        "model": "cnn",
        "model_options": {"filters": [4, 4], "dense": 8},
        "optimizer_options": {"momentum": 0.9},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", SET_UP)
def test_after_20_steps_weights_equal_ours(cluster: Cluster, name: str, case: str) -> None:
    if not isinstance(find(name), Installation):
        pytest.skip(str(find(name)))
    fields: dict[str, Any] = {
        "batch_size": 63,
        "epochs": 2,
        "steps_per_epoch": 10,
        "learning_rate": 0.1,
    }
    asked = given(**fields | CASES[case])
    with watched() as reached:
        ours, theirs = (
            cluster.run(asked.replace(strategy=strategy))
            for strategy in (AllReduce(algorithm="ring"), ExternalFramework(name))
        )
    assert reached == set()  # no socket was open to other machines
    own, others = (weights(run.path) for run in (ours, theirs))
    worst = max(np.abs(a - b).max() for a, b in zip(own, others, strict=True))
    print(f"{name} {case}: weights are at most {worst:.1e} apart")
    assert worst <= 1e-5
    losses = [run.history["loss"].to_numpy() for run in (ours, theirs)]
    np.testing.assert_allclose(*losses, atol=1e-4)
    assert theirs.metrics["equivalence"]["verdict"] == "passed"
    assert theirs.metrics["equivalence"]["max_abs_difference"] <= 1e-12
    sent = theirs.metrics["exchange"]["sent_bytes"]
    assert sent["worker 0"]["worker 1"] > 20 * 4 * sum(each.size for each in own) / 2
    ((pair, _),) = compare_frameworks({"ours": ours, "theirs": theirs}).pairs
    assert pair["step_ms"] > 0


def weights(run: Path) -> list[np.ndarray]:
    import keras

    found: list[np.ndarray] = keras.models.load_model(run / "model.keras").get_weights()
    return found
