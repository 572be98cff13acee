"""The benchmark of TensorFlow's MultiWorkerMirroredStrategy (RING over gRPC, custom loop)."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

from labkit.bench.peers.meeting import Agreed, Meeting, Task, measure, same
from labkit.bench.steps import BenchModel, ModelCase


def join(meeting: Meeting, task: Task) -> Peer:
    """Set TF_CONFIG before TensorFlow's import, and return the object that measures the steps."""
    workers = [f"127.0.0.1:{port}" for port in task["ports"]]
    cluster = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": meeting.rank}}
    os.environ["TF_CONFIG"] = json.dumps(cluster)
    return Peer(meeting)


class Peer:
    """Measures the training steps of one process of MultiWorkerMirroredStrategy."""

    def __init__(self, meeting: Meeting) -> None:
        import tensorflow as tf

        kind = tf.distribute.experimental
        self._options = kind.CommunicationOptions(
            implementation=kind.CommunicationImplementation.RING
        )
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=self._options
        )
        self._meeting = meeting
        self.version = f"TensorFlow {tf.__version__}"

    def measure(self, case: ModelCase, repeats: int) -> Agreed:
        """Measure local steps, steps with exchange and allreduces; compare final weights."""
        import tensorflow as tf

        rank = self._meeting.rank
        alone, together = BenchModel(case, rank), BenchModel(case, rank)
        buffer = tf.zeros([case.parameters])
        mean, total = tf.distribute.ReduceOp.MEAN, tf.distribute.ReduceOp.SUM

        def step(x: Any, y: Any) -> Any:
            def body(x: Any, y: Any) -> Any:
                return together.train(x, y, lambda gradients: self._reduce(mean, gradients))

            return self._strategy.run(body, (x, y))

        def total_of(values: Any) -> Any:
            return self._strategy.run(lambda values: self._reduce(total, values), (values,))

        stepped, add = tf.function(step), tf.function(total_of)
        steps = {
            "local": alone.step(lambda gradients: gradients),
            "step": lambda: stepped(together.x, together.y).numpy(),
            "raw allreduce": lambda: add(buffer),
        }
        found = measure(self._meeting, steps, repeats)
        total_of_ranks = self._meeting.size * (self._meeting.size + 1) / 2
        right = np.allclose(add(tf.fill([8], float(rank + 1))), total_of_ranks)
        agree = same(self._meeting, together.checksum())
        return Agreed(**found, same_weights=agree and bool(right))

    def leave(self) -> None:
        """Exit the process immediately, because the strategy's threads can block a normal exit."""
        sys.stdout.flush()
        os._exit(0)

    def _reduce(self, operation: Any, values: Any) -> Any:
        import tensorflow as tf

        with tf.device(
            "/cpu:0"
        ):  # all_reduce needs tensors with a device, which tf.function arguments lack
            values = tf.nest.map_structure(tf.identity, values)
        context = tf.distribute.get_replica_context()
        return context.all_reduce(operation, values, options=self._options)
