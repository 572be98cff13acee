"""A process in which Horovod, with TensorFlow's Keras, trains a model exported by labkit."""

from __future__ import annotations

import os
import sys

import horovod
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

from labkit.frameworks.child import serve
from labkit.frameworks.exported import Batches, Exported, calls, loss_of, model_of

# The constant TIMEOUT is the maximum number of seconds until all workers have joined.
TIMEOUT = "300"


class Training:
    """A worker's training state under Horovod: model, optimizer and batches."""

    def __init__(self, exported: Exported) -> None:
        self._exported, self._batches = exported, Batches(exported)
        tf.keras.backend.set_floatx(exported.dtype)
        self._model = model_of(exported, self._batches.weights, tf.keras)
        self._optimizer = tf.keras.optimizers.SGD(**exported.optimizer)
        self._loss = loss_of(exported, tf.keras)
        self._compiled = tf.function(self._train, reduce_retracing=True)

    def open(self) -> int:
        """Start the rendezvous server on the first worker, and return its port."""
        self._server = RendezvousServer()
        port: int = self._server.start()
        size = self._exported.size
        self._server.init(get_host_assignments(parse_hosts(f"127.0.0.1:{size}"), size))
        return port

    def join(self, port: int) -> None:
        """Join the other workers through Gloo, because MPI requires a start by mpirun."""
        rank, size = self._exported.rank, self._exported.size
        for scope, (number, count) in {
            "": (rank, size),
            "LOCAL_": (rank, size),
            "CROSS_": (0, 1),
        }.items():
            os.environ[f"HOROVOD_{scope}RANK"] = str(number)
            os.environ[f"HOROVOD_{scope}SIZE"] = str(count)
        os.environ |= {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_HOSTNAME": "127.0.0.1",
            "HOROVOD_GLOO_IFACE": "lo0" if sys.platform == "darwin" else "lo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": TIMEOUT,
        }
        hvd.init()

    def step(self) -> float:
        """Train on the next batch, and return the mean loss of this worker's samples."""
        x, y, factor = self._batches.next()
        dtype = self._exported.dtype
        return float(
            self._compiled(tf.constant(x, dtype), tf.constant(y), tf.constant(factor, dtype))
        )

    def weights(self) -> list[np.ndarray]:
        """Return the trained weights in Keras's layout."""
        weights: list[np.ndarray] = self._model.get_weights()
        return weights

    def describe(self) -> tuple[str, str]:
        """Return the name of the training class, and the version of the framework."""
        kind = hvd.DistributedGradientTape
        version = f"Horovod {horovod.__version__}, TensorFlow {tf.__version__}"
        return f"{kind.__module__}.{kind.__qualname__}", version

    def _train(self, x: tf.Tensor, y: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = self._loss(y, self._model(x, training=True))
            scaled = loss * factor
        variables = self._model.trainable_variables
        gradients = hvd.DistributedGradientTape(tape).gradient(scaled, variables)
        self._optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss


if __name__ == "__main__":
    serve(lambda task: calls(Training(task[1])))
