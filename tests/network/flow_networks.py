"""The hand-computed sets of flows as labkit networks, with two ranks for each flow."""

from __future__ import annotations

import itertools

import numpy as np

from labkit.network import Network
from labkit.schedules.round import Integers
from tests.acceptance.flow_sets import FlowSet

ENDLESS = 1e15  # bytes/s of links that are not in the set


def columns(each: FlowSet) -> Integers:
    """Return the links on each flow's route, shape (flows, hops)."""
    hops = max(map(len, each.ways))
    return np.array([[*way, *[-1] * (hops - len(way))] for way in each.ways])


def as_network(each: FlowSet, sharing: str = "fair") -> tuple[Network, list[tuple[int, int]]]:
    """Return a network of the set's links, and the source and destination rank of each flow.

    Link l leads from rank 2l to 2l + 1; a flow leads from a rank before its first link to one after
    its last.
    """
    links = {(2 * link, 2 * link + 1): speed for link, speed in enumerate(each.bandwidth)}
    first = 2 * len(each.bandwidth)
    ends = [(first + 2 * flow, first + 2 * flow + 1) for flow in range(len(each.ways))]
    for way, (source, destination) in zip(each.ways, ends, strict=True):
        links[source, 2 * way[0]] = links[2 * way[-1] + 1, destination] = ENDLESS
        for one, other in itertools.pairwise(way):
            links[2 * one + 1, 2 * other] = ENDLESS
    return Network(latency=0, bandwidth=1, links=links, sharing=sharing), ends
