"""Test that the same or other ranks resume from saved states as if without interruption."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import labkit as lk
from labkit import Cluster, Experiment
from labkit.cluster.resume import checkpoint_context
from labkit.communicator import Communicator
from labkit.records.checkpoints import FOLDER, Checkpoint, CheckpointContext
from labkit.records.run import Run

ROWS, BATCH, EPOCHS = 72, 16, 3  # five steps per epoch, the last of eight rows
pytestmark = pytest.mark.slow


def data(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(1).standard_normal((ROWS, 12)).astype(dtype)
    return x, (x[:, 0] > 0).astype(np.int32)


def dense(*between: Callable[[], keras.Layer]) -> keras.Model:
    layers = [keras.layers.Dense(8, activation="tanh"), *(make() for make in between)]
    return keras.Sequential(
        [keras.Input((12,)), *layers, keras.layers.Dense(6), keras.layers.Dense(2)]
    )


def dropping() -> keras.Model:
    return dense(keras.layers.BatchNormalization, partial(keras.layers.Dropout, 0.3))


def local() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            lk.models.unshared.LocallyConnected2D(2, 3),
            keras.layers.Conv2D(2, 2),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )


def plateau() -> list[keras.callbacks.Callback]:
    return [keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=1.0)]


def question(**fields: Any) -> Experiment:
    x, y = data(fields.get("precision", "float32").removeprefix("mixed_"))
    given = {
        "model": dense, "dataset": (x, y), "validation": (x[:9], y[:9]), "workers": 2,
        "batch_size": BATCH, "epochs": EPOCHS, "optimizer": "adam", "learning_rate": 0.05,
        "loss": "sparse_categorical_crossentropy", "metrics": ("accuracy",), "verify": False,
    }  # fmt: skip
    return Experiment(**given | fields)


def trained(
    communicator: Communicator, asked: Experiment, told: CheckpointContext | None, stop: int | None
) -> tuple[list[dict[str, float]], list[dict[str, float]], dict[str, np.ndarray], Any]:
    """Train, with a stop after a step; return rows, epochs, weights and checkpoint messages."""
    import io
    import zipfile

    import h5py

    from labkit.worker import recorder
    from labkit.worker.work import work

    asks, usual, recorder.SEND_EVERY = count(1), recorder.SEND_EVERY, -1.0
    try:
        result = work(
            communicator, asked, told, stop_asked=lambda: stop is not None and next(asks) >= stop
        )
    finally:
        recorder.SEND_EVERY = usual
    weights: dict[str, np.ndarray] = {}
    whole = result.whole
    if whole is None or whole.model is None:
        return list(result.rows), [], weights, None
    with zipfile.ZipFile(io.BytesIO(whole.model)) as file, file.open("model.weights.h5") as inner:
        content = h5py.File(io.BytesIO(inner.read()))

    def note(name: str, each: Any) -> None:
        if isinstance(each, h5py.Dataset) and "optimizer" not in name:
            weights[name] = each[()]

    content.visititems(note)
    return list(result.rows), whole.epochs, weights, whole.checkpoints


def run(
    cluster: Cluster,
    asked: Experiment,
    told: CheckpointContext | None = None,
    stop: int | None = None,
) -> list[Any]:
    return cluster.call(trained, asked, told, stop, ranks=asked.ranks)


def same(found: list[Any], wanted: list[Any]) -> None:
    """Check that all ranks' losses, the epochs' metrics and all weights are bitwise equal."""
    for own, other in zip(found, wanted, strict=True):
        for a, b in zip(own[0], other[0], strict=True):
            names = ("epoch", "step", "samples", "loss")
            np.testing.assert_equal([a[n] for n in names], [b[n] for n in names])
    own, other = found[0], wanted[0]
    for a, b in zip(own[1], other[1], strict=True):
        np.testing.assert_equal(a | {"seconds": 0}, b | {"seconds": 0})
    assert own[2].keys() == other[2].keys()
    assert own[2]
    for name in own[2]:
        np.testing.assert_array_equal(own[2][name], other[2][name], err_msg=name)


def go_on(asked: Experiment, folder: Path) -> CheckpointContext:
    found = checkpoint_context(asked, None, Run(folder), goes_on=True)
    assert found is not None
    assert found.resume is not None
    return found._replace(folder=str(folder / FOLDER))


allreduce = lk.AllReduce
CASES: dict[str, dict[str, Any]] = {
    "sequential, statistics and dropout": {"strategy": allreduce(), "model": dropping},
    "overlap, top-k": {
        "strategy": allreduce("ring", schedule="overlap", bucket_bytes=256, compressor="DGC"),
        "optimizer": "sgd",
    },
    "priority": {"strategy": allreduce("ring", schedule="priority", bucket_bytes=256)},
    "staggered, low rank": {
        "strategy": allreduce(schedule="staggered", compressor=lk.ErrorFeedback(lk.PowerSGD(1))),
        "optimizer": "sgd", "optimizer_options": {"momentum": 0.9}, "workers": 4,
    },
    "accumulated": {
        "strategy": allreduce("mpi", compressor=lk.QSGD()),
        "optimizer_options": {"gradient_accumulation_steps": 3},
    },
    "adafactor, callbacks": {
        "strategy": allreduce("shared_memory"), "optimizer": "adafactor", "callbacks": plateau,
    },
    "scaled": {"strategy": allreduce(), "precision": "mixed_float16"},
    "1f1b": {"strategy": lk.Pipeline(microbatches=2), "model": dropping},
    "gpipe, two replicas": {
        "strategy": lk.Pipeline("gpipe", microbatches=2, stages=2, partition="time"),
        "workers": 4,
    },
    "pipedream": {"strategy": lk.Pipeline("pipedream", microbatches=2)},
    "zero bubble, slices": {
        "strategy": lk.Pipeline("zero_bubble", microbatches=2, stages=2, tensor_parallel_size=2),
        "workers": 4,
    },
    "layerwise": {"strategy": lk.Layerwise(), "callbacks": plateau},
    "slices": {"strategy": lk.TensorParallel(2), "workers": 4, "model": dropping},
    "grid": {
        "strategy": lk.SpatialParallel(), "model": local,
        "dataset": (np.random.default_rng(1).standard_normal((ROWS, 6, 6, 1)), data()[1]),
        "validation": None,
    },
}  # fmt: skip


@pytest.mark.battery(0, 5)
@pytest.mark.parametrize("case", CASES)
def test_it_goes_on_bit_for_bit(case: str, cluster: Cluster, tmp_path: Path) -> None:
    asked = question(**CASES[case])
    whole = run(cluster, asked)
    told = CheckpointContext(Checkpoint(every=1000), folder=str(tmp_path / FOLDER))
    broken = run(cluster, asked, told, stop=7)
    assert len(broken[0][0]) == 9
    same(run(cluster, asked, go_on(asked, tmp_path)), whole)


top = lk.ErrorFeedback(lk.TopK(0.2))
PROGRAMS: dict[str, dict[str, Any]] = {
    "servers": {"strategy": lk.ParameterServer(2, compressor=top), "model": dropping},
    "averaging under way": {
        "strategy": lk.ParameterAveraging(
            4, fragments=2, overlap_steps=1, outer_optimizer="nesterov", compressor=top
        )
    },
    "gossip": {"strategy": lk.Gossip("random_pairs"), "model": dropping},
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_programs_go_on_bit_for_bit(case: str, cluster: Cluster, tmp_path: Path) -> None:
    asked = question(**PROGRAMS[case])
    told = CheckpointContext(Checkpoint(every=8 * asked.workers), folder=str(tmp_path / FOLDER))
    whole = run(cluster, asked, told)
    found = go_on(asked, tmp_path)
    assert found.resume is not None
    assert 8 <= found.resume.step / asked.workers < 5 * EPOCHS
    same(run(cluster, asked, found), whole)
