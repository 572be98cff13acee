"""The sets of flows by hand, as networks of labkit: each flow has two ranks of its own."""

from __future__ import annotations

import itertools

import numpy as np

from labkit.network import Network
from labkit.schedules.round import Integers
from tests.acceptance.flow_sets import FlowSet

ENDLESS = 1e15  # bytes/s of what is no link of the set


def columns(each: FlowSet) -> Integers:
    """The ways of its flows, shape (flows, hops)."""
    hops = max(map(len, each.ways))
    return np.array([[*way, *[-1] * (hops - len(way))] for way in each.ways])


def as_network(each: FlowSet, sharing: str = "fair") -> tuple[Network, list[tuple[int, int]]]:
    """A graph of links, and from which rank to which each flow goes.

    Link l leads from rank 2l to 2l + 1; flow f comes from a rank before its first link, and goes
    to one behind its last.
    """
    links = {(2 * link, 2 * link + 1): speed for link, speed in enumerate(each.bandwidth)}
    first = 2 * len(each.bandwidth)
    ends = [(first + 2 * flow, first + 2 * flow + 1) for flow in range(len(each.ways))]
    for way, (source, destination) in zip(each.ways, ends, strict=True):
        links[source, 2 * way[0]] = links[2 * way[-1] + 1, destination] = ENDLESS
        for one, other in itertools.pairwise(way):
            links[2 * one + 1, 2 * other] = ENDLESS
    return Network(latency=0, bandwidth=1, links=links, sharing=sharing), ends
