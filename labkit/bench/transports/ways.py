"""The ways to carry an array from one process to another, and how often each copies it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from labkit.common.nearest import refuse_unknown

SHARED, LOOPBACK, APART = "shared memory", "TCP on loopback", "TCP between namespaces"
# As where the kernel lets no process read another's memory (ptrace(2)): Open MPI is told not to.
UNATTACHED = "shared memory, no attach"
WITHIN = (SHARED, UNATTACHED)  # a host
PLACES = (*WITHIN, LOOPBACK, APART)
GRPC = "grpc"

# TCP copies twice, whoever calls it: the sender's kernel takes the bytes, the reader's hands them
# over. On loopback both are one kernel, which passes the same pages on.
_TCP = ("from the sender into its kernel", "from the kernel to the reader")
# Open MPI's active messages: the library of the reader receives fragments, and copies each on.
_FRAGMENTS = (*_TCP, "from the fragment that was received into the window")


class Way(NamedTuple):
    """One way, in one place.

    Attributes:
        transport: "grpc", or a name of `labkit.communicator.TRANSPORTS`.
        place: one of `PLACES`.
        copies: what copies all of an array on its way, one reason each.
    """

    transport: str
    place: str
    copies: tuple[str, ...]

    @property
    def name(self) -> str:
        """`one_sided, shared memory`"""
        return f"{self.transport}, {self.place}"


# By construction. For gRPC: large tensors are handed to gRPC as they lie, and copied out of its
# slices (tensorflow/core/distributed_runtime/rpc/grpc_tensor_coding.cc and tensor_coding.cc).
_GRPC = (*_TCP, "from gRPC's slices into a tensor")
_STAGED = "by the sender, into memory that may be read"
_PUT = ("the put itself, which on RDMA hardware no processor does",)
_READ = (_STAGED, "the read itself, which on RDMA hardware no processor does")
_FETCHED = (_STAGED, *_TCP, "from the fragment that was received to where it is wanted")
_COPIES = {
    (GRPC, LOOPBACK): _GRPC,
    (GRPC, APART): _GRPC,
    ("two_sided", SHARED): ("by the reader's library, out of the sender's memory",),
    ("two_sided", UNATTACHED): (
        "from the sender into shared fragments",
        "from the fragments to the reader",
    ),
    ("two_sided", LOOPBACK): _TCP,
    ("two_sided", APART): _TCP,
    ("one_sided", SHARED): _PUT,
    ("one_sided", UNATTACHED): _PUT,  # a window needs none
    ("one_sided", LOOPBACK): _FRAGMENTS,
    ("one_sided", APART): _FRAGMENTS,
    ("one_sided_dynamic", SHARED): _READ,
    ("one_sided_dynamic", UNATTACHED): _READ,
    ("one_sided_dynamic", LOOPBACK): _FETCHED,
    ("one_sided_dynamic", APART): _FETCHED,
}
WAYS = {way.name: way for way in (Way(*key, copies) for key, copies in _COPIES.items())}


def chosen(transports: Sequence[str], places: Sequence[str]) -> list[Way]:
    """The ways of these transports in these places; none given: all.

    Raises:
        InvalidInput: a name that is not known.
    """
    known = list(dict.fromkeys(way.transport for way in WAYS.values()))
    for field, given, allowed in (("transport", transports, known), ("place", places, PLACES)):
        refuse_unknown(field, given, allowed)
    return [
        way
        for way in WAYS.values()
        if way.transport in (transports or known) and way.place in (places or PLACES)
    ]
