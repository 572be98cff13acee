"""Durations on the virtual clock, drawn from distributions with fixed seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from labkit.network import ComputeTime, Fault, Slowdown
from labkit.network.random_streams import uniform_scalar
from labkit.programs.actions import Message


@dataclass(frozen=True)
class TimingModel:
    """The timing model of one run.

    Attributes:
        compute: Compute time of a worker without slowdown.
        slow: Slowdowns, by worker.
        seed: Seed of random draws.
        measured: Measured seconds per gradient in this process, if `compute` needs them.
        update: Seconds that a server needs for an update.
        later: Additional delays of gradient messages, s, by (worker, step).
        faults: Injected faults, some of which slow or pause a worker in a step.
    """

    compute: ComputeTime
    slow: Mapping[int, Slowdown]
    seed: int
    measured: float = 0.0
    update: float = 0.0
    later: Mapping[tuple[int, int], float] = field(default_factory=dict)
    faults: Sequence[Fault] = ()

    @property
    def even(self) -> bool:
        """Whether all steps of a worker take the same time."""
        calm = all(
            slowdown.distribution == "constant" and slowdown.pause is None
            for slowdown in self.slow.values()
        )
        return calm and self.compute.even and not (self.later or self.faults)

    def computed(self, worker: int, step: int, start: float, share: float = 1.0) -> float:
        """Return the time when a worker has computed a step's gradient, or a fraction of it."""
        seconds = share * self.compute.of(worker, step, self.seed, self.measured)
        for fault in self.faults:
            if fault.rank == worker and fault.hits(step):
                seconds *= fault.factor or 1.0
                start += fault.seconds or 0.0
        slow = self.slow.get(worker)
        if slow is None:
            return start + seconds
        factor = slow.factor(uniform_scalar(self.seed, worker, step))
        return slow.resumes(start, start + factor * seconds)

    def updated(self, server: int, start: float) -> float:
        """Return the time when a server's update that begins at `start` has ended."""
        return start + self.update

    def late(self, to: int, message: Message) -> float:
        """Return the injected delay of a message, s, in addition to the network's delay."""
        if not self.later or message.values is None:
            return 0.0
        return self.later.get((message.source, message.step), 0.0)
