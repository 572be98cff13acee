"""How letters travel between ranks, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from labkit.common.errors import InvalidInput
from labkit.communicator.eager import Slots
from labkit.communicator.mailbox import Mailbox, Route

if TYPE_CHECKING:
    from labkit.communicator.communicator import Communicator

Transport: TypeAlias = Literal["two_sided", "one_sided", "one_sided_dynamic"]
Carrier: TypeAlias = Mailbox | Slots

# Each makes what carries letters, of the communicator, bytes by route, and the rank of each number.
TRANSPORTS: dict[str, Callable[[Communicator, Mapping[Route, int], Sequence[int]], Carrier]] = {
    "two_sided": lambda communicator, routes, hosts: communicator.mailbox(hosts),
    "one_sided": lambda communicator, routes, hosts: communicator.slots(routes, hosts),
    "one_sided_dynamic": lambda communicator, routes, hosts: communicator.parcels(routes, hosts),
}


def carrier(
    transport: str,
    communicator: Communicator,
    routes: Mapping[Route, int],
    hosts: Sequence[int] | None = None,
) -> Carrier:
    """What carries letters (collective).

    Args:
        transport: a name of `TRANSPORTS`.
        communicator: of the ranks.
        routes: bytes of the longest values, by the numbers of who sends and who reads.
        hosts: the rank of each who sends or reads, by number; None: ranks themselves do.

    Raises:
        InvalidInput: the name is not known.
    """
    if transport not in TRANSPORTS:
        raise InvalidInput(
            f"transport={transport!r} is not known; allowed: {', '.join(TRANSPORTS)}"
        )
    return TRANSPORTS[transport](communicator, routes, hosts or range(communicator.size))
