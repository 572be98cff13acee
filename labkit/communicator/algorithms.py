"""The ways to sum buffers by name, and which of them a network can be emulated for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from labkit.common.errors import InvalidInput
from labkit.common.nearest import refuse_unknown
from labkit.network import Network
from labkit.schedules import ALLREDUCE, IN_NETWORK, Schedule

# What moves data without messages that labkit sends itself, so that no network can be emulated.
UNMETERED = {
    "mpi": "the MPI library sends its messages itself",
    "shared_memory": "ranks read each other's memory and send no messages",
}
ALGORITHMS = (*UNMETERED, *ALLREDUCE)


def check_algorithm(algorithm: str) -> None:
    """Raise InvalidInput, with all names, for one that is not known."""
    if algorithm in IN_NETWORK:
        raise InvalidInput(
            f"algorithm={algorithm!r} adds in switches, which no rank is: it is simulated and "
            f"drawn (labkit simulate {algorithm}); allowed on ranks: {', '.join(ALGORITHMS)}"
        )
    refuse_unknown("algorithm", [algorithm], ALGORITHMS)


def refuse_unmetered(algorithm: str, network: object) -> None:
    """An emulated network needs messages that labkit sends itself.

    Raises:
        InvalidInput: naming what to choose instead.
    """
    if network is not None and algorithm in UNMETERED:
        raise InvalidInput(
            f"algorithm={algorithm!r} cannot run on the emulated network {str(network)!r}: "
            f"{UNMETERED[algorithm]}; choose one of {', '.join(ALLREDUCE)}, or network=None"
        )


def refuse_apart(algorithm: str, on_one_host: bool) -> None:
    """Memory is shared within a host.

    Raises:
        InvalidInput: naming what to choose instead.
    """
    if algorithm == "shared_memory" and not on_one_host:
        raise InvalidInput(
            "shared_memory wants all ranks on one host; use 'two_level', which sums in shared "
            "memory inside each of them, or 'auto'"
        )


def schedule_for(
    algorithm: str, network: Network | None, hosts: Callable[[], list[list[int]]]
) -> Schedule:
    """The schedule of this name, laid out on the emulated network, or on the real hosts.

    Args:
        hosts: returns the ranks of each real host.
    """
    if network is not None:
        return network.schedule(algorithm)
    schedule = ALLREDUCE[algorithm]
    return partial(schedule, hosts=hosts()) if schedule.layout == "hosts" else schedule
