"""Names of the allreduce algorithms, and functions that validate whether they can run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from labkit.common.errors import InvalidInput
from labkit.common.nearest import refuse_unknown
from labkit.network import Network
from labkit.schedules import ALLREDUCE, IN_NETWORK, Schedule

# These algorithms transfer data without messages of labkit, so an emulated network cannot delay the
# data. An emulated network can delay only messages that labkit itself sends.
UNMETERED = {
    "mpi": "the MPI library sends the messages, so labkit cannot delay them",
    "shared_memory": "ranks read each other's memory and send no messages that labkit could delay",
}
ALGORITHMS = (*UNMETERED, *ALLREDUCE)


def validate_algorithm(algorithm: str) -> None:
    """Raise InvalidInput if the algorithm is unknown; the message lists all allowed names."""
    if algorithm in IN_NETWORK:
        raise InvalidInput(
            f"algorithm={algorithm!r} sums inside network switches and runs only in the "
            f"simulator (labkit simulate {algorithm}); allowed on ranks: {', '.join(ALGORITHMS)}"
        )
    refuse_unknown("algorithm", [algorithm], ALGORITHMS)


def refuse_unmetered(algorithm: str, network: object) -> None:
    """Raise an error if a network is emulated on which the algorithm cannot run.

    An emulated network can only delay messages that labkit itself sends.

    Raises:
        InvalidInput: The algorithm cannot run on an emulated network; the message names
            alternatives.
    """
    if network is not None and algorithm in UNMETERED:
        raise InvalidInput(
            f"algorithm={algorithm!r} cannot run on the emulated network {str(network)!r}: "
            f"{UNMETERED[algorithm]}; give one of the algorithms {', '.join(ALLREDUCE)}, or "
            "network=None"
        )


def validate_one_host(algorithm: str, on_one_host: bool) -> None:
    """Raise an error if "shared_memory" is chosen and the ranks are not all on one host.

    Raises:
        InvalidInput: The ranks run on several hosts; the message names alternatives.
    """
    if algorithm == "shared_memory" and not on_one_host:
        raise InvalidInput(
            "algorithm='shared_memory' requires all ranks on one host; use 'two_level', which "
            "sums in shared memory inside each host, or 'auto'"
        )


def schedule_for(
    algorithm: str, network: Network | None, hosts: Callable[[], list[list[int]]]
) -> Schedule:
    """Return the schedule of an allreduce algorithm for an emulated network or the real hosts.

    Args:
        algorithm: The name of an allreduce algorithm in `labkit.schedules.ALLREDUCE`.
        network: The emulated network; None: the real network.
        hosts: A function that returns the ranks of each real host as a list.
    """
    if network is not None:
        return network.schedule(algorithm)
    schedule = ALLREDUCE[algorithm]
    return partial(schedule, hosts=hosts()) if schedule.layout == "hosts" else schedule
