"""The benchmark's transports and places, with the memory copies that each combination makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from labkit.common.nearest import refuse_unknown

SHARED, LOOPBACK, APART = "shared memory", "TCP on loopback", "TCP between namespaces"
# With UNATTACHED, Open MPI does not read another process's memory, as on kernels that forbid such
# reads (ptrace(2)).
UNATTACHED = "shared memory, no attach"
WITHIN = (SHARED, UNATTACHED)  # places where both processes share the memory of one host
PLACES = (*WITHIN, LOOPBACK, APART)
GRPC = "grpc"

# TCP copies an array twice: into the sender's kernel and out of the receiver's kernel. On loopback,
# sender and receiver have the same kernel, which makes no further copy.
_TCP = ("from the sender's memory into its kernel", "from the kernel into the receiver's memory")
# With Open MPI's active messages, the receiver's MPI library makes an additional copy of each
# fragment.
_FRAGMENTS = (*_TCP, "from the received fragment into the MPI window")


class Way(NamedTuple):
    """A transport, with the place where its two processes run.

    Attributes:
        transport: "grpc", or a name of `labkit.communicator.TRANSPORTS`.
        place: Where the two processes run and communicate, one of `PLACES`.
        copies: Descriptions of the copies of the whole array, one per copy.
    """

    transport: str
    place: str
    copies: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the transport and the place, such as `one_sided, shared memory`."""
        return f"{self.transport}, {self.place}"


# The lists of copies follow from the implementations. gRPC sends large tensors without a copy, and
# the receiver copies the tensors out of gRPC's slices
# (tensorflow/core/distributed_runtime/rpc/grpc_tensor_coding.cc and tensor_coding.cc).
_GRPC = (*_TCP, "from gRPC's received slices into a tensor")
_STAGED = "by the sender, into memory that the receiver may read"
_PUT = ("the put itself, which RDMA hardware does without the processor",)
_READ = (_STAGED, "the read itself, which RDMA hardware does without the processor")
_FETCHED = (_STAGED, *_TCP, "from the received fragment into the destination array")
_COPIES = {
    (GRPC, LOOPBACK): _GRPC,
    (GRPC, APART): _GRPC,
    ("two_sided", SHARED): ("by the receiver's MPI library, out of the sender's memory",),
    ("two_sided", UNATTACHED): (
        "from the sender's memory into fragments of shared memory",
        "from fragments of shared memory into the receiver's memory",
    ),
    ("two_sided", LOOPBACK): _TCP,
    ("two_sided", APART): _TCP,
    ("one_sided", SHARED): _PUT,
    ("one_sided", UNATTACHED): _PUT,  # an MPI window needs no reads of another process's memory
    ("one_sided", LOOPBACK): _FRAGMENTS,
    ("one_sided", APART): _FRAGMENTS,
    ("one_sided_dynamic", SHARED): _READ,
    ("one_sided_dynamic", UNATTACHED): _READ,
    ("one_sided_dynamic", LOOPBACK): _FETCHED,
    ("one_sided_dynamic", APART): _FETCHED,
}
WAYS = {way.name: way for way in (Way(*key, copies) for key, copies in _COPIES.items())}


def chosen(transports: Sequence[str], places: Sequence[str]) -> list[Way]:
    """Return the combinations of the named transports and places; an empty sequence selects all.

    Raises:
        InvalidInput: A name is unknown.
    """
    known = list(dict.fromkeys(way.transport for way in WAYS.values()))
    for field, names, allowed in (("transport", transports, known), ("place", places, PLACES)):
        refuse_unknown(field, names, allowed)
    return [
        way
        for way in WAYS.values()
        if way.transport in (transports or known) and way.place in (places or PLACES)
    ]
