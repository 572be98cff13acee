"""Benchmarks of Horovod and TensorFlow's MultiWorkerMirroredStrategy with custom training loops.

Horovod's processes are started by mpirun, and average gradients in the same way as its
`DistributedGradientTape`. MultiWorkerMirroredStrategy averages gradients by RING over gRPC.
"""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from labkit.bench.peers.rank import Agreed, Meeting, Task, agreed, measure
from labkit.bench.steps import BenchModel, ModelCase

if TYPE_CHECKING:
    import tensorflow as tf

    # A `Compiled` pair consists of a training step, and a function that sums a tensor over all
    # processes.
    Compiled: TypeAlias = "tuple[Callable[[], object], Callable[[tf.Tensor], tf.Tensor]]"


class TensorFlowPeer(ABC):
    """Measures the training steps of one process of a framework that builds on TensorFlow."""

    version: str

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    @abstractmethod
    def compiled(self, case: ModelCase, model: BenchModel) -> Compiled:
        """Return a training step with exchange, and a function that sums a tensor over ranks."""

    def measure(self, case: ModelCase, repeats: int) -> Agreed:
        """Measure local steps, steps with exchange and allreduces; compare final weights."""
        import tensorflow as tf

        rank = self._meeting.rank
        alone, together = BenchModel(case, rank), BenchModel(case, rank)
        buffer = tf.zeros([case.parameters])
        step, add = self.compiled(case, together)
        steps = {
            "local": alone.step(lambda gradients: gradients),
            "step": step,
            "raw allreduce": lambda: add(buffer),
        }
        found = measure(self._meeting, steps, repeats)
        ones = add(tf.fill([8], float(rank + 1)))
        return agreed(self._meeting, found, ones, together.checksum())


class HorovodPeer(TensorFlowPeer):
    """Measures the training steps of one Horovod process."""

    def __init__(self, meeting: Meeting, task: Task) -> None:
        import tensorflow as tf

        super().__init__(meeting)
        # The module horovod is imported by name, because Horovod is an optional package without
        # type hints.
        horovod, hvd = import_module("horovod"), import_module("horovod.tensorflow")
        hvd.init()
        if (hvd.rank(), hvd.size()) != (meeting.rank, meeting.size):
            raise RuntimeError(
                f"Horovod reports rank {hvd.rank()} of {hvd.size()}, but mpirun reports rank "
                f"{meeting.rank} of {meeting.size}; Horovod was built for a different MPI than "
                "the first mpirun on PATH"
            )
        self._hvd = hvd
        self.version = f"Horovod {horovod.__version__}, TensorFlow {tf.__version__}"

    def compiled(self, case: ModelCase, model: BenchModel) -> Compiled:
        """Return a step that averages gradients by allreduce, and a function that sums a tensor."""
        import tensorflow as tf

        hvd = self._hvd

        def mean(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
            # The function `mean` averages gradients in the same way as Horovod's
            # DistributedGradientTape.
            return [
                hvd.allreduce(gradient, op=hvd.Average, name=f"{case.name}.{number}")
                for number, gradient in enumerate(gradients)
            ]

        def total_of(values: tf.Tensor) -> tf.Tensor:
            return hvd.allreduce(values, op=hvd.Sum, name=f"sum.{values.shape[0]}")

        return model.step(mean), tf.function(total_of)

    def leave(self) -> None:
        """Shut down Horovod and MPI."""
        self._hvd.shutdown()


class MirroredPeer(TensorFlowPeer):
    """Measures the training steps of one process of MultiWorkerMirroredStrategy."""

    def __init__(self, meeting: Meeting, task: Task) -> None:
        super().__init__(meeting)
        workers = [f"127.0.0.1:{port}" for port in task["ports"]]
        place = {"type": "worker", "index": meeting.rank}
        # The environment variable TF_CONFIG must be set before the import of TensorFlow.
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": place})
        import tensorflow as tf

        kind = tf.distribute.experimental
        self._options = kind.CommunicationOptions(
            implementation=kind.CommunicationImplementation.RING
        )
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=self._options
        )
        self.version = f"TensorFlow {tf.__version__}"

    def compiled(self, case: ModelCase, model: BenchModel) -> Compiled:
        """Return a training step, and a function that sums over the replicas."""
        import tensorflow as tf

        mean, total = tf.distribute.ReduceOp.MEAN, tf.distribute.ReduceOp.SUM

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            def body(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
                return model.train(x, y, lambda gradients: self._reduce(mean, gradients))

            return self._strategy.run(body, (x, y))

        def total_of(values: tf.Tensor) -> tf.Tensor:
            return self._strategy.run(lambda values: self._reduce(total, values), (values,))

        stepped = tf.function(step)
        return lambda: stepped(model.x, model.y).numpy(), tf.function(total_of)

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


PEERS = {"horovod": HorovodPeer, "multi_worker_mirrored": MirroredPeer}
