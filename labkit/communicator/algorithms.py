"""Names of the allreduce algorithms, and checks of whether they can run on a network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from labkit.common.errors import InvalidInput
from labkit.common.nearest import refuse_unknown
from labkit.network import Network
from labkit.schedules import ALLREDUCE, IN_NETWORK, Schedule

# Algorithms that move data without labkit's own messages. Only messages that labkit sends can be
# delayed by an emulated network.
UNMETERED = {
    "mpi": "the MPI library sends the messages, so labkit cannot delay them",
    "shared_memory": "ranks read each other's memory and send no messages that labkit could delay",
}
ALGORITHMS = (*UNMETERED, *ALLREDUCE)


def validate_algorithm(algorithm: str) -> None:
    """Raise InvalidInput, with all allowed names, if the algorithm is unknown."""
    if algorithm in IN_NETWORK:
        raise InvalidInput(
            f"algorithm={algorithm!r} sums inside network switches and runs only in the "
            f"simulator (labkit simulate {algorithm}); allowed on ranks: {', '.join(ALGORITHMS)}"
        )
    refuse_unknown("algorithm", [algorithm], ALGORITHMS)


def refuse_unmetered(algorithm: str, network: object) -> None:
    """Validate that the algorithm can run on an emulated network, if one is given.

    An emulated network can only delay messages that labkit itself sends.

    Raises:
        InvalidInput: The algorithm cannot run there; the message names alternatives.
    """
    if network is not None and algorithm in UNMETERED:
        raise InvalidInput(
            f"algorithm={algorithm!r} cannot run on the emulated network {str(network)!r}: "
            f"{UNMETERED[algorithm]}; give one of the algorithms {', '.join(ALLREDUCE)}, or "
            "network=None"
        )


def validate_one_host(algorithm: str, on_one_host: bool) -> None:
    """Validate that "shared_memory" has all its ranks on one host.

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
    """Return the schedule of an algorithm, for an emulated network or the real hosts.

    Args:
        algorithm: The name of an allreduce algorithm in `labkit.schedules.ALLREDUCE`.
        network: The emulated network; None: the real network.
        hosts: A function that returns, for each real host, the list of its ranks.
    """
    if network is not None:
        return network.schedule(algorithm)
    schedule = ALLREDUCE[algorithm]
    return partial(schedule, hosts=hosts()) if schedule.layout == "hosts" else schedule
