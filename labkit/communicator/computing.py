"""Context managers that extend computations on ranks that are artificially slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from labkit.communicator.communicator import Communicator


def computing(communicator: Communicator) -> Callable[[], AbstractContextManager[None]]:
    """Return a function whose context managers add this rank's slowdown to computations.

    The slowdown ignores the time that the context spends on waits for other ranks and on transfers.

    Args:
        communicator: The communicator of all ranks. The rank number in this communicator selects
            the slowdown and the sequence of random slowdown factors.
    """
    clock = communicator.clock
    if communicator.slowness is None:
        return nullcontext

    @contextmanager
    def slowly() -> Iterator[None]:
        before, start = communicator.traffic.copy(), clock.now()
        yield
        seconds = clock.now() - start
        spent = communicator.traffic.since(before)
        others = spent.wait_seconds + spent.transfer_seconds
        communicator.apply_slowdown(max(0.0, seconds - others))

    return slowly
