"""One model that computes the gradients of many workers, each at the worker's own weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.programs.actions import Gradient, Vector
from labkit.programs.roles import ServerPieces
from labkit.programs.soft_targets import Soft

Triple: TypeAlias = tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]  # x, y, sample weight
# The type `Batches` is a function of (worker, batch number) that returns a batch.
Batches: TypeAlias = Callable[[int, int], Triple]


class Replica:
    """A model's gradient as a function of flat weights, with one graph for all workers.

    Each worker also has its own copy of the layers' state, such as moving statistics and random
    seeds.

    Args:
        model: Compiled model with the initial weights.
        batches: Function of (worker, batch number) that returns a batch.
        variables: Trainable variables in the order of the flat weights; None means the order of the
            model.
    """

    def __init__(
        self,
        model: keras.Model,
        batches: Batches,
        variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        self.model, self._batches = model, batches
        self._variables = list(model.trainable_variables if variables is None else variables)
        dtypes = {variable.dtype for variable in self._variables}
        if len(dtypes) != 1:
            raise InvalidInput(
                f"weights of {', '.join(sorted(dtypes)) or 'no dtype'} cannot form one vector; "
                "give the model trainable weights of one dtype"
            )
        self.shapes = [tuple(variable.shape) for variable in self._variables]
        ends = np.cumsum([0, *(int(np.prod(shape)) for shape in self.shapes)])
        self._bounds = list(pairwise(ends.tolist()))
        self.size = int(ends[-1])
        self._states: dict[int, list[np.ndarray]] = {}
        self._first = [variable.numpy() for variable in model.non_trainable_variables]
        self._steps: dict[int, int] = {}
        self._compiled = tf.function(self._step, reduce_retracing=True)
        self._predicts = tf.function(self._soft, reduce_retracing=True)
        self._curves = tf.function(self._product, reduce_retracing=True)
        # The layers currently contain the state of the worker with the number `_whose`.
        self._whose: int | None = None

    @property
    def weights(self) -> Vector:
        """A copy of the model's weights, as one flat vector."""
        return np.concatenate([variable.numpy().reshape(-1) for variable in self._variables])

    @property
    def paths(self) -> list[str]:
        """The paths of the variables in the Keras model, in the order of the flat weights."""
        return [variable.path for variable in self._variables]

    def pieces(self, flat: Vector) -> list[Vector]:
        """Split flat weights into one flat vector per variable."""
        return [flat[start:stop] for start, stop in self._bounds]

    def gradient(self, worker: int, weights: Vector) -> Gradient:
        """Compute the gradient of a worker's next batch at given weights."""
        number = self._steps.get(worker, 0)
        self._steps[worker] = number + 1
        return self.gradient_of(worker, number, weights, self._batches)

    def distilled(self, worker: int, weights: Vector, soft: Vector, share: float) -> Gradient:
        """Compute the gradient of the loss plus `share` times the loss for soft targets."""
        number = self._steps.get(worker, 0)
        self._steps[worker] = number + 1
        soft_targets = tf.convert_to_tensor(soft), tf.constant(share, soft.dtype)
        return self.gradient_of(worker, number, weights, self._batches, *soft_targets)

    def predictions(self, number: int, worker: int, step: int, weights: Vector) -> Vector:
        """Predict soft targets for one batch of a worker."""
        x, _, _ = self._batches(worker, step)
        self._become(number)
        predicted: Vector = self._predicts(tf.convert_to_tensor(weights), x).numpy()
        return predicted

    def gradient_of(
        self, worker: int, number: int, weights: Vector, batches: Batches, *soft: tf.Tensor
    ) -> Gradient:
        """Compute the gradient of a batch; `soft` may contain soft targets and their
        coefficient.
        """
        x, y, weight = batches(worker, number)
        rows = len(keras.tree.flatten(x)[0])
        if rows == 0:
            return Gradient(np.zeros_like(weights), 0, 0.0, number)
        self._become(worker)
        flat, loss = self._compiled(tf.convert_to_tensor(weights), x, y, weight, *soft)
        return Gradient(flat.numpy(), rows, float(loss), number)

    def curved(
        self, worker: int, weights: Vector, ends: Sequence[int], batches: Batches
    ) -> Gradient:
        """Multiply the Hessian of the first batch's loss by one vector per block of weights.

        The class `labkit.programs.actions.Curvature` describes the vectors by which the Hessian is
        multiplied.
        """
        x, y, weight = batches(worker, 0)
        rows = len(keras.tree.flatten(x)[0])
        products = np.zeros((len(ends) - 1, self.size), weights.dtype)
        if rows:
            self._become(worker)
            signs = np.random.default_rng(0).choice([-1.0, 1.0], self.size).astype(weights.dtype)
            flat = tf.convert_to_tensor(weights)
            for row, (start, stop) in zip(products, pairwise(ends), strict=True):
                along = np.zeros_like(weights)
                along[start:stop] = signs[start:stop]
                row[...] = self._curves(flat, tf.convert_to_tensor(along), x, y, weight).numpy()
            self._assign(self._first)
        return Gradient(products.reshape(-1), rows, 0.0, 0)

    def try_out(self, batches: Batches) -> None:
        """Compute a gradient and discard it, to compile the graph or to measure the time."""
        x, y, weight = batches(0, 0)
        self._compiled(tf.convert_to_tensor(self.weights), x, y, weight)[0].numpy()
        self._assign(self._first)

    def states(self, worker: int) -> list[np.ndarray]:
        """Return the values of the layers' non-trainable variables for one worker."""
        if worker == self._whose:
            return [variable.numpy() for variable in self.model.non_trainable_variables]
        return self._states.get(worker, self._first)

    def put_states(self, worker: int, states: Sequence[np.ndarray]) -> None:
        """Set the values of the layers' non-trainable variables for one worker."""
        self._states[worker] = list(states)
        if worker == self._whose:
            self._assign(states)

    def keep(self) -> tuple[dict[int, int], dict[int, list[np.ndarray]]]:
        """Return each worker's number of computed batches, and each worker's layer state."""
        workers = self._steps.keys() | self._states.keys()
        return dict(self._steps), {worker: self.states(worker) for worker in workers}

    def take(self, steps: dict[int, int], states: dict[int, list[np.ndarray]]) -> None:
        """Restore the numbers of batches and the layer states that `keep` returned."""
        for worker, count in steps.items():
            # The worker's batches from before the checkpoint are requested again. The next request
            # of the worker then returns a new batch.
            for number in range(count):
                self._batches(worker, number)
        self._steps, self._states, self._whose = steps, states, None

    def finish(self, weights: Vector, states: Sequence[np.ndarray]) -> None:
        """Store weights in the model, and values in its non-trainable variables."""
        if self._whose is not None:
            self._states[self._whose] = self.states(self._whose)
            self._whose = None
        self._assign(states)
        self._put(weights)

    def _put(self, weights: Vector) -> None:
        for variable, (start, stop) in zip(self._variables, self._bounds, strict=True):
            variable.assign(weights[start:stop].reshape(variable.shape))

    def _become(self, worker: int) -> None:
        """Save the previous worker's layer state, and load this worker's state into the layers."""
        if not self._first or worker == self._whose:
            return
        variables = self.model.non_trainable_variables
        if self._whose is not None:
            self._states[self._whose] = [variable.numpy() for variable in variables]
        self._assign(self._states.get(worker, self._first))
        self._whose = worker

    def _assign(self, states: Sequence[np.ndarray]) -> None:
        for variable, value in zip(self.model.non_trainable_variables, states, strict=True):
            variable.assign(value)

    def _hold(self, flat: tf.Tensor) -> None:
        for variable, (start, stop) in zip(self._variables, self._bounds, strict=True):
            variable.assign(tf.reshape(flat[start:stop], variable.shape))

    def _product(
        self,
        flat: tf.Tensor,
        along: tf.Tensor,
        x: tf.Tensor,
        y: tf.Tensor,
        weight: tf.Tensor | None,
    ) -> tf.Tensor:
        """Return the product of the Hessian and the vector `along`."""
        with tf.GradientTape() as tape:
            gradient, _ = self._step(flat, x, y, weight)
            slope = tf.reduce_sum(gradient * along)
        return self._flat(tape, slope, flat.dtype)

    def _flat(self, tape: tf.GradientTape, of: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Return the flat gradient of `of`, with 0 for weights that do not influence `of`."""
        gradients = tape.gradient(of, [variable.value for variable in self._variables])
        pieces = [
            tf.zeros([stop - start], dtype) if gradient is None else tf.reshape(gradient, [-1])
            for gradient, (start, stop) in zip(gradients, self._bounds, strict=True)
        ]
        return tf.concat(pieces, 0)

    def _soft(self, flat: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        self._hold(flat)
        predicted = Soft(self.model).targets(self.model(x, training=False))
        return tf.reshape(tf.cast(predicted, flat.dtype), [-1])

    def _step(
        self,
        flat: tf.Tensor,
        x: tf.Tensor,
        y: tf.Tensor,
        weight: tf.Tensor | None,
        soft: tf.Tensor | None = None,
        share: float = 0.0,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        self._hold(flat)
        with tf.GradientTape() as tape:
            predicted = self.model(x, training=True)
            loss = self.model.compute_loss(
                x=x, y=y, y_pred=predicted, sample_weight=weight, training=True
            )
            if soft is not None:
                loss += tf.cast(share, loss.dtype) * Soft(self.model)(soft, predicted, weight)
        return self._flat(tape, loss, flat.dtype), loss


class Shard:
    """The weights that a server stores, with the optimizer that updates them.

    Args:
        part: Ranges of the flat weights that the server stores.
        weights: Initial weights of the whole model, as one flat vector.
        optimizer: A new optimizer, which updates only the weights of this server.
        variables: Variables of the model, from which names and constraints are copied.
    """

    def __init__(
        self,
        part: ServerPieces,
        weights: Vector,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[keras.Variable],
    ) -> None:
        self.part, self._optimizer = part, optimizer
        values_of_part = part.take(weights)
        self._sizes = [piece.stop - piece.start for piece in part.pieces]
        self._variables = []
        pieces = np.split(values_of_part, np.cumsum(self._sizes)[:-1]) if self._sizes else []
        for piece, values in zip(part.pieces, pieces, strict=True):
            shape = piece.shape if piece.shape is not None else (-1,)
            model = variables[piece.tensor]
            self._variables.append(
                keras.Variable(
                    values.reshape(shape), dtype=str(values_of_part.dtype), name=model.name
                )
            )
            self._variables[-1].constraint = model.constraint
        self._factor = tf.Variable(1.0, dtype=tf.float64)
        self._forgotten = tf.Variable(0, dtype=str(optimizer.iterations.dtype))
        _scale(optimizer, self._factor, self._forgotten)
        if self._variables:
            optimizer.build(self._variables)
        self._compiled = tf.function(self._apply)

    @property
    def nbytes(self) -> int:
        """The total bytes of this server's weights and of its optimizer's variables."""
        return sum(np.asarray(v).nbytes for v in (*self._variables, *self._optimizer.variables))

    @property
    def slots(self) -> list[keras.Variable]:
        """The slots of the optimizer: all its variables except learning rate and step counter."""
        return _slots(self._optimizer)

    def keep(self) -> list[np.ndarray]:
        """Return the values of the weights and of all variables of the optimizer."""
        return [np.array(variable.numpy()) for variable in self._all]

    def take(self, values: Sequence[np.ndarray]) -> None:
        """Restore the weights and the optimizer variables from values that `keep` returned."""
        for variable, value in zip(self._all, values, strict=True):
            variable.assign(value)

    @property
    def _all(self) -> list[Any]:
        return [*self._variables, *self._optimizer.variables, self._forgotten]

    def become(self, weights: Vector) -> None:
        """Replace the server's weights."""
        edges = np.cumsum(self._sizes)[:-1]
        for variable, values in zip(self._variables, np.split(weights, edges), strict=True):
            variable.assign(values.reshape(variable.shape))

    def forget(self, fresh: keras.optimizers.Optimizer) -> None:
        """Reset the optimizer's slots to those of a new optimizer, and its step counter to 0."""
        fresh.build(self._variables)
        for slot, first in zip(self.slots, _slots(fresh), strict=True):
            slot.assign(first)
        self._forgotten.assign_add(self._optimizer.iterations.value)
        self._optimizer.iterations.assign(0)

    def update(self, gradient: Vector, rate: float = 1.0) -> Vector:
        """Apply a gradient with the learning rate times `rate`, and return the new weights."""
        if not self._variables:
            return gradient[:0]
        self._factor.assign(rate)
        updated: Vector = self._compiled(tf.convert_to_tensor(gradient)).numpy()
        return updated

    def _apply(self, flat: tf.Tensor) -> tf.Tensor:
        pairs = zip(tf.split(flat, self._sizes), self._variables, strict=True)
        gradients = [tf.reshape(piece, variable.shape) for piece, variable in pairs]
        self._optimizer.apply(gradients, self._variables)
        return tf.concat([tf.reshape(v.value, [-1]) for v in self._variables], 0)


def _slots(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    rate = optimizer._learning_rate
    return [v for v in optimizer.variables if v is not rate and "float" in v.dtype]


def _scale(
    optimizer: keras.optimizers.Optimizer, factor: tf.Variable, forgotten: tf.Variable
) -> None:
    """Multiply the optimizer's learning rate by a factor, and keep the dtype of the learning rate.

    A reset of the optimizer does not restart a learning rate schedule.
    """
    rate = optimizer._learning_rate
    schedules = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)

    def scaled() -> tf.Tensor:
        plain = keras.ops.convert_to_tensor(
            rate(forgotten + optimizer.iterations) if schedules else rate
        )
        return keras.ops.cast(factor * keras.ops.cast(plain, "float64"), plain.dtype)

    optimizer.learning_rate = scaled
