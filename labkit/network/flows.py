"""Flows (messages in transfer) that share links max-min fairly: rates, bytes and end times."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from labkit.network.topology import Seconds
from labkit.schedules.round import Booleans, Integers

FREE = -1  # turn number of a flow that waits for no other flow
NO_NUMBERS: Integers = np.empty(0, np.int64)
NO_TIMES: Seconds = np.empty(0)
SAME_TIME = 1e-12  # relative rounding error of end times; flows within it end together


class Segment(NamedTuple):
    """The flows, in columns, during an interval in which their rates are constant.

    Attributes:
        number: The number of each flow.
        way: The links of each flow, shape (flows, hops), filled with -1 after a shorter route.
        rate: The rate of each flow, in bytes/s.
        start, stop: The interval, in s.
    """

    number: Integers
    way: Integers
    rate: Seconds
    start: float
    stop: float


class Flows:
    """The active flows, in columns, with max-min fair rates between two events (`max_min`).

    A flow occupies its rate on all links of its route at once, from its start to its end. Flows may
    have a turn, a number that orders the rounds of a rank. Of the flows with turns on a rank's
    outgoing link, only those with the lowest turn move.

    Args:
        bandwidth: The bandwidth of each link, in bytes/s.
        hops: The number of links of the longest route.
        now: The time at the start, in s; default: 0.
        log: Whether to record `segments`; default: False.

    Attributes:
        now: The current time, in s.
        number: The number of each flow, chosen by its sender.
        way: The links of each flow, shape (flows, hops), filled with -1 after a shorter route.
        turn: The turn of each flow, or `FREE`.
        remaining: The remaining bytes of each flow.
        rate: The rate of each flow, in bytes/s; None if flows have changed since the last
            computation.
        segments: The rates in each interval between events, if `log` is true.
    """

    def __init__(self, bandwidth: Seconds, hops: int, now: float = 0.0, log: bool = False) -> None:
        self.now = now
        self.number: Integers = np.empty(0, np.int64)
        self.way: Integers = np.empty((0, hops), np.int64)
        self.turn: Integers = np.empty(0, np.int64)
        self.remaining: Seconds = np.empty(0)
        self.rate: Seconds | None = None
        self._wait: Seconds | None = None  # seconds until each flow ends
        self.segments: list[Segment] = []
        self._bandwidth, self._log = bandwidth, log

    def __len__(self) -> int:
        """The number of active flows."""
        return len(self.number)

    def start(self, number: Integers, way: Integers, turn: Integers, nbytes: Seconds) -> None:
        """Start flows at the current time.

        Args:
            number: The number of each flow.
            way: The links of each flow, shape (flows, hops), filled with -1 after a shorter route.
            turn: The turn of each flow, or `FREE`.
            nbytes: Bytes of each flow.
        """
        self.number = np.concatenate([self.number, number])
        self.way = np.concatenate([self.way, way])
        self.turn = np.concatenate([self.turn, turn])
        self.remaining = np.concatenate([self.remaining, nbytes])
        self.rate = self._wait = None

    @property
    def next(self) -> float:
        """The time of the next end of a flow if no flow starts before; infinite without flows."""
        return self.now + float(self._remaining().min(initial=np.inf))

    def run(self, until: float) -> tuple[Integers, Seconds]:
        """Advance the time; return the numbers and end times of the flows that end until then.

        Args:
            until: The new time, in s.
        """
        numbers, times = NO_NUMBERS, NO_TIMES
        while len(self):
            remaining = self._remaining()
            wait = float(remaining.min())
            if self.now + wait > until:
                break
            stay = remaining > wait * (1 + SAME_TIME) + 4 * np.spacing(self.now)
            self._advance(wait)
            numbers = np.concatenate([numbers, self.number[~stay]])
            times = np.concatenate([times, np.full(len(stay) - stay.sum(), self.now)])
            self._select(stay)
        if self.now < until < np.inf:
            self._advance(until - self.now)
            self.now = until  # The sum may differ from `until` by rounding.
        return numbers, times

    def _select(self, stay: Booleans) -> None:
        self.number, self.way, self.turn = self.number[stay], self.way[stay], self.turn[stay]
        self.remaining = self.remaining[stay]
        self.rate = self._wait = None

    def _advance(self, seconds: float) -> None:
        begin, self.now = self.now, self.now + seconds
        if not len(self):
            return
        rate = self.find_rates()
        if self._log and seconds:
            on = rate > 0
            self.segments.append(Segment(self.number[on], self.way[on], rate[on], begin, self.now))
        self.remaining, self._wait = np.maximum(self.remaining - rate * seconds, 0.0), None

    def _remaining(self) -> Seconds:
        """Return the seconds until each flow ends at its current rate."""
        if self._wait is None:
            rate = self.find_rates()
            self._wait = np.full(len(rate), np.inf)
            np.divide(self.remaining, rate, out=self._wait, where=rate > 0)
        return self._wait

    def find_rates(self) -> Seconds:
        """Return the current rate of each flow, in bytes/s; 0 for a flow that waits its turn."""
        if self.rate is None:
            flowing = self._flowing()
            self.rate = np.zeros(len(self))
            self.rate[flowing] = max_min(self.way[flowing], self._bandwidth)
        return self.rate

    def _flowing(self) -> Integers:
        """Return the positions of the flows that now transfer bytes."""
        queued = self.turn != FREE
        if len(self) == 1 or not queued.any():
            return np.arange(len(self))
        first = self.way[:, 0]
        lowest = np.full(len(self._bandwidth), np.iinfo(np.int64).max)
        np.minimum.at(lowest, first[queued], self.turn[queued])
        return np.flatnonzero(~queued | (self.turn == lowest[first]))


def finish_times(
    way: ArrayLike, nbytes: ArrayLike, start: ArrayLike, bandwidth: ArrayLike
) -> Seconds:
    """Return the end time in s of each flow, from start times that are all known in advance.

    Args:
        way: The links of each flow, shape (flows, hops), filled with -1 after a shorter route.
        nbytes: Bytes of each flow.
        start: The start time of each flow, in s.
        bandwidth: The bandwidth of each link, in bytes/s.
    """
    ways, begin = np.asarray(way, np.int64), np.asarray(start, np.float64)
    size = np.asarray(nbytes, np.float64)
    flows = Flows(np.asarray(bandwidth, np.float64), ways.shape[1])
    ends = np.empty(len(ways))
    for moment in [*np.unique(begin), np.inf]:
        numbers, times = flows.run(float(moment))
        ends[numbers] = times
        now = np.flatnonzero(begin == moment)
        flows.start(now, ways[now], np.full(len(now), FREE), size[now])
    return ends


def max_min(way: Integers, bandwidth: Seconds) -> Seconds:
    r"""Return the max-min fair rates of flows, in bytes/s.

    Feasible rates \(x\) satisfy \(\sum_{f \ni l} x_f \le c_l\) on each link l. Such rates are
    max-min fair if no rate can increase without a decrease of another rate that is as small or
    smaller. Equivalently, every flow has a bottleneck: a full link of its route on which no flow is
    faster.

    The algorithm is progressive filling: all rates rise together, and the rates of flows on a full
    link stop. The rate at which a link would fill is its remaining capacity divided by the number
    of its rising flows. A link's rate never falls during the filling. A link is therefore a
    bottleneck if its rate is the lowest along the routes of all its flows. One iteration closes all
    such links.

    Args:
        way: The links of each flow, shape (flows, hops), filled with -1 after a shorter route.
        bandwidth: The bandwidth of each link, in bytes/s, shape (links,).

    Source: Bertsekas and Gallager 1992, *Data Networks*, section 6.5.2. As the model of TCP on a
    network: Velho and Legrand 2009, *Accuracy study and improvement of network simulation in the
    SimGrid framework*; Casanova et al. 2014, *Versatile, scalable, and accurate simulation of
    distributed applications and platforms*.
    """
    links = len(bandwidth)
    if len(way) == 1:
        alone: Seconds = bandwidth[way[way >= 0]].min(keepdims=True)
        return alone
    way = np.where(way < 0, links, way)  # -1 becomes a link of infinite bandwidth
    capacity = np.append(bandwidth, np.inf)
    rate: Seconds = np.zeros(len(way))
    rising = np.arange(len(way))
    while len(rising):
        crossed = way[rising]
        count = np.bincount(crossed.ravel(), minlength=links + 1)
        share = capacity / np.maximum(count, 1)
        lowest = share[crossed].min(axis=1)
        # If no link is shared, or all flows get the same rate, every flow has its bottleneck.
        if count[:links].max(initial=0) <= 1 or lowest.min() == lowest.max():
            rate[rising] = lowest
            break
        along = np.full(links + 1, np.inf)  # by link: lowest share on its flows' routes
        np.minimum.at(along, crossed.ravel(), np.repeat(lowest, crossed.shape[1]))
        full = (along[crossed] >= share[crossed]).any(axis=1)
        rate[rising[full]] = lowest[full]
        used = np.repeat(lowest[full], crossed.shape[1])
        capacity -= np.bincount(crossed[full].ravel(), used, links + 1)
        rising = rising[~full]
    return rate
