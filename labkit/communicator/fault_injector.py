"""Injection of faults into the steps, gradients and messages of a rank."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence

import numpy as np

from labkit.communicator.clock import Clock
from labkit.network import Fault, Slowdown
from labkit.network.compute_time import uniform


class Slowness:
    """The slowdown of one rank, with a random factor for each computation.

    Args:
        slow: The settings of the artificial slowdown of the rank's computations.
        rank: The number of the rank among all ranks, which selects the stream of random factors.
        seed: The seed of the random factors.
        clock: The clock of the rank. The times of pauses are measured from the construction of this
            object.
    """

    def __init__(self, slow: Slowdown, rank: int, seed: int, clock: Clock) -> None:
        self._slow, self._rank, self._seed, self._clock = slow, rank, seed, clock
        self._computations, self._origin = 0, clock.now()

    def act(self, computed: float) -> None:
        """Sleep after a computation for the extra time that the slow rank would have needed.

        Args:
            computed: The real seconds that the computation took.
        """
        number = float(uniform(self._seed, self._rank, self._computations)[0])
        self._computations += 1
        stop = self._clock.now() - self._origin
        start = stop - computed
        longer = start + self._slow.factor(number) * computed
        self._clock.sleep(self._slow.resumes(start, longer) - stop)


# A separate shell process stops and continues this process, because a stopped process cannot
# continue itself.
_STOP = 'kill -STOP "$1"; sleep "$2"; kill -CONT "$1"'


class Injector:
    """An injector of faults into one real rank or one simulated worker.

    Args:
        faults: The faults of all ranks; only the faults of `rank` are injected.
        rank: The rank into which the faults are injected.
        seed: The seed of random choices, such as the bit to flip.
        sends: Whether labkit itself sends the messages, and calls `outgoing` for each message.
            If labkit does not send the messages itself, "corrupt" faults change gradients before
            the communication library receives them.
        real: Whether "kill" and "pause" faults act on this process. If `real` is False, a
            simulation applies "kill" and "pause" faults on its virtual clock.

    Attributes:
        step: The number of the current training step; -1 before the first step.
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

    def begin_step(self, step: int) -> None:
        """Begin a step; pause or kill this process if a fault requires it in this step."""
        self.step, self._sent = step, 0
        if not self._real:
            return
        for fault in self._active("pause"):
            stop = ["/bin/sh", "-c", _STOP, "pause", str(os.getpid()), str(fault.seconds)]
            subprocess.run(stop, check=True)
        for _ in self._active("kill"):
            os.kill(os.getpid(), signal.SIGKILL)

    def gradients(self, paths: Sequence[str], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return all gradients, changed by this step's faults; the input arrays are unchanged.

        Args:
            paths: For each gradient, the path of its variable.
            arrays: The gradients of this rank, in the order of `paths`.
        """
        results = list(arrays)
        for fault in self._active("nan", "inf", *(() if self._sends else ("corrupt",))):
            matches = (path for path in paths if fault.names(path))
            # The caller may pass the gradients of one training step in several calls of
            # `Injector.gradients`. A fault changes the same variable in every training step, namely
            # the first variable whose name matched.
            target = self._targets.get(fault) or next(matches, None)
            if target is None:
                continue
            self._targets[fault] = target
            for number, path in enumerate(paths):
                if path == target and results[number].size:
                    whole = results[number]
                    corrupt = fault.kind == "corrupt"
                    results[number] = (
                        fault.flipped(whole, self._seed) if corrupt else fault.poisoned(whole)
                    )
        return results

    def outgoing(self, data: np.ndarray) -> np.ndarray | None:
        """Return the data to send instead of the message `data`; None if a fault drops the message.

        A fault selects a message by its number within the step; messages without values are not
        counted.
        """
        number, self._sent = self._sent, self._sent + bool(data.nbytes)
        replacement: np.ndarray | None = data
        for fault in self._active("drop", "corrupt"):
            if self._sends and data.nbytes and fault.message == number:
                replacement = None if fault.kind == "drop" else fault.flipped(data, self._seed)
        return replacement

    @property
    def factor(self) -> float:
        """The factor by which faults extend the rank's computing time in the current step."""
        return float(np.prod([fault.factor or 1.0 for fault in self._active("slow")]))

    def _active(self, *kinds: str) -> Iterator[Fault]:
        return (fault for fault in self._faults if fault.kind in kinds and fault.hits(self.step))


class FaultSlowdown(Slowness):
    """A slowdown that "slow" faults cause in some steps, on top of a slowdown in all steps.

    Args:
        injector: The injector that returns the slowdown factor of each step.
        always: The slowdown that applies in all steps; if None, only "slow" faults slow down the
            rank.
        clock: The clock of the rank.
    """

    def __init__(self, injector: Injector, always: Slowness | None, clock: Clock) -> None:
        self._injector, self._always, self._clock = injector, always, clock

    def act(self, computed: float) -> None:
        """Sleep for the additional time of the slowdown, see `Slowness.act`."""
        if self._always is not None:
            self._always.act(computed)
        self._clock.sleep((self._injector.factor - 1) * computed)
