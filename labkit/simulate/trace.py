"""What a simulation keeps of every message, and of every link."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from labkit.network import Transfers
from labkit.network.flows import Segment
from labkit.network.topology import Seconds
from labkit.schedules.round import Integers, Round, join


class Entry(NamedTuple):
    """A round as it went: columns in the order of its rows."""

    round: Round
    nbytes: Seconds
    ready: Seconds
    transfers: Transfers


@dataclass(frozen=True, eq=False)
class Trace:
    """Messages in columns, in order of rounds and rows; then links, a row a stretch of one message.

    Args: round: its number, from 0; messages: source, destination, chunk, span, reduce; nbytes:
    bytes; ready: the source hands it over; start: its first byte has left the source; delivery:
    its last byte has arrived (s); link: number of a link; link_start, link_stop: from when until
    when it carried a message (s) at one rate; link_share: that rate, as a share of the link's own.
    """

    round: Integers
    messages: Round
    nbytes: Seconds
    ready: Seconds
    start: Seconds
    delivery: Seconds
    link: Integers
    link_start: Seconds
    link_stop: Seconds
    link_share: Seconds

    @classmethod
    def of(cls, log: list[Entry], segments: list[Segment], bandwidth: Seconds) -> Trace:
        """Put the rounds of a simulation together, and what flowed when, where rates changed."""
        none: Seconds = np.empty(0)
        hops = [hop for entry in log for hop in entry.transfers.hops]
        hops += _stretches(segments, bandwidth)
        link = np.concatenate([none.astype(np.int64), *(hop[0] for hop in hops)])
        exists = link >= 0
        start, stop, share = (
            np.concatenate([none, *(hop[column] for hop in hops)])[exists] for column in (1, 2, 3)
        )
        return cls(
            round=np.repeat(np.arange(len(log)), [len(entry.round) for entry in log]),
            messages=join([Round([], [], reduce=[]), *(entry.round for entry in log)]),
            nbytes=np.concatenate([none, *(entry.nbytes for entry in log)]),
            ready=np.concatenate([none, *(entry.ready for entry in log)]),
            start=np.concatenate([none, *(entry.transfers.start for entry in log)]),
            delivery=np.concatenate([none, *(entry.transfers.delivery for entry in log)]),
            link=link[exists],
            link_start=start,
            link_stop=stop,
            link_share=share,
        )


def _stretches(
    segments: Iterable[Segment], bandwidth: Seconds
) -> list[tuple[Integers, Seconds, Seconds, Seconds]]:
    """The segments by link: those of one flow that follow each other at one rate are one."""
    parts = list(segments)
    if not parts:
        return []
    counts = [len(part.number) for part in parts]
    number = np.concatenate([part.number for part in parts])
    rate = np.concatenate([part.rate for part in parts])
    start, stop = (
        np.repeat([getattr(part, name) for part in parts], counts) for name in ("start", "stop")
    )
    order = np.argsort(number, kind="stable")
    number, rate, start, stop = number[order], rate[order], start[order], stop[order]
    same = (number[1:] == number[:-1]) & (rate[1:] == rate[:-1]) & (start[1:] == stop[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~same]))
    last = np.append(first[1:], len(number)) - 1
    way = np.concatenate([part.way for part in parts])[order][first]
    speed = np.append(bandwidth, np.inf)
    return [(link, start[first], stop[last], rate[first] / speed[link]) for link in way.T]
