"""Communication schedules as data: pure functions from the number of ranks to rounds."""

from labkit.common.errors import InvalidInput
from labkit.schedules.all_to_all import all_to_all
from labkit.schedules.butterfly import butterfly
from labkit.schedules.collectives import ANY, COLLECTIVES, SUM, Collective, allreduce
from labkit.schedules.gather import gather
from labkit.schedules.hierarchical import Hosts, hierarchical, host_groups
from labkit.schedules.master_worker import master_worker
from labkit.schedules.pipeline import PIPELINE
from labkit.schedules.rabenseifner import rabenseifner
from labkit.schedules.ring import allgather_ring, reduce_scatter_ring, ring
from labkit.schedules.round import Round, Schedule, boundaries, count_chunks
from labkit.schedules.round_robin import round_robin
from labkit.schedules.scatter import scatter
from labkit.schedules.spanning_trees import pack, spanning_trees
from labkit.schedules.tree import broadcast_tree, reduce_tree, tree

ALLREDUCE: dict[str, Schedule] = {
    "all_to_all": all_to_all,
    "master_worker": master_worker,
    "tree": tree,
    "round_robin": round_robin,
    "butterfly": butterfly,
    "rabenseifner": rabenseifner,
    "ring": ring,
    "hierarchical": hierarchical,
    "spanning_trees": spanning_trees,
}


def named(name: str) -> Collective:
    """The allreduce or other collective of this name. Raises: InvalidInput, with all names."""
    if name in ALLREDUCE:
        return allreduce(ALLREDUCE[name])
    if name in COLLECTIVES:
        return COLLECTIVES[name]
    raise InvalidInput(
        f"no schedule is called {name!r}: choose one of {', '.join([*ALLREDUCE, *COLLECTIVES])}"
    )


__all__ = [
    "ALLREDUCE",
    "ANY",
    "COLLECTIVES",
    "PIPELINE",
    "SUM",
    "Collective",
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
    "gather",
    "hierarchical",
    "host_groups",
    "master_worker",
    "named",
    "pack",
    "rabenseifner",
    "reduce_scatter_ring",
    "reduce_tree",
    "ring",
    "round_robin",
    "scatter",
    "spanning_trees",
    "tree",
]
