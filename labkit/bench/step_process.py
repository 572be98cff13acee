"""Training steps, timed and traced in processes with given thread counts and logical devices.

TensorFlow fixes thread counts and logical devices at its first computation. Every setting of
threads and devices therefore needs a separate process. One benchmark times steps with different
numbers of intra-op and inter-op threads. Another benchmark traces three variants of a step:
unchanged, with gated gradients, and split over two devices.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from labkit.bench.steps import Averaging, BenchModel, ModelCase
from labkit.common.errors import InvalidInput, short
from labkit.communicator import Communicator
from labkit.frameworks.child import Child, serve
from labkit.records.step_costs import StepTime, ThreadSweep
from labkit.records.step_graph import StepGraph
from labkit.worker.executed_step import step_graph

if TYPE_CHECKING:
    import tensorflow as tf

PROCESS = "labkit.bench.step_process"
# The constant KINDS names the variants of the training step that can be traced.
KINDS = ("plain", "gated", "split")
WARM = 3  # The constant WARM is the number of untimed steps before the timed steps.
# The constants FRONT and BACK name two logical TensorFlow devices of one process.
FRONT, BACK = "CPU:0", "CPU:1"
MOST = 64  # The constant MOST limits the number of threads, and also the number of processes.
DEVICES = 2
# The constant DEEPEST is the maximum number of hidden layers. More than DEEPEST hidden layers do
# not fit into the animation.
DEEPEST = 4


class Threads(NamedTuple):
    """Thread counts: `intra` threads share one operation; `inter` operations run concurrently."""

    intra: int
    inter: int


class Setting(NamedTuple):
    """The settings of a process that measures training steps.

    Attributes:
        threads: Thread counts of the process.
        cases: Models and batch sizes of the training steps that are measured.
        devices: Number of logical CPU devices.
    """

    threads: Threads
    cases: tuple[ModelCase, ...]
    devices: int = 1


def start(setting: Setting) -> Mapping[str, Callable[..., object]]:
    """Set threads and devices; return one function per request (`take` and `graph`)."""
    import tensorflow as tf

    # Threads and devices are configured before any computation, because TensorFlow fixes them when
    # it creates its first tensor.
    tf.config.threading.set_intra_op_parallelism_threads(setting.threads.intra)
    tf.config.threading.set_inter_op_parallelism_threads(setting.threads.inter)
    (processor,) = tf.config.list_physical_devices("CPU")
    each = [tf.config.LogicalDeviceConfiguration()] * setting.devices
    tf.config.set_logical_device_configuration(processor, each)
    cases = {case.name: case for case in setting.cases}
    models = {name: BenchModel(case, rank=0) for name, case in cases.items()}
    steps = {name: model.step(_unchanged) for name, model in models.items()}

    def take(name: str, count: int) -> list[float]:
        """Return the seconds of each timed step of a benchmark case, after warm-up steps."""
        for _ in range(WARM):
            steps[name]()
        return [_seconds(steps[name]) for _ in range(count)]

    def graph(name: str, kind: str, repeats: int) -> StepGraph:
        """Return the traced graph of a benchmark case's step; `kind` is plain, gated or split."""
        model = SplitModel(cases[name], rank=0) if kind == "split" else models[name]
        between = gated if kind == "gated" else _unchanged
        return step_graph(partial(_train, model, between), model.x, model.y, repeats=repeats)

    return {"take": take, "graph": graph}


def _unchanged(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    return gradients


def _train(model: BenchModel, between: Averaging, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return model.train(x, y, between)


def _seconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


class SplitModel(BenchModel):
    """An MLP whose first half of layers is on one logical device, and the rest on another.

    The rows of the input batch are on the first device. The gradients of a layer are computed on
    the layer's device, and TensorFlow transfers tensors between the devices.
    """

    def __init__(self, case: ModelCase, rank: int) -> None:
        import tensorflow as tf

        super().__init__(case, rank)
        # The first device gets an even number of variables. A weight and its bias thus stay
        # together on one device.
        self.cut = len(self.weights) // 4 * 2
        places = [FRONT] * self.cut + [BACK] * (len(self.weights) - self.cut)
        self.weights = [_on(place, each) for place, each in zip(places, self.weights, strict=True)]
        zeros = [tf.zeros_like(each) for each in self.weights]
        self.momenta = [_on(place, each) for place, each in zip(places, zeros, strict=True)]

    def train(self, x: tf.Tensor, y: tf.Tensor, mean: object = None) -> tf.Tensor:
        """Run one step as `BenchModel.train` does; this single process does not use `mean`."""
        import tensorflow as tf

        front, back = self.weights[: self.cut], self.weights[self.cut :]
        with tf.device(FRONT), tf.GradientTape() as before:
            passed = tf.nn.relu(_layers(x, front))
        with tf.device(BACK):
            with tf.GradientTape() as behind:
                behind.watch(passed)
                scores = _layers(passed, back)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=scores)
                loss = tf.reduce_mean(losses)
            *own, returned = behind.gradient(loss, [*back, passed])
        with tf.device(FRONT):
            first = before.gradient(passed, front, output_gradients=returned)
        # TensorFlow places the update of a variable on the variable's device.
        self.update([*first, *own])
        return loss


def gated(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return copies of the gradients, which exist only after all gradients are computed.

    In TensorFlow 1, the optimizers' option `gate_gradients=GATE_GRAPH` has the same effect as
    `gated`.
    """
    import tensorflow as tf

    with tf.control_dependencies(gradients):
        return [tf.identity(each) for each in gradients]


def _layers(x: tf.Tensor, weights: Sequence[tf.Variable]) -> tf.Tensor:
    """Apply dense layers, with a ReLU between two layers."""
    import tensorflow as tf

    for place, (weight, bias) in enumerate(_pairs(weights)):
        x = tf.nn.bias_add((tf.nn.relu(x) if place else x) @ weight, bias)
    return x


def _pairs(weights: Sequence[tf.Variable]) -> list[tuple[tf.Variable, tf.Variable]]:
    return list(zip(weights[::2], weights[1::2], strict=True))


def _on(place: str, value: tf.Tensor) -> tf.Variable:
    import tensorflow as tf

    with tf.device(place):
        return tf.Variable(value)


def time_threads(
    intra: Sequence[int] = (1, 2, 8),
    inter: Sequence[int] = (1, 2, 8),
    batches: Sequence[int] = (32, 1024),
    widths: Sequence[int] = (512, 512),
    steps: int = 20,
    repeats: int = 5,
) -> ThreadSweep:
    """Measure an MLP's training step with every pair of thread counts.

    Each pair of thread counts (intra-op, inter-op) has its own process. In every repeat, the
    processes run one after another at each batch size. While one process runs, the other processes
    sleep. Every second repeat runs the processes in reverse order. A process takes about a third of
    a GiB of unshared memory.

    Args:
        intra: Numbers of intra-op threads (which share the work of one operation) to measure.
        inter: Numbers of inter-op threads (which run operations concurrently) to measure.
        batches: Batch sizes to measure, because the best thread counts depend on the batch size.
        widths: Number of units of each hidden layer.
        steps: Number of timed steps per process and batch size in a repeat, after some warm-up
            steps.
        repeats: Number of repeats; each repeat measures every pair of thread counts at every batch
            size.

    Raises:
        InvalidInput: An argument is out of range.
        RankError: A process ended early.
    """
    # The import is inside the function, because the measuring processes import this module, too,
    # but need no cluster.
    from labkit.cluster import Cluster

    refuse_threads(intra, inter, batches, steps, repeats)
    settings = [Threads(*pair) for pair in product(dict.fromkeys(intra), dict.fromkeys(inter))]
    cases = tuple(
        ModelCase(f"batch {batch}", tuple(widths), batch) for batch in dict.fromkeys(batches)
    )
    with Cluster(workers=1) as cluster:
        timed = cluster.call(_sweep, settings, cases, steps, repeats)[0]
    return ThreadSweep(timed, cores=len(os.sched_getaffinity(0)))


def refuse_threads(
    intra: Sequence[int], inter: Sequence[int], batches: Sequence[int], steps: int, repeats: int
) -> None:
    """Raise InvalidInput for arguments that `time_threads` does not support."""
    for name, values in (("intra", intra), ("inter", inter)):
        if not values or not all(1 <= value <= MOST for value in values):
            raise InvalidInput(
                f"{name}={short(list(values))}: give numbers of threads from 1 to {MOST}"
            )
    if (pairs := len(set(intra)) * len(set(inter))) > MOST:
        raise InvalidInput(
            f"the {pairs} combinations of intra and inter are too many, because each needs a "
            f"process; give at most {MOST} combinations"
        )
    if not batches or min(batches) < 1:
        raise InvalidInput(f"batches={short(list(batches))}: give batch sizes of 1 or more")
    for name, value in (("steps", steps), ("repeats", repeats)):
        if value < 1:
            raise InvalidInput(f"{name}={short(value)}: give a whole number of 1 or more")


def _sweep(
    communicator: Communicator,
    settings: list[Threads],
    cases: tuple[ModelCase, ...],
    steps: int,
    repeats: int,
) -> list[StepTime]:
    """Start one process per pair of thread counts, and measure the processes one at a time."""
    timed = []
    with ExitStack() as opened:
        children = {}
        for threads in settings:
            name = f"the process with {threads.intra} intra-op and {threads.inter} inter-op threads"
            setting = Setting(threads, cases)
            child = Child(PROCESS, name, setting, communicator, threads.intra)
            children[threads] = opened.enter_context(closing(child))
        for child in children.values():
            child.answer()
        for repeat in range(repeats):
            # Every second repeat times the processes in reverse order. The reversal varies which
            # process precedes another process.
            for threads in settings[:: -1 if repeat % 2 else 1]:
                for case in cases:
                    seconds = children[threads].ask("take", case.name, steps)
                    ms = 1e3 * float(np.median(seconds))
                    timed.append(StepTime(case.batch, threads.intra, threads.inter, repeat, ms))
    return timed


def trace_variants(
    widths: Sequence[int] = (256, 128),
    batch: int = 256,
    inter: int = 2,
    repeats: int = 5,
) -> dict[str, StepGraph]:
    """Trace three variants of an MLP's training step in a new process.

    `plain` is the unchanged training step. The variant `gated` adds control dependencies, so that
    no variable changes before all gradients are computed. The variant `split` places the first half
    of the layers on one device. The other layers run on another logical device. Each operation of
    the graph runs on one thread.

    Args:
        widths: Number of units of each hidden layer; there are 1 to 4 hidden layers.
        batch: Batch size in samples.
        inter: Number of threads that run operations concurrently.
        repeats: Number of traced steps of each variant; the trace with the median duration is
            returned.

    Raises:
        InvalidInput: An argument is out of range.
    """
    # The import is inside the function, because the measuring processes import this module, too,
    # but need no cluster.
    from labkit.cluster import Cluster

    refuse_variants(widths, batch, inter, repeats)
    setting = Setting(Threads(1, inter), (ModelCase("traced", tuple(widths), batch),), DEVICES)
    with Cluster(workers=1) as cluster:
        return cluster.call(_trace, setting, repeats)[0]


def refuse_variants(widths: Sequence[int], batch: int, inter: int, repeats: int) -> None:
    """Raise InvalidInput for arguments that `trace_variants` does not support."""
    if not 1 <= len(widths) <= DEEPEST or min(widths) < 1:
        raise InvalidInput(
            f"widths={short(list(widths))}: give the widths of 1 to {DEEPEST} hidden layers, "
            "each of at least 1 unit"
        )
    for name, value in (("batch", batch), ("inter", inter), ("repeats", repeats)):
        if value < 1:
            raise InvalidInput(f"{name}={short(value)}: give a whole number of at least 1")


def _trace(communicator: Communicator, setting: Setting, repeats: int) -> dict[str, StepGraph]:
    (case,) = setting.cases
    child = Child(PROCESS, "the traced process", setting, communicator, setting.threads.intra)
    with closing(child):
        child.answer()
        return {kind: child.ask("graph", case.name, kind, repeats) for kind in KINDS}


if __name__ == "__main__":
    serve(start)
