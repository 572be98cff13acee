"""What travels in a collective, and what carrying it takes on a network: rows, or a closed form."""

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
from labkit.schedules import Round, count_chunks, named
from labkit.schedules.round import Schedule
from labkit.simulate import closed_form, exact_form, simulate

FEW = 64  # ranks up to which every link is told
MANY = 1024  # ranks up to which schedules of many rounds are simulated without being asked for
SHORT = ("tree", "butterfly", "rabenseifner", "hierarchical")
AHEAD = 0.95  # of a closed form: more than messages that share a link are ever ahead of it
VALUE, INDEX = 4, 4  # bytes
Kind = Literal["sum", "gather", "sparse"]


@dataclass(frozen=True)
class Load:
    """What travels: a dense buffer, payloads of all ranks, or sparse vectors that are merged.

    Attributes:
        kind: which of these.
        nbytes: of the dense buffer, or of one rank's payload.
        dense: bytes that it has at most, of sparse ones.
    """

    kind: Kind
    nbytes: float
    dense: float = 0.0

    def bytes_of(self, ranks: NDArray[np.float64]) -> NDArray[np.float64]:
        r"""What the whole is once so many ranks have added theirs.

        Sparse places count as drawn for each rank anew: of a share \(s\) of all elements m ranks
        have \(1 - (1 - s)^m\) together; what is no fewer bytes than all values is sent as these.
        """
        if self.kind == "sum":
            return np.full_like(ranks, self.nbytes)
        if self.kind == "gather":
            return ranks * self.nbytes
        entry = (VALUE + INDEX) / VALUE * self.dense  # bytes, had all elements a place beside them
        share = min(1.0, self.nbytes / max(entry, 1.0))
        return np.minimum(self.dense, entry * (1 - (1 - share) ** ranks))

    def whole(self, size: int) -> float:
        """Bytes of what all ranks have added."""
        return float(self.bytes_of(np.array([float(size)]))[0])


class Way(NamedTuple):
    """What a load takes.

    Attributes:
        seconds: until the last rank is done.
        links: bytes by link; of many ranks those of the busiest of each kind.
        sent: bytes of all ranks.
        rounds: bytes of the largest message of each round, of few ranks.
    """

    seconds: float
    links: dict[str, float]
    sent: float
    rounds: tuple[float, ...] = ()


def carried(name: str, size: int, load: Load, network: Network, gamma: float = 0.0) -> Way:
    """By a schedule of this name among so many ranks.

    Among more than `FEW` ranks by `labkit.simulate.exact_form`, where that is exact, else row by
    row; sparse vectors and payloads of more than `MANY` ranks count as all that they come to in
    every message, but on a ring. gamma: s to add a byte.
    """
    # A network has dictionaries, which no cache takes for a key.
    return _carried(name, size, load, json.dumps(network.model_dump(mode="json")), gamma)


def candidates(
    names: Iterable[str], size: int, nbytes: float, network: Network, gamma: float = 0.0
) -> dict[str, float]:
    """Seconds of a dense buffer by those schedules that may be the fastest.

    Left out are those that even their closed form has far behind another one, which is exact, and
    those of so many rounds and ranks that their rows would take minutes.
    """
    forms = {name: exact_form(name, size, nbytes, network, gamma) for name in names}
    found = {name: form for name, form in forms.items() if form is not None}
    best, flat = min(found.values(), default=inf), not (network.hosts or network.links)
    for name in forms:
        behind = flat and AHEAD * closed_form(name, size, nbytes, network, gamma) > best
        if name not in found and not behind and (size <= MANY or name in SHORT):
            found[name] = carried(name, size, Load("sum", nbytes), network, gamma).seconds
    return {name: found[name] for name in forms if name in found}


@lru_cache(maxsize=4096)
def _carried(name: str, size: int, load: Load, key: str, gamma: float) -> Way:
    network = Network(**json.loads(key))
    equal = size > FEW or exact_form(name, size, load.nbytes, network) is not None
    if load.kind != "sum" and name == "ring" and equal:
        return _carried(name, size, _on_a_ring(load, size), key, gamma)
    if load.kind != "sum" and size > MANY:
        return _carried(name, size, Load("sum", load.whole(size)), key, gamma)
    schedule, nbytes = network.schedule(name), load.nbytes
    if load.kind != "sum":
        rounds = list(grown(schedule, size, load))
        schedule, nbytes = (lambda _: rounds), count_chunks(rounds)
    elif size > FEW and (form := exact_form(name, size, nbytes, network, gamma)) is not None:
        layout = {} if network.hosts is None else {"hosts": network.hosts}
        counts = named(name).counts(size, **layout)
        sent = counts.volume * (nbytes / counts.chunks)
        return Way(form, {"busiest rank out": float(sent.max())}, float(sent.sum()))
    found = simulate(schedule, size, nbytes, network, gamma=gamma)
    links = dict(zip(found.links, found.carried.tolist(), strict=True))
    if size > FEW:
        return Way(found.seconds, _busiest(links), float(found.sent.sum()))
    chunk = nbytes / count_chunks(schedule(size))
    largest = tuple(float(each.span.max()) * chunk for each in schedule(size) if len(each))
    return Way(found.seconds, links, float(found.sent.sum()), largest)


def grown(schedule: Schedule, size: int, load: Load) -> Iterator[Round]:
    """Its rounds, with a chunk a byte: each message has what its source has heard by then."""
    chunks = count_chunks(schedule(size))
    heard = np.ones((size, chunks))  # of how many ranks each holds each chunk
    for each in schedule(size):
        nbytes = np.cumsum(load.bytes_of(heard) / chunks, axis=1)
        ends = np.pad(nbytes, ((0, 0), (1, 0)))
        sent = ends[each.source, each.chunk + each.span] - ends[each.source, each.chunk]
        span = np.maximum(1, np.rint(sent)).astype(np.int64)
        yield Round(each.source, each.destination, 0, span, reduce=each.reduce)
        message = np.repeat(np.arange(len(each)), each.span)
        first = np.repeat(np.cumsum(each.span) - each.span, each.span)
        chunk = each.chunk[message] + np.arange(len(message)) - first
        to, reduce = each.destination[message], each.reduce[message]
        told = heard[each.source[message], chunk]
        heard[to[~reduce], chunk[~reduce]] = told[~reduce]
        np.add.at(heard, (to[reduce], chunk[reduce]), told[reduce])


def _on_a_ring(load: Load, size: int) -> Load:
    """As many bytes in the mean of all rounds: in round i every message is of i ranks."""
    ranks = np.arange(1.0, size)
    adding, copying = load.bytes_of(ranks).mean(), load.whole(size)
    return Load("sum", float(adding + copying) / 2)


def _busiest(links: dict[str, float]) -> dict[str, float]:
    """Of each kind of link, such as those out of ranks or into hosts, the bytes of the busiest."""
    found: dict[str, float] = {}
    for name, nbytes in links.items():
        kind = "busiest " + re.sub(r" ?\d+", "", name)
        found[kind] = max(found.get(kind, 0.0), nbytes)
    return found
