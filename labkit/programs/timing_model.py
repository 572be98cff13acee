"""Durations on the virtual clock, drawn from random distributions with fixed seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from labkit.network import ComputeTime, Fault, Slowdown
from labkit.network.compute_time import uniform_scalar
from labkit.programs.actions import Message


@dataclass(frozen=True)
class TimingModel:
    """The durations of computations, updates and delays in one run on the virtual clock.

    Attributes:
        compute: Compute time of a worker that has no slowdown.
        slow: Slowdown of each slow worker, by worker number.
        seed: Seed of the random durations.
        measured: Seconds per gradient, measured in this process if `compute` has no fixed time.
        update: Seconds that a server needs for one update.
        later: Additional delays, in s, of messages with gradients, by (worker, step).
        faults: Injected faults; those that slow down or pause a worker change the worker's compute
            times.
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
        """Whether each worker has the same compute time in all of its training steps."""
        calm = all(
            slowdown.distribution == "constant" and slowdown.pause is None
            for slowdown in self.slow.values()
        )
        return calm and self.compute.even and not (self.later or self.faults)

    def computed(self, worker: int, step: int, start: float, share: float = 1.0) -> float:
        """Return the end time in s of a computation that is the fraction `share` of a full step."""
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
        """Return the end time of an update that a server starts at the time `start`."""
        return start + self.update

    def late(self, to: int, message: Message) -> float:
        """Return the injected delay of a message in s, which is added to the network's delay."""
        if not self.later or message.values is None:
            return 0.0
        return self.later.get((message.source, message.step), 0.0)
