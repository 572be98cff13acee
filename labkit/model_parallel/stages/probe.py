"""Short runs of a module that show its shapes and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import keras
import numpy as np
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.communicator import Clock
from labkit.model_parallel.stages.footprint import MemoryLedger
from labkit.model_parallel.stages.model_blocks import INPUTS, Blocks, TensorSource
from labkit.model_parallel.stages.stage import Stage, as_list, unwrap_single


def block_seconds(
    model: keras.Model, rows: int, clock: Clock, blocks: Blocks | None = None
) -> list[float]:
    """Return each block's total time in s for forward and backward pass (`block_passes`)."""
    return [forward + backward for forward, backward in block_passes(model, rows, clock, blocks)]


def block_passes(
    model: keras.Model, rows: int, clock: Clock, blocks: Blocks | None = None
) -> list[tuple[float, float]]:
    """Return the time in s of each block's forward and backward pass, as medians of five runs.

    Each block is compiled and runs as a separate `Stage`, without the loss. Inputs are random
    numbers between 0 and 1. After the measurement, weights, statistics and random states of the
    layers are restored.

    Args:
        model: The whole model.
        rows: Number of rows in a micro-batch.
        clock: Clock that measures the times.
        blocks: Blocks of the model, between which the function cuts the model. If `blocks` is None,
            every point that only one tensor crosses is a cut.
    """
    blocks = blocks or Blocks(model)
    parts = blocks.split(range(len(blocks) + 1))
    values = {TensorSource(INPUTS, n): _random(x, rows) for n, x in enumerate(parts.whole.inputs)}
    seconds = []
    # Each block receives the outputs of earlier blocks, so its inputs have the right shapes and
    # types.
    with _restored_afterwards(model):
        for number, (block, takes) in enumerate(zip(parts.models, parts.takes, strict=True)):
            stage = Stage(block, read=[source.stage == INPUTS for source in takes])
            passes = []
            for _ in range(WARM + PASSES):
                times = [clock.now()]
                y = as_list(
                    stage.forward(0, unwrap_single([values[source] for source in takes]), 1.0)
                )
                times.append(clock.now())
                stage.backward(0, [tf.ones_like(output) for output in y])
                times.append(clock.now())
                passes.append(np.diff(times))
                stage.take_gradients()
            forward, backward = np.median(passes[WARM:], axis=0)
            seconds.append((float(forward), float(backward)))
            values |= {TensorSource(number, place): output for place, output in enumerate(y)}
    return seconds


def kept_bytes(model: keras.Model, rows: int) -> int:
    """Return the bytes that a batch's forward pass stores for its backward pass (`MemoryLedger`).

    The stored bytes always include the model's input and output. After the forward pass, the
    variables of the model are restored, as in `block_passes`.
    """
    (spec,) = model.inputs
    x, stage = _random(spec, rows), Stage(model, first=True)
    stage.ledger = MemoryLedger(1)
    stage.ledger.step()
    with _restored_afterwards(model):
        y = stage.forward(0, x, 1.0)
        stage.ledger.keep(stage, 1, [x, y], model.variables)
    return stage.ledger.most["activations"]


def _random(spec: keras.KerasTensor, rows: int) -> tf.Tensor:
    if None in spec.shape[1:]:
        raise InvalidInput(
            f"partition='time' measures each block alone, but a block reads inputs of shape "
            f"{spec.shape}, in which only the number of rows may be unknown; use "
            "partition='parameters', or fix the length of the input"
        )
    kind, shape = tf.as_dtype(spec.dtype), (rows, *spec.shape[1:])
    # A local random generator leaves NumPy's global random state unchanged.
    random = np.random.default_rng(0)
    # For integer inputs, all random values become 0. The number 0 is a valid input of an Embedding
    # layer.
    return tf.cast(random.random(shape), kind)


@contextmanager
def _restored_afterwards(model: keras.Model) -> Iterator[None]:
    """Context manager that restores the variables of a model when it exits."""
    before = [tf.identity(variable.value) for variable in model.variables]
    yield
    for variable, value in zip(model.variables, before, strict=True):
        variable.assign(value)


# The constant WARM is the number of warm-up passes; the first pass traces the TensorFlow graph.
WARM = 2


PASSES = 5
