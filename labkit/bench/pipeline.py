"""What a pipeline of ranks brings over one process that takes the same micro-batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from labkit.bench.timing import spread
from labkit.cluster import Cluster
from labkit.communicator import Communicator
from labkit.errors import InvalidInput
from labkit.schedules import PIPELINE

WARM = 3
Row = dict[str, Any]


def measure(
    workers: int = 2,
    schedules: Sequence[str] = ("gpipe", "1f1b"),
    microbatches: Sequence[int] = (1, 2, 4, 8),
    width: int = 1024,
    depth: int = 8,
    rows: int = 256,
    repeats: int = 5,
) -> list[Row]:
    r"""Time steps of one process, of all ranks each for itself, and of the pipeline, interleaved.

    With T₁ of one process and Tₙ of n independent ones at once, n stages can be faster than one
    process by at most \(\frac{n m}{m + n - 1} \cdot \frac{T_1}{T_n}\): the bubble takes one share,
    what processes on one machine take from each other the other one.

    Args:
        workers: n, one stage of one thread each.
        schedules: names of `labkit.schedules.PIPELINE` with one stage a rank.
        microbatches: m.
        width, depth: of the dense layers.
        rows: of a micro-batch.
        repeats: of everything.

    Returns:
        One row a schedule and m: median, least and 90th percentile of a step (ms), the same of one
        process, speed-up, what it can be at most, and the share of that.
    """
    for name in schedules:
        if name not in PIPELINE or name in ("interleaved", "wavefront"):
            allowed = [k for k in PIPELINE if k not in ("interleaved", "wavefront")]
            raise InvalidInput(
                f"schedule {name!r} is not known here; allowed: {', '.join(allowed)}"
            )
    found = []
    with Cluster(workers=workers) as cluster:
        for name in schedules:
            for count in microbatches:
                case = (name, count, width, depth, rows, repeats)
                one, all_, pipe = np.array(cluster.call(_measure, *case, ranks=workers)[0]).T
                most = workers * count / (count + workers - 1) * float(np.median(one / all_))
                speedup = float(np.median(one / pipe))
                found.append(
                    {
                        "bench": "pipeline",
                        "case": f"{name}, m = {count}",
                        "what": "step",
                        "workers": workers,
                        "network": None,
                        "clock": "wall",
                        "repeats": repeats,
                        "bytes": 4 * rows * width,
                        **spread(pipe.tolist()),
                        "one_ms": 1e3 * float(np.median(one)),
                        "stage_ms": 1e3 * float(np.median(one)) / count / workers,
                        "speedup": speedup,
                        "at_most": most,
                        "share": speedup / most,
                    }
                )
    return found


def _measure(
    communicator: Communicator,
    schedule: str,
    microbatches: int,
    width: int,
    depth: int,
    rows: int,
    repeats: int,
) -> list[list[float]]:
    """On each rank: seconds of a step of one process, of all at once, and of the pipeline."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, "relu") for _ in range(depth)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    solo = communicator.split(communicator.rank)
    shape = (rows * microbatches, width)
    alone = _step(solo, model, schedule, microbatches, shape)
    together = _step(communicator, model, schedule, microbatches, shape)
    for _ in range(WARM):
        alone()
        together()
    found = []
    for _ in range(repeats):
        kinds = (alone if communicator.rank == 0 else _nothing, alone, together)
        found.append([_slowest(communicator, step) for step in kinds])
    return found


def _step(
    communicator: Communicator,
    model: Any,
    schedule: str,
    microbatches: int,
    shape: tuple[int, int],
) -> Callable[[], Any]:
    import keras
    import tensorflow as tf

    from labkit.stages import Batch, Chain, Runner, Stage, by_parameters, split_model

    table = PIPELINE[schedule](communicator.size, microbatches)
    models = split_model(model, by_parameters([1] * len(Chain(model)), table.stages))
    last = table.stages - 1

    def loss(y: Any, predicted: Any, weight: Any) -> Any:
        return tf.reduce_mean(tf.square(y - predicted))

    own = {
        number: Stage(part, loss if number == last else None, number == 0)
        for number, part in enumerate(models)
        if number == communicator.rank
    }
    optimizers = {number: keras.optimizers.SGD(1e-4) for number in own}
    specs = [part.inputs[0] for part in models], [part.outputs[0] for part in models]
    runner = Runner(communicator, table, own, *specs, lambda *row: nullcontext())
    batch = Batch(tf.random.normal(shape), tf.random.normal(shape))

    def update(stage: int) -> None:
        optimizers[stage].apply(own[stage].take_gradients(), own[stage].variables)

    return lambda: runner.step(batch, update)


def _nothing() -> None:
    """What the others do while one process works."""


def _slowest(communicator: Communicator, step: Callable[[], Any]) -> float:
    communicator.meet("the next step of a benchmark")
    start = time.perf_counter()
    step()
    own = time.perf_counter() - start
    return float(max(communicator.allgather(own)))
