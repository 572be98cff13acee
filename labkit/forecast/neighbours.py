"""What some ranks of an experiment exchange by themselves: messages, and sums among a few."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce

import numpy as np

from labkit.forecast.allreduce_cost import Carried, Sums
from labkit.forecast.calibration import Spread, StepCost
from labkit.forecast.load import Load
from labkit.forecast.query import COMPUTED, Query
from labkit.forecast.time_distributions import NOTHING, both, times
from labkit.network import Links, Network
from labkit.schedules import Round, host_groups
from labkit.simulate import simulate

Message = tuple[int, int, float]  # from, to, bytes
ENDLESS = 1e15  # bytes/s of what takes as long for any number of bytes


@dataclass(frozen=True)
class Group(Query):
    """Some ranks of an experiment, alone; they are called 0, 1, … there.

    Attributes:
        ranks: their numbers in the experiment.
    """

    ranks: Sequence[int] = (0,)

    @classmethod
    def of(cls, asked: Query, ranks: Iterable[int]) -> Group:
        """These ranks of what is asked."""
        own, network = tuple(ranks), asked.network
        known = {field.name: getattr(asked, field.name) for field in fields(Query)}
        if network is not None:
            network = network.model_copy(update={"slow": asked.slow})
            if own != tuple(range(asked.workers)):
                network = network.part(own, asked.workers)
        return cls(**known | {"network": network}, ranks=own)

    @property
    def workers(self) -> int:
        """How many they are."""
        return len(self.ranks)

    def total(self, nbytes: float, algorithm: str = "", kind: str = "sum") -> Carried:
        """What they take for a sum of so many bytes, or to gather what each has of them."""
        chosen = algorithm if algorithm not in ("", "auto") else "ring" if self.network else "mpi"
        share = nbytes if kind == "sum" else nbytes / self.workers
        load = Load("sum" if kind == "sum" else "gather", share)
        return Sums(self, chosen, nbytes).take(load)

    def between(self, nbytes: float) -> Network:
        """The network of their messages, of about so many bytes, with what labkit adds to each."""
        first, more = (self.once("message", each).median for each in (0.0, nbytes))
        if self.network is None:
            rate = nbytes / (more - first) if more > first else ENDLESS
            slow = self.experiment.slow
            slow = {self.ranks.index(rank): slow[rank] for rank in slow if rank in self.ranks}
            return Network(latency=first, bandwidth=rate, slow=slow)
        added = more if self.emulated else 0.0
        return self.network.model_copy(update={"latency": self.network.latency + added})

    def exchange(self, messages: Sequence[Message]) -> float:
        """Seconds until messages have come that all leave at once."""
        if not messages:
            return 0.0
        source, to, nbytes = (np.array(column) for column in zip(*messages, strict=True))
        spans = np.maximum(1, np.rint(nbytes)).astype(np.int64)
        rounds = [Round(source, to, 0, spans, reduce=False)]
        network = self.between(float(spans.max())).prompt
        return simulate(lambda _: rounds, self.workers, float(spans.max()), network).seconds


def by_link(asked: Query, messages: Iterable[Message]) -> dict[str, float]:
    """Bytes of messages between ranks of an experiment that cross each link."""
    if asked.network is None:
        return {}
    found: dict[str, float] = defaultdict(float)
    links = Links(asked.network, asked.workers)
    sums: dict[tuple[int, int], float] = defaultdict(float)
    for source, to, nbytes in messages:
        sums[source, to] += nbytes
    for (source, to), nbytes in sums.items():
        way = links.way(np.array([source]), np.array([to]))
        for link in (*way.departure, *way.arrival):
            if link[0] >= 0:
                found[links.names[int(link[0])]] += nbytes
    return dict(found)


def of_groups(
    asked: Query, slices: int, within: Mapping[str, float], across: Mapping[str, float]
) -> dict[str, float]:
    """Bytes by link of all replicas, and of what these average; only the busiest of many."""
    found, every = dict[str, float](), range(asked.workers)
    shared = None if asked.network is None else asked.network.hosts
    groups = enumerate(host_groups(asked.workers, shared)) if shared is not None else ()
    host_of = {rank: number for number, host in groups for rank in host}
    replicas = [every[first : first + slices] for first in every[::slices]]
    alike = [every[first::slices] for first in range(slices)]
    for ranks, links in (*((e, within) for e in replicas), *((e, across) for e in alike)):
        # A part calls its own ranks and hosts 0, 1, …
        hosts = sorted({host_of[rank] for rank in ranks if host_of})
        for name, nbytes in links.items():
            numbers = hosts if name.startswith("host") else ranks
            own = " ".join(str(numbers[int(e)]) if e.isdigit() else e for e in name.split())
            if not name.startswith("busiest") or 0 in ranks:
                found[own] = found.get(own, 0.0) + nbytes
    return found


def typical(
    asked: Query,
    step: StepCost,
    parts: Mapping[str, float],
    wire: Spread = NOTHING,
    chance: float = 0.0,
) -> tuple[float, float]:
    """What the typical step of a run may be, as factors: what was measured spreads.

    Args:
        asked: says how sure a network's time is.
        step: what was measured of computing.
        parts: of the step.
        wire: what was measured of messages, which spreads with those of the step.
        chance: s that the mean of a run's steps differs from run to run.
    """
    own = reduce(both, (getattr(step, name) for name in COMPUTED))
    spent, sent = sum(parts.get(name, 0.0) for name in COMPUTED), parts.get("wire", 0.0)
    known = [
        times(each, of / each.median) for each, of in ((own, spent), (wire, sent)) if each.median
    ]
    found = reduce(both, known, NOTHING)
    below, above = found.median - found.low, found.high - found.median
    more = float(np.hypot(chance, sent * (asked.error or 0.0)))
    whole = sum(parts.values())
    low, high = max(0.0, whole - np.hypot(below, more)), whole + np.hypot(above, more)
    return (float(low / whole), float(high / whole)) if whole else (1.0, 1.0)
