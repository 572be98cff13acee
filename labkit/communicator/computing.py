"""Context managers that extend the computations of an artificially slow rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from labkit.communicator.communicator import Communicator


def computing(communicator: Communicator) -> Callable[[], AbstractContextManager[None]]:
    """Return a function whose context managers add the rank's slowdown to each computation.

    Waits for other ranks and transfers inside the context do not count as computation.

    Args:
        communicator: The communicator of all ranks. This rank's number in it selects the slowdown
            and the stream of random factors.
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
