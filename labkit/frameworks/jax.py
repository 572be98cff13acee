"""A process in which Keras on JAX trains what labkit has exported, laid out by DataParallel."""

from __future__ import annotations

import os
import socket

# Asked for when Keras and JAX are imported, and when JAX starts to compute.
os.environ |= {
    "KERAS_BACKEND": "jax",
    "JAX_PLATFORMS": "cpu",
    "NPROC": os.environ.get("OMP_NUM_THREADS", "1"),  # threads of XLA
}

import jax
import keras
import numpy as np

from labkit.frameworks.child import serve
from labkit.frameworks.exported import Batches, Exported, calls
from labkit.frameworks.in_keras import loss_of, model_of


class Training:
    """A model, an optimizer, this worker's batches, and the mesh of all workers.

    Each process has one device of the mesh: weights lie on all, rows of a batch are divided.
    """

    def __init__(self, told: Exported) -> None:
        self._told, self._batches = told, Batches(told)
        jax.config.update("jax_enable_x64", told.dtype == "float64")
        keras.backend.set_floatx(told.dtype)

    def open(self) -> int:
        """The port at which all workers meet; asked of the first one."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
            return port

    def join(self, port: int) -> None:
        """Meet the others. Only then may anything be computed, so the model is made here."""
        told = self._told
        keras.utils.set_random_seed(0)  # else one is agreed on
        keras.distribution.initialize(f"127.0.0.1:{port}", told.size, told.rank)
        self._layout = keras.distribution.DataParallel()
        keras.distribution.set_distribution(self._layout)
        self._model = model_of(told, self._batches.weights, keras)
        self._optimizer = keras.optimizers.SGD(**told.optimizer)
        self._optimizer.build(self._model.trainable_variables)
        self._loss = loss_of(told, keras, reduction="none")
        # What stays: weights, and what the optimizer remembers.
        self._state = [
            [variable.value for variable in variables]
            for variables in (self._model.trainable_variables, self._optimizer.variables)
        ]
        laid_out = jax.tree.map(lambda array: array.sharding, self._state)
        rows = self._layout.get_data_layout((told.size,)).backend_layout
        self._compiled = jax.jit(self._train, donate_argnums=0, out_shardings=(laid_out, rows))

    def step(self) -> float:
        """Train on the next batch; the mean loss of this worker's rows."""
        x, y, parts = self._batches.next_level()  # as devices want it
        batch = (x.astype(self._told.dtype), y, parts.astype(self._told.dtype))
        self._state, losses = self._compiled(self._state, *map(self._placed, batch))
        return float(np.asarray(losses.addressable_data(0))[parts > 0].mean())

    def weights(self) -> list[np.ndarray]:
        """As Keras has them."""
        return [np.asarray(each) for each in self._state[0]]

    def describe(self) -> tuple[str, str]:
        """The class that lays out, and the framework's version."""
        version = f"JAX {jax.__version__}, Keras {keras.__version__}"
        return "keras.distribution.DataParallel", version

    def _placed(self, array: np.ndarray) -> jax.Array:
        """This worker's rows as a part of all workers'."""
        layout = self._layout.get_data_layout(array.shape).backend_layout
        return jax.make_array_from_process_local_data(layout, array)

    def _train(
        self, state: list[list[jax.Array]], x: jax.Array, y: jax.Array, parts: jax.Array
    ) -> tuple[list[list[jax.Array]], jax.Array]:
        """One step of all workers: XLA adds up what their rows say of each weight."""
        weights, remembered = state

        def loss(weights: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            scores, _ = self._model.stateless_call(weights, [], x, training=True)
            each = self._loss(y, scores).reshape(len(x), -1).mean(1)
            return (each * parts).sum(), each

        gradients, losses = jax.grad(loss, has_aux=True)(weights)
        return list(self._optimizer.stateless_apply(remembered, gradients, weights)), losses


if __name__ == "__main__":
    serve(lambda told: calls(Training(told)))
