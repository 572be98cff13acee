"""Cost of an allreduce: simulated from its schedule on a network, or measured on one machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.common.errors import InvalidInput
from labkit.communicator.reductions import UNMETERED, refuse_unmetered
from labkit.exchange.autotune import fastest
from labkit.forecast.calibration import (
    NOTHING,
    Provenance,
    Spread,
    add_spreads,
    interpolate,
    range_note,
    scale_spread,
)
from labkit.forecast.query import Query
from labkit.network import Network
from labkit.schedules import ALLREDUCE, Round, count_chunks, get_collective
from labkit.schedules.round import Schedule
from labkit.simulate import closed_form, exact_form, simulate

FEW = 64  # maximum number of ranks for which results list every link
MANY = 1024  # maximum number of ranks for which long schedules are simulated by default
# `SHORT` names allreduce schedules with few rounds, which take little time to simulate even with
# many ranks.
SHORT = ("tree", "butterfly", "rabenseifner", "hierarchical")
# The factor `AHEAD` reduces the times of closed forms. Messages that share a link may be faster
# than the closed form.
AHEAD = 0.95
VALUE, INDEX = 4, 4  # bytes per value and per index of a sparse vector
Kind = Literal["sum", "gather", "sparse"]


@dataclass(frozen=True)
class Load:
    """What a collective transfers: a dense buffer, gathered payloads, or merged sparse vectors.

    Attributes:
        kind: Type of the collective: "sum" (dense), "gather" or "sparse".
        nbytes: Bytes of the dense buffer, or of one rank's payload.
        dense: Bytes of the dense vector, if `kind` is "sparse"; a merged vector never takes more
            bytes.
    """

    kind: Kind
    nbytes: float
    dense: float = 0.0

    def bytes_of(self, ranks: NDArray[np.float64]) -> NDArray[np.float64]:
        r"""Return the bytes of a partial result that combines the data of a number of ranks.

        The model assumes that each rank draws its sparse indices independently. The vector of each
        rank contains a fraction \(s\) of all elements. The merged vector of m ranks contains the
        fraction \(1 - (1 - s)^m\). A sparse result that would be larger than the dense vector is
        sent as a dense vector.
        """
        if self.kind == "sum":
            return np.full_like(ranks, self.nbytes)
        if self.kind == "gather":
            return ranks * self.nbytes
        # `dense_entry_bytes` is the number of bytes of a sparse vector that contains every element
        # with its index.
        dense_entry_bytes = (VALUE + INDEX) / VALUE * self.dense
        share = min(1.0, self.nbytes / max(dense_entry_bytes, 1.0))
        return np.minimum(self.dense, dense_entry_bytes * (1 - (1 - share) ** ranks))

    def total_bytes(self, size: int) -> float:
        """Return the bytes of the final result, which combines the data of all `size` ranks."""
        return float(self.bytes_of(np.array([float(size)]))[0])


class LoadCost(NamedTuple):
    """The cost of a collective: its time, and the bytes that it sends.

    Attributes:
        seconds: Seconds until the last rank is done.
        links: Bytes that cross each link. With more than `FEW` (64) ranks, `links` contains only
            the busiest link of each type.
        sent: Total bytes that all ranks together send.
        rounds: Bytes of the largest message in each round; empty for many ranks.
    """

    seconds: float
    links: dict[str, float]
    sent: float
    rounds: tuple[float, ...] = ()


def load_cost(name: str, size: int, load: Load, network: Network, gamma: float = 0.0) -> LoadCost:
    """Return the cost of a collective that follows the schedule `name` among `size` ranks.

    With more than `FEW` (64) ranks, the cost comes from an exact formula.
    `labkit.simulate.exact_form` evaluates the exact formula, if the schedule has one. With at most
    `FEW` ranks, or without an exact closed form, the schedule is simulated. With more than `MANY`
    (1024) ranks, the model simplifies sparse and gathered data. Every message of sparse or gathered
    data then counts as large as the complete result. A ring is the exception.

    Args:
        name: Name of the schedule.
        size: Number of ranks.
        load: Buffer, payloads or sparse vectors that the collective transfers.
        network: Network between the ranks.
        gamma: Seconds to add one byte of a buffer to another buffer (γ).
    """
    # The cache key is JSON, because a network contains dictionaries, which cannot be hashed.
    return _cached_load_cost(name, size, load, json.dumps(network.model_dump(mode="json")), gamma)


def candidates(
    names: Iterable[str], size: int, nbytes: float, network: Network, gamma: float = 0.0
) -> dict[str, float]:
    """Return the seconds to sum a dense buffer, for each schedule that may be the fastest.

    Schedules that are clearly too slow are omitted. With more than `MANY` ranks, schedules with
    many rounds are also omitted, because their simulation would take minutes.
    """
    forms = {name: exact_form(name, size, nbytes, network, gamma) for name in names}
    seconds = {name: form for name, form in forms.items() if form is not None}
    best, flat = min(seconds.values(), default=inf), not (network.hosts or network.links)
    for name in forms:
        behind = flat and AHEAD * closed_form(name, size, nbytes, network, gamma) > best
        if name not in seconds and not behind and (size <= MANY or name in SHORT):
            seconds[name] = load_cost(name, size, Load("sum", nbytes), network, gamma).seconds
    return {name: seconds[name] for name in forms if name in seconds}


@lru_cache(maxsize=4096)
def _cached_load_cost(name: str, size: int, load: Load, key: str, gamma: float) -> LoadCost:
    network = Network(**json.loads(key))
    equal = size > FEW or exact_form(name, size, load.nbytes, network) is not None
    if load.kind != "sum" and name == "ring" and equal:
        return _cached_load_cost(name, size, _on_a_ring(load, size), key, gamma)
    if load.kind != "sum" and size > MANY:
        return _cached_load_cost(name, size, Load("sum", load.total_bytes(size)), key, gamma)
    schedule, nbytes = network.schedule(name), load.nbytes
    if load.kind != "sum":
        rounds = list(growing_rounds(schedule, size, load))
        schedule, nbytes = (lambda _: rounds), count_chunks(rounds)
    elif size > FEW and (form := exact_form(name, size, nbytes, network, gamma)) is not None:
        layout = {} if network.hosts is None else {"hosts": network.hosts}
        counts = get_collective(name).counts(size, **layout)
        sent = counts.volume * (nbytes / counts.chunks)
        return LoadCost(form, {"busiest rank out": float(sent.max())}, float(sent.sum()))
    result = simulate(schedule, size, nbytes, network, gamma=gamma)
    links = dict(zip(result.links, result.carried.tolist(), strict=True))
    if size > FEW:
        return LoadCost(result.seconds, _busiest(links), float(result.sent.sum()))
    chunk = nbytes / count_chunks(schedule(size))
    largest = tuple(
        float(schedule_round.span.max()) * chunk
        for schedule_round in schedule(size)
        if len(schedule_round)
    )
    return LoadCost(result.seconds, links, float(result.sent.sum()), largest)


def growing_rounds(schedule: Schedule, size: int, load: Load) -> Iterator[Round]:
    """Yield the schedule's rounds, in which messages become larger as they combine more data."""
    chunks = count_chunks(schedule(size))
    # `ranks_in_chunk` counts, for each rank and chunk, the ranks whose data the rank's copy of the
    # chunk contains.
    ranks_in_chunk = np.ones((size, chunks))
    for schedule_round in schedule(size):
        nbytes = np.cumsum(load.bytes_of(ranks_in_chunk) / chunks, axis=1)
        ends = np.pad(nbytes, ((0, 0), (1, 0)))
        sent = (
            ends[schedule_round.source, schedule_round.chunk + schedule_round.span]
            - ends[schedule_round.source, schedule_round.chunk]
        )
        span = np.maximum(1, np.rint(sent)).astype(np.int64)
        yield Round(
            schedule_round.source, schedule_round.destination, 0, span, reduce=schedule_round.reduce
        )
        message = np.repeat(np.arange(len(schedule_round)), schedule_round.span)
        first = np.repeat(np.cumsum(schedule_round.span) - schedule_round.span, schedule_round.span)
        chunk = schedule_round.chunk[message] + np.arange(len(message)) - first
        to, reduce = schedule_round.destination[message], schedule_round.reduce[message]
        sent_ranks = ranks_in_chunk[schedule_round.source[message], chunk]
        ranks_in_chunk[to[~reduce], chunk[~reduce]] = sent_ranks[~reduce]
        np.add.at(ranks_in_chunk, (to[reduce], chunk[reduce]), sent_ranks[reduce])


def _on_a_ring(load: Load, size: int) -> Load:
    """Return a dense load for which a ring sends the same mean bytes per round as for `load`.

    In the first half of the rounds, the messages of round i combine the data of i ranks. In the
    second half of the rounds, messages contain data of all ranks.
    """
    ranks = np.arange(1.0, size)
    adding, copying = load.bytes_of(ranks).mean(), load.total_bytes(size)
    return Load("sum", float(adding + copying) / 2)


def _busiest(links: dict[str, float]) -> dict[str, float]:
    """Return the bytes on the busiest link of each type, such as links out of ranks."""
    busiest: dict[str, float] = {}
    for name, nbytes in links.items():
        kind = "busiest " + re.sub(r" ?\d+", "", name)
        busiest[kind] = max(busiest.get(kind, 0.0), nbytes)
    return busiest


class CollectiveEstimate(NamedTuple):
    """The estimated cost of a collective.

    Attributes:
        seconds: Seconds until the last rank is done.
        links: Bytes that cross each link; with many ranks, only the busiest link of each type.
        sent: Total bytes that all ranks together send.
    """

    seconds: Spread
    links: Mapping[str, float] = {}
    sent: float = 0.0


@dataclass(frozen=True)
class AllReduceCosts:
    """The costs of all allreduces of an experiment, which use a single algorithm.

    Args:
        query: Query with the ranks, their network and the calibration.
        algorithm: Name in `labkit.communicator.ALGORITHMS`, or "auto".
        largest: Bytes of the largest buffer. The algorithm "auto" stands for the fastest algorithm
            at this size.
        dense: Whether buffers are sent uncompressed.
        turns: Whether messages use a shared link one after the other (FIFO) instead of at the same
            time.
    """

    query: Query
    algorithm: str
    largest: float
    dense: bool = True
    turns: bool = False

    @cached_property
    def network(self) -> Network | None:
        """The network between the ranks, on which all ranks compute at full speed."""
        network = self.query.network
        if network is None:
            return None
        prompt = network.with_full_speed_compute
        return prompt.model_copy(update={"sharing": "fifo"}) if self.turns else prompt

    @cached_property
    def gamma(self) -> float:
        """The fitted seconds to add one byte; 0 on an emulated network or on the virtual clock."""
        fit = self.query.fits.get("host")
        return 0.0 if fit is None or self.query.emulated or self.query.virtual else fit.gamma

    @cached_property
    def chosen(self) -> str:
        """The name of the algorithm; for "auto", the one that `labkit.exchange.autotune` chooses.

        Raises:
            InvalidInput: The algorithm cannot run on the emulated network.
        """
        network, size = self.network, self.query.workers
        if network is not None and (self.query.emulated or self.algorithm != "mpi"):
            refuse_unmetered(self.algorithm, network)
        if self.algorithm != "auto" or size == 1:
            return self.algorithm
        if not self.dense and not self.query.emulated:
            return "mpi"
        if network is None:
            names = [name for name in ("mpi", "ring", "shared_memory") if self._measurements(name)]
            seconds = {name: self._measured(name, self.largest).median for name in names}
            return fastest(seconds, "measured").algorithm if names else "shared_memory"
        if self.query.emulated:
            names = list(ALLREDUCE)
        else:
            between = [n for n, collective in ALLREDUCE.items() if collective.between is not None]
            names = ["ring", *(between if network.hosts is not None else ())]
        seconds = candidates(names, size, self.largest, network, self.gamma)
        return fastest(seconds, f"simulated on {network}").algorithm

    @cached_property
    def source(self) -> Provenance:
        """The origin of the costs of the allreduces: measured, fitted or simulated."""
        network = self.network
        if self.query.workers == 1:
            return Provenance("sums", "one rank needs no allreduce")
        if network is None:
            measurements = self._measurements(self.chosen)
            note = range_note(self.largest, (nbytes for nbytes, _ in measurements))
            method = f"measured, interpolated between sizes{note and note + ' bytes'}"
            method = method if measurements else "fitted to measurements"
            return Provenance(f"sums by {self.chosen}", method)
        size, name = self.query.workers, self._schedule
        is_exact = size > FEW and exact_form(name, size, self.largest, network) is not None
        method = "by its exact closed form" if is_exact else "message by message"
        model_note = (
            ", as a model of the MPI library's algorithm" if self.chosen in UNMETERED else ""
        )
        additions = (
            ", plus the measured overhead of the network emulation" if self.query.emulated else ""
        )
        additions += ", with a fitted time per byte of addition" if self.gamma else ""
        return Provenance(
            f"sums by {name}{model_note}", f"simulated on {network}, {method}{additions}"
        )

    def take(self, load: Load) -> CollectiveEstimate:
        """Return the estimated cost of one collective that transfers the data `load`.

        Raises:
            InvalidInput: The collective was not measured.
        """
        size = self.query.workers
        if size == 1 or load.nbytes <= 0 or (self.query.virtual and self.network is None):
            return CollectiveEstimate(NOTHING)
        if self.network is None:
            return CollectiveEstimate(self._measured(self.chosen, load))
        name = self._schedule
        if load.kind == "gather" and ALLREDUCE[name].gathers is not None:
            name, load = "allgather_ring", Load("sum", size * load.nbytes)
        gamma = self.gamma if load.kind == "sum" else 0.0
        seconds, links, sent, rounds = load_cost(name, size, load, self.network, gamma)
        spread = Spread(median=seconds, low=seconds, high=seconds)
        if self.query.emulated:
            for nbytes in rounds:
                spread = add_spreads(spread, self.query.overhead_cost("emulated", nbytes))
        return CollectiveEstimate(spread, links, sent)

    @property
    def _schedule(self) -> str:
        """The name of the simulated schedule; a ring replaces the MPI library's algorithm."""
        return "ring" if self.chosen == "mpi" else self.chosen

    def _measured(self, name: str, load: Load | float) -> Spread:
        """Return the measured time of an allreduce; gathered or sparse data take half of it."""
        if isinstance(load, Load) and load.kind != "sum":
            total = load.total_bytes(self.query.workers)
            return scale_spread(self._measured("mpi" if name in UNMETERED else name, total), 0.5)
        nbytes = load.nbytes if isinstance(load, Load) else load
        if measurements := self._measurements(name):
            return interpolate(measurements, nbytes)
        fit = self.query.fits.get("memory" if name == "shared_memory" else "host")
        schedule = "ring" if name == "shared_memory" else name
        if fit is None or not fit.beta or schedule not in ALLREDUCE:
            raise InvalidInput(
                f"algorithm={name!r} among {self.query.workers} ranks of one machine was not "
                "measured; measure it with `labkit calibrate`, or give a network"
            )
        load = Load("sum", nbytes)
        seconds = load_cost(schedule, self.query.workers, load, fit.network(), fit.gamma).seconds
        return Spread(
            median=seconds, low=seconds * max(0.0, 1 - fit.worst), high=seconds * (1 + fit.worst)
        )

    def _measurements(self, name: str) -> list[tuple[float, Spread]]:
        """Return (bytes, seconds) of an algorithm's measurements with `query.workers` ranks."""
        key = name, self.query.workers
        return [
            (collective.nbytes, collective.seconds)
            for collective in self.query.calibration.collectives
            if collective.level != "link" and (collective.algorithm, collective.workers) == key
        ]
