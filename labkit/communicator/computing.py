"""Context managers that add an artificial slowdown to the computations of a slow rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from labkit.communicator.communicator import Communicator


def computing(communicator: Communicator) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that creates context managers, which slow down this rank's computations.

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
