"""The record of every message and of the use of every link in a simulation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from labkit.network import Transfers
from labkit.network.flows import Segment
from labkit.network.topology import Seconds
from labkit.schedules.round import Integers, Round, join


class RoundTrace(NamedTuple):
    """A simulated round; its columns have the order of the messages in the round."""

    round: Round
    nbytes: Seconds
    ready: Seconds
    transfers: Transfers


@dataclass(frozen=True, eq=False)
class Trace:
    """Columns of messages, sorted by round and row, and of time intervals in which links are used.

    Args:
        round: Number of the round of each message, from 0.
        messages: Source, destination, chunk, span and reduce of each message.
        nbytes: Bytes of each message.
        ready: Time at which the source submits the message, in s.
        start: Time at which the first byte leaves the source, in s.
        delivery: Time at which the last byte arrives, in s.
        link: For each interval of link use, the number of the link.
        link_start, link_stop: Start and end in s of an interval in which the link carries one
            message at a constant rate.
        link_share: Rate in this interval, as a fraction of the link's bandwidth.
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
    def of(cls, log: list[RoundTrace], segments: list[Segment], bandwidth: Seconds) -> Trace:
        """Build the trace from simulated rounds and, for rates that vary, from flow segments."""
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
    """Return segments by link; consecutive segments of a flow with the same rate are merged."""
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
