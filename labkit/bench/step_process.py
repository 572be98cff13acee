"""A process with given thread counts and logical devices, which times and traces training steps.

TensorFlow fixes its thread counts and logical devices at its first computation, so every setting
needs a separate process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from labkit.bench.steps import Averaging, BenchModel, ModelCase
from labkit.frameworks.child import serve
from labkit.records.step_graph import StepGraph
from labkit.worker.executed_step import step_graph

if TYPE_CHECKING:
    import tensorflow as tf

PROCESS = "labkit.bench.step_process"
KINDS = ("plain", "gated", "split")  # variants of the training step that can be traced
WARM = 3  # number of untimed steps before the timed steps
FRONT, BACK = "CPU:0", "CPU:1"  # two logical devices of one process


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
    """Set threads and devices; return the functions `take` and `graph`, which answer requests."""
    import tensorflow as tf

    # Threads and devices must be set before any computation, because creating one tensor fixes
    # them.
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
        # The first device gets an even number of variables, so that a weight and its bias are not
        # separated.
        self.cut = len(self.weights) // 4 * 2
        places = [FRONT] * self.cut + [BACK] * (len(self.weights) - self.cut)
        self.weights = [_on(place, each) for place, each in zip(places, self.weights, strict=True)]
        zeros = [tf.zeros_like(each) for each in self.weights]
        self.momenta = [_on(place, each) for place, each in zip(places, zeros, strict=True)]

    def train(self, x: tf.Tensor, y: tf.Tensor, mean: object = None) -> tf.Tensor:
        """Run one step as `BenchModel.train` does; `mean` is unused in this single process."""
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
    """Return gradients with control dependencies: none is available before all are computed.

    In TensorFlow 1, the optimizers' option `gate_gradients=GATE_GRAPH` has the same effect as these
    control dependencies.
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


if __name__ == "__main__":
    serve(start)
