"""Passes beside training: seconds of each block, bytes that a backward pass needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import keras
import numpy as np
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.communicator import Clock
from labkit.model_parallel.stages.ledger import Ledger
from labkit.model_parallel.stages.model_blocks import INPUTS, Blocks, Source
from labkit.model_parallel.stages.stage import Stage, listed, plain

WARM = 2  # passes, of which the first one is traced
PASSES = 5


def block_seconds(
    model: keras.Model, rows: int, clock: Clock, blocks: Blocks | None = None
) -> list[float]:
    """Seconds of a forward and backward pass of each block, see `block_passes`."""
    return [forward + backward for forward, backward in block_passes(model, rows, clock, blocks)]


def block_passes(
    model: keras.Model, rows: int, clock: Clock, blocks: Blocks | None = None
) -> list[tuple[float, float]]:
    """Seconds of a pass forward and of one back of each block: medians of five.

    Each block is compiled and run as a `Stage` of its own; the loss is in none of them. Inputs are
    random, between 0 and 1. Weights, statistics and the state of random layers are
    afterwards what they were.

    Args:
        model: the whole one.
        rows: of a micro-batch.
        clock: that measures them.
        blocks: of the model; None: those where one tensor passes alone.
    """
    blocks = blocks or Blocks(model)
    parts = blocks.split(range(len(blocks) + 1))
    values = {Source(INPUTS, n): _random(x, rows) for n, x in enumerate(parts.whole.inputs)}
    found = []
    # Each block takes what others have given: its inputs have the right shapes and types.
    with _untouched(model):
        for number, (block, takes) in enumerate(zip(parts.models, parts.takes, strict=True)):
            stage = Stage(block, read=[source.stage == INPUTS for source in takes])
            passes = []
            for _ in range(WARM + PASSES):
                times = [clock.now()]
                y = listed(stage.forward(0, plain([values[source] for source in takes]), 1.0))
                times.append(clock.now())
                stage.backward(0, [tf.ones_like(each) for each in y])
                times.append(clock.now())
                passes.append(np.diff(times))
                stage.take_gradients()
            forward, backward = np.median(passes[WARM:], axis=0)
            found.append((float(forward), float(backward)))
            values |= {Source(number, place): each for place, each in enumerate(y)}
    return found


def kept_bytes(model: keras.Model, rows: int) -> int:
    """Bytes of activations between forward and backward of so many rows, see `Ledger`.

    Input and output count, too, whatever the loss needs of them. The model is left as by
    `block_seconds`.
    """
    (spec,) = model.inputs
    x, stage = _random(spec, rows), Stage(model, first=True)
    stage.ledger = Ledger(1)
    stage.ledger.step()
    with _untouched(model):
        y = stage.forward(0, x, 1.0)
        stage.ledger.keep(stage, 1, [x, y], model.variables)
    return stage.ledger.most["activations"]


def _random(spec: keras.KerasTensor, rows: int) -> tf.Tensor:
    if None in spec.shape[1:]:
        raise InvalidInput(
            f"partition='time' measures blocks by themselves, but one takes {spec.shape}, of which "
            "only the rows may be open; use partition='parameters', or fix the length of the input"
        )
    kind, shape = tf.as_dtype(spec.dtype), (rows, *spec.shape[1:])
    random = np.random.default_rng(0)  # nobody else's
    # Below 1, so that what is read as the number of a word is that of the first one.
    return tf.cast(random.random(shape), kind)


@contextmanager
def _untouched(model: keras.Model) -> Iterator[None]:
    """Whatever a pass changes is put back."""
    before = [tf.identity(variable.value) for variable in model.variables]
    yield
    for variable, value in zip(model.variables, before, strict=True):
        variable.assign(value)
