"""How flows share links: max-min fair rates, by progressive filling."""

from __future__ import annotations

import numpy as np

from labkit.network.topology import Seconds
from labkit.schedules.round import Integers


def max_min(way: Integers, bandwidth: Seconds) -> Seconds:
    r"""The max-min fair rates of flows, in bytes/s.

    Of all rates \(x\) that no link refuses, \(\sum_{f \ni l} x_f \le c_l\), these are the ones of
    which none can be raised without lowering one that is as small or smaller. Equally: every flow
    has a bottleneck, a link of its way that is full and on which nobody is faster than it.

    Filled progressively: all rates rise together; where a link is full, its flows stay as they
    are, and the others rise on. The rate at which a link would fill, (what is left) / (flows that
    still rise), never falls on the way; so a link at which it is the lowest along the ways of all
    of its flows is a bottleneck already, and all such links are closed in one turn.

    Args: way: numbers of the links that each flow crosses, shape (flows, hops), -1 where a way is
    shorter; bandwidth: bytes/s of each link, shape (links,).
    Source: Bertsekas and Gallager 1992, *Data Networks*, section 6.5.2. As the model of TCP on a
    network: Velho and Legrand 2009, *Accuracy study and improvement of network simulation in the
    SimGrid framework*; Casanova et al. 2014, *Versatile, scalable, and accurate simulation of
    distributed applications and platforms*.
    """
    links = len(bandwidth)
    if len(way) == 1:
        alone: Seconds = bandwidth[way[way >= 0]].min(keepdims=True)
        return alone
    way = np.where(way < 0, links, way)  # where there is no link, one that is never full
    left = np.append(bandwidth, np.inf)
    rate: Seconds = np.zeros(len(way))
    rising = np.arange(len(way))
    while len(rising):
        crossed = way[rising]
        count = np.bincount(crossed.ravel(), minlength=links + 1)
        share = left / np.maximum(count, 1)
        own = share[crossed].min(axis=1)
        if count[:links].max(initial=0) <= 1:
            rate[rising] = own
            break
        along = np.full(links + 1, np.inf)  # the lowest share on the ways of each link's flows
        np.minimum.at(along, crossed.ravel(), np.repeat(own, crossed.shape[1]))
        full = (along[crossed] >= share[crossed]).any(axis=1)
        rate[rising[full]] = own[full]
        taken = np.repeat(own[full], crossed.shape[1])
        left -= np.bincount(crossed[full].ravel(), taken, links + 1)
        rising = rising[~full]
    return rate
