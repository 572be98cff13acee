"""How long a rank computes that is slow on an emulated network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from labkit.communicator.communicator import Communicator


def computing(communicator: Communicator) -> Callable[[], AbstractContextManager[None]]:
    """What stands around each computation of a rank and makes it last as long as it would.

    What the rank waits for others inside, or exchanges with them, is no computation.

    Args:
        communicator: of all ranks: how slow one is, and what it draws, goes by its number there.
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
        communicator.act_slow(max(0.0, seconds - others))

    return slowly
