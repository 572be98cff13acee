"""Communication schedules: functions from the number of ranks to rounds of messages."""

from labkit.common.errors import InvalidInput
from labkit.common.nearest import listed
from labkit.schedules.collective import (
    ANY,
    SUM,
    AlphaBetaCost,
    Collective,
    Counts,
    allreduce,
    count_switches,
)
from labkit.schedules.collectives import (
    all_to_all,
    allgather_ring,
    broadcast_tree,
    butterfly,
    gather,
    master_worker,
    rabenseifner,
    reduce_scatter_ring,
    reduce_tree,
    ring,
    round_robin,
    scatter,
    tree,
)
from labkit.schedules.hosts import (
    Hosts,
    hierarchical,
    host_groups,
    in_network,
    switch_above,
    two_level,
    two_level_butterfly,
)
from labkit.schedules.pipeline import PIPELINE
from labkit.schedules.round import Round, Schedule, boundaries, count_chunks
from labkit.schedules.spanning_trees import pack, spanning_trees

ALLREDUCE: dict[str, Collective[...]] = {
    "all_to_all": all_to_all,
    "master_worker": master_worker,
    "tree": tree,
    "round_robin": round_robin,
    "butterfly": butterfly,
    "rabenseifner": rabenseifner,
    "ring": ring,
    "hierarchical": hierarchical,
    "spanning_trees": spanning_trees,
    "two_level": two_level,
    "two_level_butterfly": two_level_butterfly,
}

# In the schedules in the dict `IN_NETWORK`, network switches add the ranks' values. Real runs do
# not use schedules in which switches add values.
IN_NETWORK: dict[str, Collective[...]] = {"in_network": in_network}

COLLECTIVES: dict[str, Collective[...]] = {
    "reduce_tree": reduce_tree,
    "broadcast_tree": broadcast_tree,
    "gather": gather,
    "scatter": scatter,
    "allgather_ring": allgather_ring,
    "reduce_scatter_ring": reduce_scatter_ring,
}


def get_collective(name: str) -> Collective[...]:
    """Return the allreduce or other collective with the given name.

    Raises:
        InvalidInput: If no schedule has this name; the message lists all names.
    """
    every = ALLREDUCE | COLLECTIVES | IN_NETWORK
    if name not in every:
        raise InvalidInput(f"no schedule is called {name!r}{listed(name, every)}")
    return allreduce(every[name])


__all__ = [
    "ALLREDUCE",
    "ANY",
    "COLLECTIVES",
    "IN_NETWORK",
    "PIPELINE",
    "SUM",
    "AlphaBetaCost",
    "Collective",
    "Counts",
    "Hosts",
    "Round",
    "Schedule",
    "all_to_all",
    "allgather_ring",
    "allreduce",
    "boundaries",
    "broadcast_tree",
    "butterfly",
    "count_chunks",
    "count_switches",
    "gather",
    "get_collective",
    "hierarchical",
    "host_groups",
    "in_network",
    "master_worker",
    "pack",
    "rabenseifner",
    "reduce_scatter_ring",
    "reduce_tree",
    "ring",
    "round_robin",
    "scatter",
    "spanning_trees",
    "switch_above",
    "tree",
    "two_level",
    "two_level_butterfly",
]
