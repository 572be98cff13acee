"""The transports of point-to-point messages by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from labkit.common.nearest import refuse_unknown
from labkit.communicator.mailbox import Mailbox, Route
from labkit.communicator.one_sided import EagerMailbox

if TYPE_CHECKING:
    from labkit.communicator.communicator import Communicator


Transport: TypeAlias = Literal["two_sided", "one_sided", "one_sided_dynamic"]


AnyMailbox: TypeAlias = Mailbox | EagerMailbox


# Each function in the table `TRANSPORTS` opens a mailbox, which sends and receives messages. A
# function in `TRANSPORTS` takes the communicator and the bytes of each route. The function also
# takes the rank of each endpoint (sender or receiver).
TRANSPORTS: dict[str, Callable[[Communicator, Mapping[Route, int], Sequence[int]], AnyMailbox]] = {
    "two_sided": lambda communicator, routes, hosts: communicator.mailbox(hosts),
    "one_sided": lambda communicator, routes, hosts: communicator.eager_mailbox(routes, hosts),
    "one_sided_dynamic": lambda communicator, routes, hosts: communicator.rendezvous_mailbox(
        routes, hosts
    ),
}


def open_mailbox(
    transport: str,
    communicator: Communicator,
    routes: Mapping[Route, int],
    hosts: Sequence[int] | None = None,
) -> AnyMailbox:
    """Return a mailbox that uses the given transport (collective).

    Args:
        transport: The name of a transport in `TRANSPORTS`.
        communicator: The Communicator of the ranks that exchange messages.
        routes: For each pair of endpoints (sender, receiver), the bytes of the longest message.
        hosts: The rank of each endpoint, such as a worker. By default, each rank is one endpoint.

    Raises:
        InvalidInput: The transport is unknown.
    """
    refuse_unknown("transport", [transport], TRANSPORTS)
    return TRANSPORTS[transport](communicator, routes, hosts or range(communicator.size))
