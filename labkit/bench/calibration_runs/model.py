"""What a rank tells of a model: its steps by rows, its reading, its layers, its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput
from labkit.communicator import Clock, Communicator
from labkit.experiment import Experiment
from labkit.forecast import CollectiveCost, LayerCost, Overhead, Spread
from labkit.strategies import AllReduce

if TYPE_CHECKING:
    import keras

    from labkit.worker.session import TrainingSession

SMALL_SHAPES = ((64, 8), (8,), (8, 10), (10,))  # of the weights of a small model
SMALL_NBYTES = 4 * sum(int(np.prod(shape)) for shape in SMALL_SHAPES)
SMALL_ROWS = 16


@dataclass
class ModelSeen:
    """Of one model and number of rows.

    Attributes:
        steps: by the ranks at once, and by kind: s, a median a turn.
        read: s to read a batch.
        layers: of the model.
        memory: bytes of activations of a row.
        slots: values that the optimizer keeps for each weight.
    """

    steps: dict[int, dict[str, list[float]]]
    read: float
    layers: tuple[LayerCost, ...] = field(default_factory=tuple)
    memory: int = 0
    slots: int = 0


def look(
    communicator: Communicator, experiment: Experiment, rows: int, seconds: float, whole: bool
) -> ModelSeen:
    """On each rank: time a model's steps; with `whole` see also what does not depend on rows."""
    from labkit.bench.calibration_runs.steps import measured

    with _new_keras(communicator):
        found = measured(communicator, experiment, rows, seconds)
        seen = ModelSeen(found.steps, found.read)
        if whole and communicator.rank == 0:
            model = found.session.model
            seen.layers = layers(model, rows, communicator.clock)
            seen.memory, seen.slots = _memory(found.session, rows), _slots(model)
        communicator.meet("the end of a model's calibration")
        return seen


def exchanged(
    communicator: Communicator, experiment: Experiment, rows: int, seconds: float
) -> list[float]:
    """On each rank: seconds of steps in which all train together, a median a turn."""
    from labkit.bench.calibration_runs.steps import measured

    with _new_keras(communicator):
        found = measured(communicator, experiment, rows, seconds, exchanges=True)
        return found.steps[communicator.size]["fit"]


@contextmanager
def _new_keras(communicator: Communicator) -> Iterator[None]:
    from labkit.keras import use_one_device
    from labkit.worker.session import restore

    use_one_device(communicator)
    try:
        yield
    finally:
        restore()


def layers(model: keras.Model, rows: int, clock: Clock) -> tuple[LayerCost, ...]:
    """Shares of the passes, block by block; a model that cannot be cut is one block.

    What a call of a block takes by itself, as of one that does nothing, is no share.
    """
    from labkit.model_parallel.stages import Blocks, block_passes, footprint

    try:
        blocks = Blocks(model)
        passes = block_passes(model, rows, clock, blocks)
        parts, names = blocks.split(range(len(blocks) + 1)).models, blocks.names()
    except InvalidInput:
        whole = LayerCost(
            name=model.name,
            kind=type(model).__name__,
            weights=_weights(model),
            forward=1,
            backward=1,
            out=0,
        )
        return (whole,)
    calls = _call(clock)
    forward, backward = (_shares([each[way] - calls[way] for each in passes]) for way in (0, 1))
    return tuple(
        LayerCost(
            name=name,
            kind=kind(part),
            weights=_weights(part),
            forward=forward[number],
            backward=backward[number],
            out=footprint.a_row(part.outputs),
        )
        for number, (name, part) in enumerate(zip(names, parts, strict=True))
    )


def _call(clock: Clock) -> tuple[float, float]:
    """Seconds of both passes of a block that does nothing."""
    import keras

    from labkit.model_parallel.stages import block_passes

    nothing = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
    return block_passes(nothing, 1, clock)[0]


def _shares(seconds: Sequence[float]) -> list[float]:
    own = [max(0.0, each) for each in seconds]
    total = sum(own)
    return [each / total if total else 1 / len(own) for each in own]


def kind(part: keras.Model) -> str:
    """The class of the layer of a block, or of all that train there; else that of the block."""
    own = [each for each in part.layers if each.trainable_variables] or part.layers
    kinds = {type(each).__name__ for each in own} - {"InputLayer"}
    return kinds.pop() if len(kinds) == 1 else type(part).__name__


def _weights(part: keras.Model) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(each.shape) for each in part.trainable_variables)


def _slots(model: keras.Model) -> int:
    """Values of the optimizer's state for each weight."""
    kept = sum(prod(each.shape) for each in model.optimizer.variables if each.shape)
    trained = sum(prod(each.shape) for each in model.trainable_variables)
    return round(float(kept / max(1, trained)))


def _memory(session: TrainingSession, rows: int) -> int:
    """Bytes of activations of a row; 0 where nobody knows."""
    from labkit.model_parallel import memory

    model = session.model
    found = memory.by_kind(model, model, model.optimizer, session.optimizer(), rows, look=True)
    return (found.measured["activations"] or 0) // rows


def replica_overhead(
    cluster: Cluster,
    ranks: int,
    seconds: float,
    rounds: int,
    sums: Sequence[CollectiveCost],
    overheads: Sequence[Overhead],
) -> Overhead:
    """Return what hooks and callbacks add to a step of ranks that train a small model together.

    It is steps together less those side by side, less the bucket and its sum.

    Args:
        cluster: of the ranks.
        ranks: that train.
        seconds: of steps in each of the rounds.
        rounds: of both kinds, in turns.
        sums, overheads: of as many ranks.
    """
    asked = Experiment(
        model="mlp",
        model_options={"widths": [8]},
        dataset="digits",
        strategy=AllReduce(algorithm="shared_memory"),
        gate=False,
    )
    found = []
    for _ in range(rounds):
        alone = cluster.call(look, asked, SMALL_ROWS, seconds, False, ranks=ranks)[0]
        both = cluster.call(exchanged, asked, SMALL_ROWS, seconds, ranks=ranks)[0]
        found += [float(np.median(both)) - each for each in alone.steps[ranks]["fit"]]
    (pack,) = (e.seconds for e in overheads if e.what == "bucket" and e.nbytes == SMALL_NBYTES)
    summed = min((e for e in sums if e.level == "memory"), key=lambda e: e.nbytes).seconds
    rest = np.array(found) - pack.median - summed.median
    return Overhead(what="replicas", workers=ranks, seconds=Spread.of(np.maximum(rest, 0).tolist()))
