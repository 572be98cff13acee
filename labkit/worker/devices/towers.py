"""A training step whose model has parallel branches: towers of dense layers, joined at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.worker.devices.request import DeviceRequest

if TYPE_CHECKING:
    import tensorflow as tf

RATE = 0.05  # of gradient descent
FIRST = "/CPU:0"  # where all is that no scope names; else TensorFlow would prefer a GPU


@dataclass(frozen=True)
class Step:
    """A step of gradient descent that returns the loss, its variables, and one batch."""

    run: Callable[..., tf.Tensor]
    variables: Sequence[tf.Variable]
    batch: tuple[tf.Tensor, tf.Tensor]


def towers(asked: DeviceRequest, scopes: Sequence[str] = ()) -> Step:
    """The step, all of it on the first device; with scopes tower i is asked onto device i.

    With scopes, which go round again, everything else is where TensorFlow's placer wants it.

    The model is \\(\\text{softmax}(W [h_1, …, h_k] + b)\\), where \\(h_i\\) leaves tower i, a chain
    of dense layers with ReLU; every tower reads the same batch.
    """
    import tensorflow as tf

    def on(tower: int) -> AbstractContextManager[object]:
        return tf.device(f"/{scopes[tower % len(scopes)]}") if scopes else nullcontext()

    with tf.device(FIRST):
        draw = tf.random.Generator.from_seed(asked.seed)
        layers = []
        for number, width in enumerate(asked.widths):
            with on(number):
                layers.append(_tower(asked, width, draw, f"tower{number}"))
        head = _dense(sum(asked.widths), asked.classes, draw, "head")
        samples = draw.normal((asked.batch, asked.features))
        labels = draw.uniform((asked.batch,), maxval=asked.classes, dtype=tf.int32)
    variables = [each for tower in layers for layer in tower for each in layer] + head

    def affine(x: tf.Tensor, layer: Sequence[tf.Variable]) -> tf.Tensor:
        return tf.nn.bias_add(tf.matmul(x, layer[0]), layer[1])  # (batch, outputs)

    def loss_of(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        ends = []
        for number, tower in enumerate(layers):
            with on(number), tf.name_scope(f"tower{number}"):
                h = x
                for layer in tower:
                    h = tf.nn.relu(affine(h, layer))
                ends.append(h)
        with tf.name_scope("head"):
            scores = affine(tf.concat(ends, axis=1), head)  # (batch, classes)
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=scores)
            return tf.reduce_mean(each)

    def descend(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(x, y)
        gradients = tape.gradient(loss, variables)
        with tf.name_scope("descent"):
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.assign_sub(RATE * gradient)
        return loss

    def run(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with nullcontext() if scopes else tf.device(FIRST):
            return descend(x, y)

    return Step(run, variables, (samples, labels))


def _tower(
    asked: DeviceRequest, width: int, draw: tf.random.Generator, name: str
) -> list[list[tf.Variable]]:
    """Kernel and bias of each layer."""
    inputs = [asked.features, *[width] * (asked.depth - 1)]
    return [_dense(each, width, draw, f"{name}_{at}") for at, each in enumerate(inputs)]


def _dense(inputs: int, outputs: int, draw: tf.random.Generator, name: str) -> list[tf.Variable]:
    import tensorflow as tf

    start = draw.normal((inputs, outputs), stddev=(2 / inputs) ** 0.5)
    kernel = tf.Variable(start, name=f"{name}_kernel")
    return [kernel, tf.Variable(tf.zeros((outputs,)), name=f"{name}_bias")]
