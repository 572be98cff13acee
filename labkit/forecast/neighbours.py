"""The cost of communication in a group of ranks of an experiment: messages and collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce

import numpy as np

from labkit.forecast.allreduce_cost import AllReduceCosts, CollectiveEstimate, Load
from labkit.forecast.calibration import NOTHING, Spread, StepCost, add_spreads, scale_spread
from labkit.forecast.query import COMPUTED, Query
from labkit.network import Links, Network
from labkit.schedules import Round, host_groups
from labkit.simulate import simulate

# A message is a tuple of its sender, its receiver and its number of bytes.
Message = tuple[int, int, float]
ENDLESS = 1e15  # At this bandwidth (bytes/s), the time of a message does not depend on its size.


@dataclass(frozen=True)
class Group(Query):
    """A query about a group of an experiment's ranks; the group numbers its ranks as 0, 1, …

    Attributes:
        ranks: Numbers of the group's ranks in the whole experiment.
    """

    ranks: Sequence[int] = (0,)

    @classmethod
    def of(cls, query: Query, ranks: Iterable[int]) -> Group:
        """Return a query about some ranks, with the part of the network that connects the ranks."""
        members, network = tuple(ranks), query.network
        attributes = {field.name: getattr(query, field.name) for field in fields(Query)}
        if network is not None:
            network = network.model_copy(update={"stragglers": query.slowdowns})
            if members != tuple(range(query.workers)):
                network = network.part(members, query.workers)
        return cls(**attributes | {"network": network}, ranks=members)

    @property
    def workers(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    def total(self, nbytes: float, algorithm: str = "", kind: str = "sum") -> CollectiveEstimate:
        """Return the cost of an allreduce of `nbytes`, or of a gather whose result has `nbytes`."""
        schedule = algorithm if algorithm not in ("", "auto") else "ring" if self.network else "mpi"
        share = nbytes if kind == "sum" else nbytes / self.workers
        load = Load("sum" if kind == "sum" else "gather", share)
        return AllReduceCosts(self, schedule, nbytes).take(load)

    def between(self, nbytes: float) -> Network:
        """Return the network for messages of `nbytes`, including labkit's overhead per message."""
        first, message_seconds = (
            self.overhead_cost("message", size).median for size in (0.0, nbytes)
        )
        if self.network is None:
            rate = nbytes / (message_seconds - first) if message_seconds > first else ENDLESS
            slow = self.experiment.stragglers
            slow = {self.ranks.index(rank): slow[rank] for rank in slow if rank in self.ranks}
            return Network(latency=first, bandwidth=rate, stragglers=slow)
        overhead = message_seconds if self.emulated else 0.0
        return self.network.model_copy(update={"latency": self.network.latency + overhead})

    def exchange(self, messages: Sequence[Message]) -> float:
        """Return the seconds until all messages have arrived, if all start at the same time."""
        if not messages:
            return 0.0
        source, to, nbytes = (np.array(column) for column in zip(*messages, strict=True))
        spans = np.maximum(1, np.rint(nbytes)).astype(np.int64)
        rounds = [Round(source, to, 0, spans, reduce=False)]
        network = self.between(float(spans.max())).with_full_speed_compute
        return simulate(lambda _: rounds, self.workers, float(spans.max()), network).seconds


def link_bytes(query: Query, messages: Iterable[Message]) -> dict[str, float]:
    """Return the bytes that messages send over each link, as a mapping from link name to bytes."""
    if query.network is None:
        return {}
    nbytes_of_link: dict[str, float] = defaultdict(float)
    links = Links(query.network, query.workers)
    sums: dict[tuple[int, int], float] = defaultdict(float)
    for source, to, nbytes in messages:
        sums[source, to] += nbytes
    for (source, to), nbytes in sums.items():
        route = links.way(np.array([source]), np.array([to]))
        for link in (*route.departure, *route.arrival):
            if link[0] >= 0:
                nbytes_of_link[links.names[int(link[0])]] += nbytes
    return dict(nbytes_of_link)


def link_bytes_of_groups(
    query: Query, slices: int, within: Mapping[str, float], across: Mapping[str, float]
) -> dict[str, float]:
    """Return the bytes that each link of the network carries.

    Args:
        query: Query with the network and the number of ranks.
        slices: Number of ranks per replica.
        within: Bytes by link for the ranks of one replica.
        across: Bytes by link for ranks with the same position in all replicas.
    """
    nbytes_of_link, all_ranks = dict[str, float](), range(query.workers)
    shared = None if query.network is None else query.network.hosts
    groups = enumerate(host_groups(query.workers, shared)) if shared is not None else ()
    host_of = {rank: number for number, host in groups for rank in host}
    replicas = [all_ranks[first : first + slices] for first in all_ranks[::slices]]
    rank_groups = [all_ranks[first::slices] for first in range(slices)]
    for ranks, links in (
        *((group, within) for group in replicas),
        *((group, across) for group in rank_groups),
    ):
        # Link names contain numbers of ranks and hosts within the group. The loop replaces the
        # group's numbers by numbers in the experiment.
        hosts = sorted({host_of[rank] for rank in ranks if host_of})
        for name, nbytes in links.items():
            numbers = hosts if name.startswith("host") else ranks
            link_name = " ".join(
                str(numbers[int(group)]) if group.isdigit() else group for group in name.split()
            )
            if not name.startswith("busiest") or 0 in ranks:
                nbytes_of_link[link_name] = nbytes_of_link.get(link_name, 0.0) + nbytes
    return nbytes_of_link


def typical_interval(
    query: Query,
    step: StepCost,
    parts: Mapping[str, float],
    wire: Spread = NOTHING,
    run_deviation_seconds: float = 0.0,
) -> tuple[float, float]:
    """Return the 90% interval of the typical step time, divided by the sum of the step's parts.

    Args:
        query: The experiment to predict, with its network and measured costs.
        step: Measured spreads of the computation.
        parts: Seconds of each part of the step.
        wire: Measured spread of the time of messages.
        run_deviation_seconds: Deviation between the mean step times of different runs, s.
    """
    computation = reduce(add_spreads, (getattr(step, name) for name in COMPUTED))
    compute_seconds, wire_seconds = (
        sum(parts.get(name, 0.0) for name in COMPUTED),
        parts.get("wire", 0.0),
    )
    spreads = [
        scale_spread(part_spread, seconds / part_spread.median)
        for part_spread, seconds in ((computation, compute_seconds), (wire, wire_seconds))
        if part_spread.median
    ]
    spread = reduce(add_spreads, spreads, NOTHING)
    below, above = spread.median - spread.low, spread.high - spread.median
    deviation = float(np.hypot(run_deviation_seconds, wire_seconds * (query.error or 0.0)))
    total = sum(parts.values())
    low, high = max(0.0, total - np.hypot(below, deviation)), total + np.hypot(above, deviation)
    return (float(low / total), float(high / total)) if total else (1.0, 1.0)
