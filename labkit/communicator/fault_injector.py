"""The one who plants faults on a rank: asked when a step begins, of gradients, of what is sent."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence

import numpy as np

from labkit.communicator.clock import Clock
from labkit.communicator.slowness import Slowness
from labkit.network import Fault

# The helper stops the process itself, so that it is there to wake it.
_STOP = 'kill -STOP "$1"; sleep "$2"; kill -CONT "$1"'


class Injector:
    """Plants the faults of one rank, or of one worker on the virtual clock.

    Args:
        faults: of all ranks.
        rank: whose are planted here.
        seed: of what a fault leaves open.
        sends: whether what it sends comes by here; else gradients are corrupted before the
            library has them.
        real: whether the process itself dies and stands still; on the virtual clock, which counts
            both, it does not.

    Attributes:
        step: that which is under way.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        rank: int,
        seed: int = 0,
        sends: bool = True,
        real: bool = True,
    ) -> None:
        self._faults = [fault for fault in faults if fault.rank == rank]
        self._seed, self._sends, self._real = seed, sends, real
        self._targets: dict[Fault, str] = {}
        self._sent = 0
        self.step = -1

    def begins(self, step: int) -> None:
        """A step begins: this process may not live through it."""
        self.step, self._sent = step, 0
        if not self._real:
            return
        for fault in self._due("pause"):
            stop = ["/bin/sh", "-c", _STOP, "pause", str(os.getpid()), str(fault.seconds)]
            subprocess.run(stop, check=True)
        for _ in self._due("kill"):
            os.kill(os.getpid(), signal.SIGKILL)

    def gradients(self, paths: Sequence[str], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Gradients of variables, with what is planted in them; those given stay as they are."""
        found = list(arrays)
        for fault in self._due("nan", "inf", *(() if self._sends else ("corrupt",))):
            fits = (path for path in paths if fault.names(path))
            # A variable may come in pieces, one at a time: it is the same one that is hit.
            target = self._targets.get(fault) or next(fits, None)
            if target is None:
                continue
            self._targets[fault] = target
            for number, path in enumerate(paths):
                if path == target and found[number].size:
                    whole = found[number]
                    corrupt = fault.kind == "corrupt"
                    found[number] = (
                        fault.flipped(whole, self._seed) if corrupt else fault.poisoned(whole)
                    )
        return found

    def outgoing(self, data: np.ndarray) -> np.ndarray | None:
        """What is sent in the place of a message with values; None: nothing is."""
        number, self._sent = self._sent, self._sent + bool(data.nbytes)
        found: np.ndarray | None = data
        for fault in self._due("drop", "corrupt"):
            if self._sends and data.nbytes and fault.message == number:
                found = None if fault.kind == "drop" else fault.flipped(data, self._seed)
        return found

    @property
    def factor(self) -> float:
        """How many times as long this rank computes now."""
        return float(np.prod([fault.factor or 1.0 for fault in self._due("slow")]))

    def _due(self, *kinds: str) -> Iterator[Fault]:
        return (fault for fault in self._faults if fault.kind in kinds and fault.hits(self.step))


class FaultSlowdown(Slowness):
    """Slow in some steps, beside what a rank may be in all.

    Args:
        injector: knows in which.
        always: how slow it is besides; None: it is not.
        clock: of the rank.
    """

    def __init__(self, injector: Injector, always: Slowness | None, clock: Clock) -> None:
        self._injector, self._always, self._clock = injector, always, clock

    def act(self, computed: float) -> None:
        """See `Slowness`."""
        if self._always is not None:
            self._always.act(computed)
        self._clock.sleep((self._injector.factor - 1) * computed)
