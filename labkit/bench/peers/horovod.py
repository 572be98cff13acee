"""The benchmark of Horovod's `DistributedGradientTape` in a custom loop, started by mpirun."""

from __future__ import annotations

from importlib import import_module

import numpy as np

from labkit.bench.peers.meeting import Agreed, Meeting, Task, measure, same
from labkit.bench.steps import BenchModel, ModelCase


def join(meeting: Meeting, task: Task) -> Peer:
    """Initialize Horovod, and return the object that measures its steps."""
    return Peer(meeting)


class Peer:
    """Measures the training steps of one Horovod process."""

    def __init__(self, meeting: Meeting) -> None:
        import tensorflow as tf

        # Horovod is an optional package without types, so it is imported by name.
        horovod, hvd = import_module("horovod"), import_module("horovod.tensorflow")
        hvd.init()
        if (hvd.rank(), hvd.size()) != (meeting.rank, meeting.size):
            raise RuntimeError(
                f"Horovod reports rank {hvd.rank()} of {hvd.size()}, but mpirun reports rank "
                f"{meeting.rank} of {meeting.size}; Horovod was built for a different MPI than "
                "the first mpirun on PATH"
            )
        self._hvd, self._meeting = hvd, meeting
        self.version = f"Horovod {horovod.__version__}, TensorFlow {tf.__version__}"

    def measure(self, case: ModelCase, repeats: int) -> Agreed:
        """Measure local steps, steps with exchange and allreduces; compare final weights."""
        import tensorflow as tf

        hvd, rank = self._hvd, self._meeting.rank
        alone, together = BenchModel(case, rank), BenchModel(case, rank)
        buffer = tf.zeros([case.parameters])

        def mean(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
            # This function averages gradients as Horovod's DistributedGradientTape does.
            return [
                hvd.allreduce(gradient, op=hvd.Average, name=f"{case.name}.{number}")
                for number, gradient in enumerate(gradients)
            ]

        def total_of(values: tf.Tensor) -> tf.Tensor:
            return hvd.allreduce(values, op=hvd.Sum, name=f"sum.{values.shape[0]}")

        add = tf.function(total_of)

        steps = {
            "local": alone.step(lambda gradients: gradients),
            "step": together.step(mean),
            "raw allreduce": lambda: add(buffer),
        }
        found = measure(self._meeting, steps, repeats)
        total = self._meeting.size * (self._meeting.size + 1) / 2
        right = np.allclose(add(tf.fill([8], float(rank + 1))), total)
        agree = same(self._meeting, together.checksum())
        return Agreed(**found, same_weights=agree and bool(right))

    def leave(self) -> None:
        """Shut down Horovod and MPI."""
        self._hvd.shutdown()
