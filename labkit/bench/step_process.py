"""A process with its own threads and devices, which trains and reports what ran in its steps.

TensorFlow fixes threads and logical devices when it first computes: every setting needs a process
of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from labkit.bench.steps import Averaging, Case, Model
from labkit.frameworks.child import serve
from labkit.records.step_graph import StepGraph
from labkit.worker.executed_step import step_graph

if TYPE_CHECKING:
    import tensorflow as tf

PROCESS = "labkit.bench.step_process"
KINDS = ("plain", "gated", "split")  # of steps whose graph can be asked for
WARM = 3  # steps before a turn's timed ones
FRONT, BACK = "CPU:0", "CPU:1"  # logical devices of one process


class Threads(NamedTuple):
    """Of one setting: `intra` work on one operation, `inter` on operations beside each other."""

    intra: int
    inter: int


class Setting(NamedTuple):
    """What a process is told.

    Attributes:
        threads: that it computes with.
        cases: the steps that it will be asked for.
        devices: logical ones, into which its processor is divided.
    """

    threads: Threads
    cases: tuple[Case, ...]
    devices: int = 1


def start(setting: Setting) -> Mapping[str, Callable[..., object]]:
    """Fix threads and devices, and answer."""
    import tensorflow as tf

    # Before anything is computed: a tensor is enough to fix them.
    tf.config.threading.set_intra_op_parallelism_threads(setting.threads.intra)
    tf.config.threading.set_inter_op_parallelism_threads(setting.threads.inter)
    (processor,) = tf.config.list_physical_devices("CPU")
    each = [tf.config.LogicalDeviceConfiguration()] * setting.devices
    tf.config.set_logical_device_configuration(processor, each)
    cases = {case.name: case for case in setting.cases}
    models = {name: Model(case, rank=0) for name, case in cases.items()}
    steps = {name: model.step(_as_they_are) for name, model in models.items()}

    def take(name: str, count: int) -> list[float]:
        """Seconds of so many steps of a case, after a few that nobody counts."""
        for _ in range(WARM):
            steps[name]()
        return [_seconds(steps[name]) for _ in range(count)]

    def graph(name: str, kind: str, repeats: int) -> StepGraph:
        """What ran in a step of a case: `plain`, `gated` or `split` over two devices."""
        model = SplitModel(cases[name], rank=0) if kind == "split" else models[name]
        between = gated if kind == "gated" else _as_they_are
        return step_graph(partial(_train, model, between), model.x, model.y, repeats=repeats)

    return {"take": take, "graph": graph}


def _as_they_are(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    return gradients


def _train(model: Model, between: Averaging, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return model.train(x, y, between)


def _seconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


class SplitModel(Model):
    """A perceptron whose first half of layers, its rows included, is on one device, the rest on
    another.

    Gradients are computed where their layer is; what passes between the devices is TensorFlow's
    doing.
    """

    def __init__(self, case: Case, rank: int) -> None:
        import tensorflow as tf

        super().__init__(case, rank)
        self.cut = len(self.weights) // 4 * 2  # whole layers: a weight and its bias
        places = [FRONT] * self.cut + [BACK] * (len(self.weights) - self.cut)
        self.weights = [_on(place, each) for place, each in zip(places, self.weights, strict=True)]
        zeros = [tf.zeros_like(each) for each in self.weights]
        self.momenta = [_on(place, each) for place, each in zip(places, zeros, strict=True)]

    def train(self, x: tf.Tensor, y: tf.Tensor, mean: object = None) -> tf.Tensor:
        """See `Model`; there is no mean, for there is one process."""
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
        # Without a device: an update is where its variable is.
        self.update([*first, *own])
        return loss


def gated(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    """The same gradients, none of which is there before all of them are.

    That is what `gate_gradients=GATE_GRAPH` meant to the optimizers of TensorFlow 1.
    """
    import tensorflow as tf

    with tf.control_dependencies(gradients):
        return [tf.identity(each) for each in gradients]


def _layers(x: tf.Tensor, weights: Sequence[tf.Variable]) -> tf.Tensor:
    """Dense layers with a rectifier between each two."""
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
