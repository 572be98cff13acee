"""Test that the user's Keras settings hold on all ranks, and that differences are reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit import Cluster, Experiment
from labkit.cli.doctor import programs
from labkit.common import keras_settings
from labkit.common.errors import InvalidInput

X, Y = np.zeros((8, 3), "float32"), np.zeros(8, "int64")


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the user's file keras.json, in a new folder."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.delenv(keras_settings.CARRIED, raising=False)
    (tmp_path / "keras").mkdir()
    return tmp_path / "keras" / "keras.json"


@pytest.mark.parametrize(
    ("text", "changed", "told"),
    [
        ("{}", {}, ""),
        ('{"floatx": "float32", "backend": "tensorflow"}', {}, ""),
        ("no JSON", {}, ""),
        ("[1]", {}, ""),
        ('{"epsilon": 1e-5}', {"epsilon": 1e-5}, ""),
        ('{"floatx": "float64"}', {"floatx": "float64"}, "give precision='float64'"),
        (
            '{"image_data_format": "channels_first"}',
            {"image_data_format": "channels_first"},
            "models that are given by name ignore",
        ),
        (
            '{"backend": "jax"}',
            {},
            "keras.json: backend='jax': ranks ignore this setting and compute with TensorFlow",
        ),
    ],
)
def test_what_differs_in_runs_is_named(
    said: Path, text: str, changed: dict[str, object], told: str
) -> None:
    said.write_text(text)
    assert keras_settings.changed() == changed
    notes = ["; ".join(note) for note in keras_settings.notes()]
    assert len(notes) == bool(told)
    assert told in "".join(notes)
    (finding,) = programs.keras()
    assert (finding.state == "note") == bool(told)


def test_a_variable_comes_before_the_file(said: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said.write_text('{"backend": "tensorflow"}')
    keras_settings.refuse_other_backend()
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    with pytest.raises(InvalidInput, match=r"^KERAS_BACKEND=torch: labkit trains with"):
        keras_settings.refuse_other_backend()


def test_another_backend_is_refused_before_keras_is_imported() -> None:
    command = [sys.executable, "-P", "-c", "import labkit.keras"]
    variables = os.environ | {"KERAS_BACKEND": "jax"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        "labkit.common.errors.InvalidInput: KERAS_BACKEND=jax: labkit trains with Keras's "
        "TensorFlow backend only; export KERAS_BACKEND=tensorflow"
    )


def test_ranks_have_the_settings_of_the_caller_and_the_record_says_so(
    cluster: Cluster, said: Path
) -> None:
    def model() -> Any:
        import keras

        assert keras.config.epsilon() == 1e-4
        assert keras.config.image_data_format() == "channels_first"
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

    def seen(communicator: object) -> list[object]:
        import keras

        return [keras.config.epsilon(), keras.config.image_data_format(), keras.config.floatx()]

    own = {"epsilon": 1e-4, "image_data_format": "channels_first", "floatx": "float64"}
    said.write_text(json.dumps(own))
    loss = "sparse_categorical_crossentropy"
    run = cluster.run(
        Experiment(model=model, dataset=(X, Y), loss=loss, batch_size=4, workers=2, verify=False)
    )
    assert run.environment["keras_settings"] == own
    # A call finds the Keras settings that a new process of the user has.
    assert cluster.call(seen, ranks=2) == [[1e-4, "channels_first", "float64"]] * 2
    said.unlink()
    again = cluster.run(Experiment(model="mlp", workers=2, steps_per_epoch=1, verify=False))
    assert "keras_settings" not in again.environment
    assert cluster.call(seen, ranks=2) == [[1e-7, "channels_last", "float32"]] * 2
