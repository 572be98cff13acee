"""Test that a fit that fails on one rank fails on all, and that later fits are unaffected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.communicator import launcher

SCRIPT = """
import keras
import numpy as np
import tensorflow as tf

from labkit import keras as lkk

communicator = lkk.init(timeout=60)
rank, random = communicator.rank, np.random.default_rng(3)
x, y = random.standard_normal((12, 6)).astype("float32"), random.standard_normal((12, 1))
batches = lkk.shard(tf.data.Dataset.from_tensor_slices((x, y)).batch(6), communicator)


def compiled(loss="mse"):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(optimizer=lkk.DistributedOptimizer("sgd", communicator), loss=loss)
    return model


def fails(y, p):
    raise ZeroDivisionError("as planned")


class FailOnOne(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if rank == 1 and batch == 0:
            raise ValueError("as planned")


class FitInside(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        fit(compiled())


def fit(model, *others, epochs=1):
    callbacks = [*lkk.callbacks(communicator), *others]
    try:
        model.fit(batches, epochs=epochs, verbose=0, callbacks=callbacks)
    except Exception:
        return "failed"
    return "fine"


class FitAgain(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        told.append(fit(self.model))


model = compiled()
told = [fit(model, FailOnOne()), fit(model), fit(compiled(fails if rank == 0 else "mse"))]
told += [fit(compiled(), FailOnOne()), str(sorted(lkk.evaluate(model, batches, communicator)))]
told += [fit(model, FitInside()), fit(compiled())]
told += [fit(model, FitAgain(), epochs=2)]  # behind those of the two fits inside
weights = communicator.allgather(model.get_weights()[0].tobytes())
print(*told, len(set(weights)), flush=True)
"""


@pytest.mark.slow
def test_fits_after_a_failure_on_one_rank_train_all_three(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    found = subprocess.run(
        [*launcher.mpiexec(3), sys.executable, "train.py"],
        env=os.environ | launcher.environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    expected = "failed fine failed failed ['loss'] fine fine fine fine fine 1"
    assert found.stdout.splitlines() == [expected] * 3
