"""The bytes that collectives transfer, and the time on a network, simulated or in closed form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.network import Network
from labkit.schedules import Round, count_chunks, get_collective
from labkit.schedules.round import Schedule
from labkit.simulate import closed_form, exact_form, simulate

FEW = 64  # maximum number of ranks for which results list every link
MANY = 1024  # maximum number of ranks for which long schedules are simulated by default
SHORT = ("tree", "butterfly", "rabenseifner", "hierarchical")  # schedules with few rounds
# Safety factor on closed-form times, because messages that share a link may be faster than the
# closed form.
AHEAD = 0.95
VALUE, INDEX = 4, 4  # bytes per value and per index of a sparse vector
Kind = Literal["sum", "gather", "sparse"]


@dataclass(frozen=True)
class Load:
    """What a collective transfers: a dense buffer, gathered payloads, or merged sparse vectors.

    Attributes:
        kind: Type of the collective: "sum" (dense), "gather" or "sparse".
        nbytes: Bytes of the dense buffer, or of one rank's payload.
        dense: For "sparse": bytes of the dense vector, which are the upper bound of a merged
            vector.
    """

    kind: Kind
    nbytes: float
    dense: float = 0.0

    def bytes_of(self, ranks: NDArray[np.float64]) -> NDArray[np.float64]:
        r"""Return the bytes of a partial result that combines the data of a number of ranks.

        The model assumes that each rank draws its sparse indices independently. If the vector of
        each rank contains a fraction \(s\) of all elements, the merged vector of m ranks contains
        the fraction \(1 - (1 - s)^m\). A sparse result that would be larger than the dense vector
        is sent as a dense vector.
        """
        if self.kind == "sum":
            return np.full_like(ranks, self.nbytes)
        if self.kind == "gather":
            return ranks * self.nbytes
        # Bytes of a sparse vector that contains all elements and their indices.
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
        links: Bytes by link; with more than `FEW` ranks, only the busiest link of each type.
        sent: Total bytes that all ranks together send.
        rounds: Bytes of the largest message in each round; empty with more than `FEW` ranks.
    """

    seconds: float
    links: dict[str, float]
    sent: float
    rounds: tuple[float, ...] = ()


def load_cost(name: str, size: int, load: Load, network: Network, gamma: float = 0.0) -> LoadCost:
    """Return the cost of a collective that follows the schedule `name` among `size` ranks.

    With more than `FEW` ranks, the cost is the exact closed form of `labkit.simulate.exact_form` if
    there is one. In all other cases, the schedule is simulated. With more than `MANY` ranks, each
    message of a sparse or gathered load counts as large as the whole result, except on a ring.

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

    A schedule is omitted if its closed form is slower than the exact time of another schedule. With
    more than `MANY` ranks, schedules with many rounds are also omitted, because their simulation
    would take minutes.
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
    """Yield a schedule's rounds with one chunk per byte; messages grow as ranks merge results."""
    chunks = count_chunks(schedule(size))
    # For each rank and chunk: the number of ranks whose data the rank's copy of the chunk contains.
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
    """Return the dense load that sends the same mean number of bytes per round on a ring.

    In the first half of the rounds, the messages of round i combine the data of i ranks. In the
    second half, messages combine the data of all ranks.
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
