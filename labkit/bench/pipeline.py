"""A benchmark of pipelines: the speed-up over one process with the same micro-batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from labkit.bench.command import AS_JSON, TIMES, names, show_rows
from labkit.bench.timing import Row, Step, head, spread
from labkit.cluster import Cluster
from labkit.common.nearest import refuse_unknown
from labkit.communicator import Communicator
from labkit.schedules import PIPELINE
from labkit.simulate import simulate_pipeline

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from labkit.model_parallel.stages import Batch, Delayed, Stage

WARM = 3
DELAYED = "delayed"
# The constant ITERATIONS is the number of overlapping steps (with delayed gradients) in a timed
# block.
ITERATIONS = 6


def measure(
    workers: int = 2,
    schedules: Sequence[str] = ("gpipe", "1f1b", "zero_bubble", DELAYED),
    microbatches: Sequence[int] = (1, 2, 4, 8),
    width: int = 1024,
    depth: int = 8,
    rows: int = 256,
    repeats: int = 5,
) -> list[Row]:
    r"""Measure steps of one process, of n independent processes, and of a pipeline of n ranks.

    Let T₁ be the step time of one process. Let Tₙ be the step time of n independent, concurrent
    processes. The speed-up of n stages with m micro-batches is at most \(\frac{n m}{m + n - 1}
    \cdot \frac{T_1}{T_n}\). The bound uses the step times T₁ of one and Tₙ of n processes. In the
    upper bound of the speed-up, the first factor accounts for the pipeline bubble. Processes that
    share a machine slow each other, which lowers the possible speed-up.

    Args:
        workers: Number n of pipeline stages; each stage is a rank with one thread.
        schedules: Names of pipeline schedules in `labkit.schedules.PIPELINE` with one stage per
            rank. The name "delayed" selects delayed gradients, whose batches are not split.
        microbatches: Numbers m of micro-batches to measure.
        width: Number of units of each dense layer.
        depth: Number of dense layers.
        rows: Number of rows of a micro-batch.
        repeats: Number of repeats of each measurement.

    Returns: One row per schedule and number of micro-batches. A row contains median, minimum and
        90th percentile of the step time in ms. A row also contains the median step time of one
        process in ms. Each row also contains the speed-up, its upper bound, and the ratio of
        speed-up to bound.
    """
    # The benchmark supports only schedules that split a batch by rows and have one stage per rank.
    by_rows = [name for name, each in PIPELINE.items() if not (each.chunked or each.recurrent)]
    allowed = [*by_rows, DELAYED]
    refuse_unknown("schedule", schedules, allowed)
    cases = [
        (name, count) for name in schedules for count in (microbatches if name != DELAYED else [1])
    ]
    found = []
    with Cluster(workers=workers) as cluster:
        for name, count in cases:
            case = (name, count, width, depth, rows, repeats)
            seconds = np.array(cluster.call(_measure, *case, ranks=workers)[0]).T
            found.append(_row(name, count, workers, seconds) | {"bytes": 4 * rows * width})
    return found


def _row(name: str, count: int, workers: int, seconds: np.ndarray) -> Row:
    one, all_, pipe = seconds
    if name == DELAYED:
        case, most = f"delayed gradients, K = {workers}", 3 / (1 + 2 / workers)
    else:
        table = PIPELINE[name](workers, count)
        idle = table.bubble_share(1.0, 1.0, 1.0)
        # If the closed formula does not apply to so few micro-batches, a simulation computes the
        # idle share.
        if idle is None:
            idle = simulate_pipeline(table, 1.0, 1.0, 1.0).bubble_share
        case, most = f"{name}, m = {count}", workers * (1 - idle)
    # Ratios are computed from times of the same repeat, because the machine's speed varies.
    most *= float(np.median(one / all_))
    speedup = float(np.median(one / pipe))
    row = head("pipeline", case, "step", workers, repeats=len(one)) | spread(pipe.tolist())
    return row | {
        "one_ms": 1e3 * float(np.median(one)),
        "stage_ms": 1e3 * float(np.median(one)) / count / workers,
        "speedup": speedup,
        "at_most": most,
        "share": speedup / most,
    }


def _measure(
    communicator: Communicator,
    schedule: str,
    microbatches: int,
    width: int,
    depth: int,
    rows: int,
    repeats: int,
) -> list[list[float]]:
    """Return the step times per repeat: of one process, of all processes, and of the pipeline."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, "relu") for _ in range(depth)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    # The communicator `solo` contains only this rank, so that one process runs the same code as the
    # pipeline.
    solo = communicator.split(communicator.rank)
    shape = (rows * microbatches, width)
    alone: Step
    together: Step
    if schedule == DELAYED:
        delayed, together = _delayed(communicator, model, shape)
        alone = _repeated(_step(solo, model, "gpipe", 1, shape))
    else:
        alone = _step(solo, model, schedule, microbatches, shape)
        together = _step(communicator, model, schedule, microbatches, shape)
    # Untimed steps precede the measurement, because the first step traces and compiles.
    for _ in range(WARM):
        alone()
        together()
    found = []
    for _ in range(repeats):
        # While rank 0 computes alone, the other ranks wait at the barrier.
        kinds = (alone if communicator.rank == 0 else lambda: None, alone, together)
        found.append([_slowest(communicator, step) for step in kinds])
    if schedule == DELAYED:
        delayed.finish()
        found = [[seconds / ITERATIONS for seconds in each] for each in found]
    return found


def _step(
    communicator: Communicator,
    model: keras.Model,
    schedule: str,
    microbatches: int,
    shape: tuple[int, int],
) -> Step:
    from labkit.model_parallel.stages import Runner

    table = PIPELINE[schedule](communicator.size, microbatches)
    own, inputs, outputs = _own_stages(communicator, model, table.stages)
    runner = Runner(communicator, table, own, inputs, outputs, _unrecorded)
    batch, update = _work(shape, own)
    return lambda: runner.step(batch, update)


def _delayed(
    communicator: Communicator, model: keras.Model, shape: tuple[int, int]
) -> tuple[Delayed, Callable[[], None]]:
    from labkit.model_parallel.stages import Delayed, StageMessages

    own, inputs, outputs = _own_stages(communicator, model, communicator.size)
    ((number, module),) = own.items()
    delayed = Delayed(module, StageMessages(communicator, inputs, outputs), _unrecorded)
    batch, update = _work(shape, own)
    return delayed, _repeated(lambda: delayed.step(batch, lambda: update(number)))


def _own_stages(
    communicator: Communicator, model: keras.Model, stages: int
) -> tuple[dict[int, Stage], list[keras.KerasTensor], list[keras.KerasTensor]]:
    """Return this rank's stages by stage number, and the inputs and outputs of all stages."""
    import tensorflow as tf

    from labkit.model_parallel.stages import BlockChain, Stage, balance_parameters, split_model

    models = split_model(model, balance_parameters([1] * len(BlockChain(model)), stages))

    def loss(y: tf.Tensor, predicted: tf.Tensor, weight: tf.Tensor | None) -> tf.Tensor:
        return tf.reduce_mean(tf.square(y - predicted))

    own = {
        number: Stage(part, loss if number == stages - 1 else None, number == 0)
        for number, part in enumerate(models)
        if number == communicator.rank
    }
    return own, [part.inputs[0] for part in models], [part.outputs[0] for part in models]


def _work(shape: tuple[int, int], own: dict[int, Stage]) -> tuple[Batch, Callable[[int], None]]:
    """Return a batch, and a function that updates the weights of a stage."""
    import keras
    import tensorflow as tf

    from labkit.model_parallel.stages import Batch

    optimizers = {number: keras.optimizers.SGD(1e-4) for number in own}

    def update(stage: int) -> None:
        optimizers[stage].apply(own[stage].take_gradients(), own[stage].variables)

    return Batch(tf.random.normal(shape), tf.random.normal(shape)), update


def _unrecorded(action: str, stage: int, number: int) -> AbstractContextManager[None]:
    return nullcontext()


def _repeated(step: Step) -> Callable[[], None]:
    def several() -> None:
        for _ in range(ITERATIONS):
            step()

    return several


def _slowest(communicator: Communicator, step: Step) -> float:
    communicator.barrier("the barrier before the next timed step")
    start = time.perf_counter()
    step()
    own = time.perf_counter() - start
    return float(max(communicator.allgather(own)))


@click.command("pipeline")
@click.option(
    "--workers",
    default=2,
    show_default=True,
    help="Number of pipeline stages; each stage is a rank with one thread.",
)
@click.option(
    "--schedules",
    default="gpipe,1f1b,zero_bubble,delayed",
    show_default=True,
    callback=names,
    help="Pipeline schedules.",
)
@click.option("--repeats", default=5, show_default=True, help="Interleaved repeats.")
@AS_JSON
def command(workers: int, schedules: list[str], repeats: int, file: Path | None) -> None:
    """Compare step times of pipelines with those of one process on the same micro-batches."""
    rows = measure(workers, schedules, repeats=repeats)
    columns = {"case": "case"} | TIMES | {"one_ms": "one process ms"}
    columns |= {"stage_ms": "ms per stage and micro-batch", "speedup": "speed-up"}
    show_rows(rows, columns | {"at_most": "upper bound", "share": "share of bound"}, file)
