"""The benchmark of JAX over gloo, with the layout of `keras.distribution.DataParallel`.

Each process has one JAX device. Weights are replicated, the rows of a batch are sharded, and XLA
inserts the allreduce of gradients.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from labkit.bench.peers.rank import Agreed, Meeting, Task, agreed, measure
from labkit.bench.steps import MOMENTUM, RATE, ModelCase, checksum


class JaxPeer:
    """Measures the training steps of one JAX process; the first process is JAX's coordinator."""

    def __init__(self, meeting: Meeting, task: Task) -> None:
        os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": os.environ["OMP_NUM_THREADS"]}
        # The module jax is imported by name, because it belongs to an optional package.
        jax = import_module("jax")
        address = f"127.0.0.1:{task['ports'][0]}"
        jax.distributed.initialize(address, meeting.size, meeting.rank)
        self._meeting, self._jax = meeting, jax
        self.version = f"JAX {jax.__version__}"
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
        layout, spec = jax.sharding.NamedSharding, jax.sharding.PartitionSpec
        self._everywhere, self._divided = layout(mesh, spec()), layout(mesh, spec("batch"))
        self._here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def measure(self, case: ModelCase, repeats: int) -> Agreed:
        """Measure local steps, steps with exchange and allreduces; compare final weights."""
        jax, meeting = self._jax, self._meeting
        alone = Steps(jax, case, meeting.rank, self._here, self._here)
        together = Steps(jax, case, meeting.rank, self._everywhere, self._divided)
        add = jax.jit(lambda rows: rows.sum(0), out_shardings=self._everywhere)
        buffer = self._row(np.zeros(case.parameters, np.float32))
        steps = {
            "local": alone.step,
            "step": together.step,
            "raw allreduce": lambda: add(buffer).block_until_ready(),
        }
        found = measure(meeting, steps, repeats)
        ones = add(self._row(np.full(8, meeting.rank + 1, np.float32)))
        return agreed(meeting, found, np.asarray(ones), together.checksum())

    def leave(self) -> None:
        """Shut down JAX's distributed runtime."""
        self._jax.distributed.shutdown()

    def _row(self, values: np.ndarray) -> Any:
        """Return a matrix that is distributed by rows; `values` is the row of this process."""
        return self._jax.make_array_from_process_local_data(self._divided, values[np.newaxis])


PEERS = {"jax": JaxPeer}


class Steps:
    """A model with its momentum values and a batch of data.

    Args:
        jax: The module `jax`.
        case: Model and batch size.
        rank: Rank whose batch of data is used.
        weights: JAX sharding with which the weights are placed on devices.
        rows: Sharding of the rows of the batch over the processes.
    """

    def __init__(self, jax: Any, case: ModelCase, rank: int, weights: Any, rows: Any) -> None:
        self._jax, self._case = jax, case
        placed = jax.make_array_from_process_local_data
        self._state = [
            [placed(weights, array * scale) for array in case.arrays()] for scale in (1, 0)
        ]
        x, y = case.data(rank)
        self._batch = placed(rows, x), placed(rows, y.astype(np.int32))
        stays = [[weights] * len(each) for each in self._state]
        self._compiled: Callable[..., Any] = jax.jit(
            self._train, donate_argnums=0, out_shardings=(stays, weights)
        )

    def step(self) -> float:
        """Run one training step, wait for the new weights, and return the loss."""
        self._state, loss = self._jax.block_until_ready(self._compiled(self._state, *self._batch))
        return float(loss)

    def checksum(self) -> float:
        """Return a checksum of all weights; equal weights have equal checksums."""
        return checksum(self._state[0])

    def _train(self, state: Any, x: Any, y: Any) -> Any:
        weights, momenta = state
        loss, gradients = self._jax.value_and_grad(self._loss)(weights, x, y)
        momenta = [MOMENTUM * m - RATE * g for m, g in zip(momenta, gradients, strict=True)]
        return [[w + m for w, m in zip(weights, momenta, strict=True)], momenta], loss

    def _loss(self, weights: Any, x: Any, y: Any) -> Any:
        jax = self._jax
        pairs = list(zip(weights[::2], weights[1::2], strict=True))
        if not self._case.widths:
            x = self._convolutions(pairs[:2], x)
            pairs = pairs[2:]
        for weight, bias in pairs[:-1]:
            x = jax.nn.relu(x @ weight + bias)
        scores = jax.nn.log_softmax(x @ pairs[-1][0] + pairs[-1][1])
        return -jax.numpy.take_along_axis(scores, y[:, np.newaxis], 1).mean()

    def _convolutions(self, pairs: Any, x: Any) -> Any:
        jax, lax = self._jax, self._jax.lax
        x = x.reshape(-1, 28, 28, 1)
        for weight, bias in pairs:
            names = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(x, weight, (1, 1), "VALID", dimension_numbers=names)
            x = jax.nn.relu(x + bias)
        window = (1, 2, 2, 1)
        x = lax.reduce_window(x, -np.inf, lax.max, window, window, "VALID")
        return x.reshape(len(x), -1)
