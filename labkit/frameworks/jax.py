"""A process in which Keras on JAX trains an exported model with Keras's class `DataParallel`."""

from __future__ import annotations

import os
import socket

# Keras and JAX read environment variables on import or at the first computation. The environment
# variables are therefore set before the import.
os.environ |= {
    "KERAS_BACKEND": "jax",
    "JAX_PLATFORMS": "cpu",
    # The variable NPROC sets the number of threads of XLA.
    "NPROC": os.environ.get("OMP_NUM_THREADS", "1"),
}

import jax
import keras
import numpy as np

from labkit.frameworks.child import serve
from labkit.frameworks.exported import Batches, Exported, calls, loss_of, model_of


class Training:
    """A worker's training state: model, optimizer, batches, and the device mesh of all workers.

    Each process has one device of the mesh. Weights are replicated, and samples are sharded.
    """

    def __init__(self, exported: Exported) -> None:
        self._exported, self._batches = exported, Batches(exported)
        jax.config.update("jax_enable_x64", exported.dtype == "float64")
        keras.backend.set_floatx(exported.dtype)

    def open(self) -> int:
        """Return a free port of the first worker, through which all workers join."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
            return port

    def join(self, port: int) -> None:
        """Join the other workers, then build the model; JAX must not compute before the join."""
        exported = self._exported
        # Without a fixed seed, the workers would exchange a random seed.
        keras.utils.set_random_seed(0)
        keras.distribution.initialize(f"127.0.0.1:{port}", exported.size, exported.rank)
        self._layout = keras.distribution.DataParallel()
        keras.distribution.set_distribution(self._layout)
        self._model = model_of(exported, self._batches.weights, keras)
        self._optimizer = keras.optimizers.SGD(**exported.optimizer)
        self._optimizer.build(self._model.trainable_variables)
        self._loss = loss_of(exported, keras, reduction="none")
        self._state = [
            [variable.value for variable in variables]
            for variables in (self._model.trainable_variables, self._optimizer.variables)
        ]
        shardings = jax.tree.map(lambda array: array.sharding, self._state)
        rows = self._layout.get_data_layout((exported.size,)).backend_layout
        self._compiled = jax.jit(self._train, donate_argnums=0, out_shardings=(shardings, rows))

    def step(self) -> float:
        """Train on the next batch, and return the mean loss of this worker's samples."""
        # All devices need the same number of samples, so smaller batches are padded.
        x, y, parts = self._batches.next_padded()
        batch = (x.astype(self._exported.dtype), y, parts.astype(self._exported.dtype))
        self._state, losses = self._compiled(self._state, *map(self._distribute, batch))
        return float(np.asarray(losses.addressable_data(0))[parts > 0].mean())

    def weights(self) -> list[np.ndarray]:
        """Return the trained weights in Keras's layout."""
        return [np.asarray(array) for array in self._state[0]]

    def describe(self) -> tuple[str, str]:
        """Return the name of the class that distributes the model, and the framework version."""
        version = f"JAX {jax.__version__}, Keras {keras.__version__}"
        return "keras.distribution.DataParallel", version

    def _distribute(self, array: np.ndarray) -> jax.Array:
        """Return this worker's samples as its shard of the global array of all samples."""
        layout = self._layout.get_data_layout(array.shape).backend_layout
        return jax.make_array_from_process_local_data(layout, array)

    def _train(
        self, state: list[list[jax.Array]], x: jax.Array, y: jax.Array, parts: jax.Array
    ) -> tuple[list[list[jax.Array]], jax.Array]:
        """Compute a training step of all workers; XLA sums the gradients over all samples."""
        weights, optimizer_state = state

        def loss(weights: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            scores, _ = self._model.stateless_call(weights, [], x, training=True)
            row_losses = self._loss(y, scores).reshape(len(x), -1).mean(1)
            return (row_losses * parts).sum(), row_losses

        gradients, losses = jax.grad(loss, has_aux=True)(weights)
        return list(self._optimizer.stateless_apply(optimizer_state, gradients, weights)), losses


if __name__ == "__main__":
    serve(lambda task: calls(Training(task[1])))
