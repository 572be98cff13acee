"""How long things take on the virtual clock, by laws that depend on nothing but their seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from labkit.network import ComputeTime, Fault, Slowdown
from labkit.network.random_streams import drawn
from labkit.programs.actions import Message


@dataclass(frozen=True)
class TimingModel:
    """The laws of one run.

    Attributes:
        compute: of a worker that is not slow.
        slow: by worker, who is.
        seed: of what is drawn.
        measured: s of a gradient in this process, where `compute` asks for it.
        update: s of a server's update.
        later: s by which a gradient comes later than the network brings it, by (worker, step).
        faults: some make a worker slow, or let it pause, in a step.
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
        """Whether each step of a worker takes as long as its others."""
        calm = all(each.law == "constant" and each.pause is None for each in self.slow.values())
        return calm and self.compute.even and not (self.later or self.faults)

    def computed(self, worker: int, step: int, start: float, share: float = 1.0) -> float:
        """When a worker has computed the gradient of this step, or a share of it."""
        seconds = share * self.compute.of(worker, step, self.seed, self.measured)
        for fault in self.faults:
            if fault.rank == worker and fault.hits(step):
                seconds *= fault.factor or 1.0
                start += fault.seconds or 0.0
        slow = self.slow.get(worker)
        if slow is None:
            return start + seconds
        factor = slow.factor(drawn(self.seed, worker, step))
        return slow.resumes(start, start + factor * seconds)

    def updated(self, server: int, start: float) -> float:
        """When a server has applied a gradient."""
        return start + self.update

    def late(self, to: int, message: Message) -> float:
        """By how much a message arrives later than the network would have it."""
        if not self.later or message.values is None:
            return 0.0
        return self.later.get((message.source, message.step), 0.0)
