"""The trace of a simulation: every message, and when it occupied which link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from labkit.network import Transfers
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
    """Messages in columns, in order of rounds and rows; then links, a row a message and link.

    Args: round: its number, from 0; messages: source, destination, chunk, span, reduce; nbytes:
    bytes; ready: the source hands it over; start: its first byte has left the source; delivery:
    its last byte has arrived (s); link: number of a link; link_start, link_stop: from when until
    when it was occupied (s).
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

    @classmethod
    def of(cls, log: list[Entry], bandwidth: Seconds) -> Trace:
        """Put the rounds of a simulation together."""
        none: Seconds = np.empty(0)
        hops = [(*hop, entry.nbytes) for entry in log for hop in entry.transfers.hops]
        link = np.concatenate([none.astype(np.int64), *(hop[0] for hop in hops)])
        start = np.concatenate([none, *(hop[1] for hop in hops)])
        nbytes = np.concatenate([none, *(hop[2] for hop in hops)])
        exists = link >= 0
        link, start, nbytes = link[exists], start[exists], nbytes[exists]
        return cls(
            round=np.repeat(np.arange(len(log)), [len(entry.round) for entry in log]),
            messages=join([Round([], [], reduce=[]), *(entry.round for entry in log)]),
            nbytes=np.concatenate([none, *(entry.nbytes for entry in log)]),
            ready=np.concatenate([none, *(entry.ready for entry in log)]),
            start=np.concatenate([none, *(entry.transfers.first_byte for entry in log)]),
            delivery=np.concatenate([none, *(entry.transfers.delivery for entry in log)]),
            link=link,
            link_start=start,
            link_stop=start + nbytes / bandwidth[link],
        )
