"""Measurements of a model on ranks: steps and their parts, reading of batches, layers and memory.

The cost of each part of a training step is the difference of two measured step times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput
from labkit.communicator import Clock, Communicator
from labkit.experiment import Experiment
from labkit.forecast import CollectiveCost, LayerCost, Overhead, Spread, StepCost
from labkit.strategies import AllReduce

if TYPE_CHECKING:
    import keras

    from labkit.worker.session import TrainingSession

SMALL_SHAPES = ((64, 8), (8,), (8, 10), (10,))
SMALL_NBYTES = 4 * sum(int(np.prod(shape)) for shape in SMALL_SHAPES)
SMALL_ROWS = 16
KINDS = ("forward", "gradient", "updated", "fit")


@dataclass
class ModelSeen:
    """The measurement of one model at one batch size.

    Attributes:
        steps: Step times in seconds, by number of concurrent ranks and kind of step. Each kind of
            step has one median step time per round.
        read: Seconds to read a batch.
        layers: Costs of the layers of the model.
        memory: Bytes of stored activations per row of the batch.
        slots: Number of optimizer state values per weight.
    """

    steps: dict[int, dict[str, list[float]]]
    read: float
    layers: tuple[LayerCost, ...] = field(default_factory=tuple)
    memory: int = 0
    slots: int = 0


def look(
    communicator: Communicator, experiment: Experiment, rows: int, seconds: float, is_full: bool
) -> ModelSeen:
    """Measure a model's steps on ranks; if `is_full`, also measure its layers and memory."""
    from labkit.bench.calibration_runs.step_times import measured

    with _new_keras(communicator):
        found = measured(communicator, experiment, rows, seconds, KINDS)
        seen = ModelSeen(found.steps, found.read)
        if is_full and communicator.rank == 0:
            model = found.session.model
            seen.layers = layers(model, rows, communicator.clock)
            seen.memory, seen.slots = _memory(found.session, rows), _slots(model)
        communicator.barrier("the barrier at the end of a model's calibration")
        return seen


def exchanged(
    communicator: Communicator, experiment: Experiment, rows: int, seconds: float
) -> list[float]:
    """Return the median step seconds of each round when all ranks train jointly (runs on ranks)."""
    from labkit.bench.calibration_runs.step_times import measured

    with _new_keras(communicator):
        found = measured(communicator, experiment, rows, seconds, KINDS[-1:], exchanges=True)
        return found.steps[communicator.size]["fit"]


@contextmanager
def _new_keras(communicator: Communicator) -> Iterator[None]:
    from labkit.keras import use_one_device
    from labkit.worker.rank_state import restore

    use_one_device(communicator)
    try:
        yield
    finally:
        restore()


def layers(model: keras.Model, rows: int, clock: Clock) -> tuple[LayerCost, ...]:
    """Return the cost of each block of layers: its shares of the model's forward and backward time.

    A model that cannot be split counts as one block. The time of each block excludes the overhead
    of a function call. A block without layers measures the overhead of a function call.
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
            out=footprint.bytes_per_row(part.outputs),
        )
        for number, (name, part) in enumerate(zip(names, parts, strict=True))
    )


def _call(clock: Clock) -> tuple[float, float]:
    """Return the overhead of a call: the seconds for both passes of a block without layers."""
    import keras

    from labkit.model_parallel.stages import block_passes

    nothing = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
    return block_passes(nothing, 1, clock)[0]


def _shares(seconds: Sequence[float]) -> list[float]:
    own = [max(0.0, each) for each in seconds]
    total = sum(own)
    return [each / total if total else 1 / len(own) for each in own]


def kind(part: keras.Model) -> str:
    """Return the class name that all trainable layers share, or else the block's class name."""
    own = [each for each in part.layers if each.trainable_variables] or part.layers
    kinds = {type(each).__name__ for each in own} - {"InputLayer"}
    return kinds.pop() if len(kinds) == 1 else type(part).__name__


def _weights(part: keras.Model) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(each.shape) for each in part.trainable_variables)


def _slots(model: keras.Model) -> int:
    """Return the number of optimizer state values per weight, rounded."""
    state_values = sum(prod(each.shape) for each in model.optimizer.variables if each.shape)
    trained = sum(prod(each.shape) for each in model.trainable_variables)
    return round(float(state_values / max(1, trained)))


def _memory(session: TrainingSession, rows: int) -> int:
    """Return the bytes of stored activations per row of the batch; 0 if the size is unknown."""
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
    """Return the time that hooks and callbacks add to a replica's step with a small model.

    The added time is a joint step's time minus three other times. The subtracted times are of an
    independent step, a gradient bucket, and an allreduce.

    Args:
        cluster: Cluster of the ranks.
        ranks: Number of ranks that train.
        seconds: Seconds spent on steps in each round.
        rounds: Number of rounds; each round times joint and independent steps.
        sums: Measured costs of allreduces with `ranks` ranks.
        overheads: Measured overheads with `ranks` ranks.
    """
    experiment = Experiment(
        model="mlp",
        model_options={"widths": [8]},
        dataset="digits",
        strategy=AllReduce(algorithm="shared_memory"),
        verify=False,
    )
    found = []
    for _ in range(rounds):
        alone = cluster.call(look, experiment, SMALL_ROWS, seconds, False, ranks=ranks)[0]
        both = cluster.call(exchanged, experiment, SMALL_ROWS, seconds, ranks=ranks)[0]
        found += [float(np.median(both)) - each for each in alone.steps[ranks]["fit"]]
    (pack,) = (e.seconds for e in overheads if e.what == "bucket" and e.nbytes == SMALL_NBYTES)
    summed = min((e for e in sums if e.level == "memory"), key=lambda e: e.nbytes).seconds
    rest = np.array(found) - pack.median - summed.median
    return Overhead(what="replicas", workers=ranks, seconds=Spread.of(np.maximum(rest, 0).tolist()))


def cost(
    rows: int, threads: int, ranks_at_once: int, seconds: Mapping[str, Sequence[float]]
) -> StepCost:
    """Return the cost of each part of a step, from the times of steps with and without it.

    Each kind of step does the work of the previous kind and more. The additional work is one
    further part of a training step. The medians of all parts add up to the median time of the whole
    training step. The spread of a part's cost states how much the cost varies between the rounds of
    measurement.
    """
    names = ("forward", "backward", "update", "other")
    before, floor, found = np.zeros(len(seconds["fit"])), 0.0, {}
    for name, kind in zip(names, KINDS, strict=True):
        now = np.asarray(seconds[kind])
        # A step cannot take less time than a step with less work, so a negative difference is
        # noise.
        median = max(floor, float(np.median(now)))
        low, mid, high = np.quantile(now - before, (0.05, 0.5, 0.95))
        part = median - floor
        found[name] = Spread(
            median=part,
            low=max(0.0, part + float(low - mid)),
            high=part + float(high - mid),
            count=len(now),
        )
        before, floor = now, median
    return StepCost(rows=rows, threads=threads, together=ranks_at_once, **found)
