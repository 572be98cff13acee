"""A training step with parallel branches: towers of dense layers, whose outputs are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.worker.devices.request import DeviceRequest

if TYPE_CHECKING:
    import tensorflow as tf

RATE = 0.05  # learning rate of gradient descent
FIRST = "/CPU:0"  # requested explicitly, because TensorFlow would choose a GPU


@dataclass(frozen=True)
class TowerStep:
    """A gradient descent step as a function that returns the loss; its variables; and a batch."""

    run: Callable[..., tf.Tensor]
    variables: Sequence[tf.Variable]
    batch: tuple[tf.Tensor, tf.Tensor]


def towers(request: DeviceRequest, scopes: Sequence[str] = ()) -> TowerStep:
    """Return a training step of the tower model; tower i requests the device `scopes[i]`.

    If there are more towers than entries in `scopes`, the entries are used repeatedly. If `scopes`
    is given, TensorFlow's placer chooses devices for all operations outside the towers. If `scopes`
    is empty, all operations are on the first device.

    The model is \\(\\text{softmax}(W [h_1, …, h_k] + b)\\), where \\(h_i\\) is the output of tower
    i. A tower is a chain of dense layers with ReLU; all towers read the same batch.
    """
    import tensorflow as tf

    def on(tower: int) -> AbstractContextManager[object]:
        return tf.device(f"/{scopes[tower % len(scopes)]}") if scopes else nullcontext()

    with tf.device(FIRST):
        draw = tf.random.Generator.from_seed(request.seed)
        layers = []
        for number, width in enumerate(request.widths):
            with on(number):
                layers.append(_tower(request, width, draw, f"tower{number}"))
        head = _dense(sum(request.widths), request.classes, draw, "head")
        samples = draw.normal((request.batch, request.features))
        labels = draw.uniform((request.batch,), maxval=request.classes, dtype=tf.int32)
    variables = [variable for tower in layers for layer in tower for variable in layer] + head

    def affine(x: tf.Tensor, layer: Sequence[tf.Variable]) -> tf.Tensor:
        return tf.nn.bias_add(tf.matmul(x, layer[0]), layer[1])  # (batch, outputs)

    def loss_of(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        outputs = []
        for number, tower in enumerate(layers):
            with on(number), tf.name_scope(f"tower{number}"):
                h = x
                for layer in tower:
                    h = tf.nn.relu(affine(h, layer))
                outputs.append(h)
        with tf.name_scope("head"):
            scores = affine(tf.concat(outputs, axis=1), head)  # (batch, classes)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=scores)
            return tf.reduce_mean(losses)

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

    return TowerStep(run, variables, (samples, labels))


def _tower(
    request: DeviceRequest, width: int, draw: tf.random.Generator, name: str
) -> list[list[tf.Variable]]:
    """Return the kernel and bias of each layer of one tower."""
    inputs = [request.features, *[width] * (request.depth - 1)]
    return [_dense(width_in, width, draw, f"{name}_{at}") for at, width_in in enumerate(inputs)]


def _dense(inputs: int, outputs: int, draw: tf.random.Generator, name: str) -> list[tf.Variable]:
    import tensorflow as tf

    start = draw.normal((inputs, outputs), stddev=(2 / inputs) ** 0.5)
    kernel = tf.Variable(start, name=f"{name}_kernel")
    return [kernel, tf.Variable(tf.zeros((outputs,)), name=f"{name}_bias")]
