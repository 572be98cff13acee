"""Flows (messages in transfer), which share links at max-min fair rates until they end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from labkit.network.topology import Seconds
from labkit.schedules.round import Booleans, Integers

FREE = -1  # A flow (message transfer) with the turn number FREE never waits for other flows.
NO_NUMBERS: Integers = np.empty(0, np.int64)
NO_TIMES: Seconds = np.empty(0)
# The constant SAME_TIME is a relative rounding error; flow ends that differ by less count as equal.
SAME_TIME = 1e-12


class Segment(NamedTuple):
    """A time interval in which the rate of each flow is constant.

    Attributes:
        number: The number that identifies each flow.
        way: The link numbers of each flow's route, shape (flows, hops); shorter routes are padded
            with -1.
        rate: The transfer rate of each flow, in bytes/s.
        start, stop: The start and the end of the interval, in s.
    """

    number: Integers
    way: Integers
    rate: Seconds
    start: float
    stop: float


class Flows:
    """The active flows of a network, stored as arrays.

    Between two events, each flow has a constant rate. The function `max_min` divides the bandwidth
    of the links fairly among the flows.

    An active flow uses its rate on all links of its route at once. A flow may have a turn: a number
    that orders the communication rounds of a rank. Among flows with turns, only those with the
    lowest turn number transfer bytes. The rule about turns applies separately to each rank's
    outgoing link.

    Args:
        bandwidth: The bandwidth of each link, in bytes/s.
        hops: The number of links of the longest route.
        now: The simulated time at the start, in s; default: 0.
        log: Whether to record the rates in `segments`; default: False.

    Attributes:
        now: The current simulated time, in s.
        number: The number that identifies each flow, chosen by the caller of `start`.
        way: The link numbers of each flow's route, shape (flows, hops); shorter routes are padded
            with -1.
        turn: The turn number of each flow; `FREE` if the flow never waits.
        remaining: The bytes of each flow that are not yet transferred.
        rate: The rate of each flow, in bytes/s. The attribute `rate` is None if the known rates are
            out of date.
        segments: A `Segment` for each interval between events, if `log` is true.
    """

    def __init__(self, bandwidth: Seconds, hops: int, now: float = 0.0, log: bool = False) -> None:
        self.now = now
        self.number: Integers = np.empty(0, np.int64)
        self.way: Integers = np.empty((0, hops), np.int64)
        self.turn: Integers = np.empty(0, np.int64)
        self.remaining: Seconds = np.empty(0)
        self.rate: Seconds | None = None
        # The array `_wait` contains the seconds until each flow ends.
        self._wait: Seconds | None = None
        self.segments: list[Segment] = []
        self._bandwidth, self._log = bandwidth, log

    def __len__(self) -> int:
        """The number of active flows."""
        return len(self.number)

    def start(self, number: Integers, way: Integers, turn: Integers, nbytes: Seconds) -> None:
        """Start flows at the current time.

        Args:
            number: The number that identifies each flow.
            way: The link numbers of each flow's route, shape (flows, hops); shorter routes are
                padded with -1.
            turn: The turn number of each flow; `FREE` if the flow never waits.
            nbytes: Bytes of each flow.
        """
        self.number = np.concatenate([self.number, number])
        self.way = np.concatenate([self.way, way])
        self.turn = np.concatenate([self.turn, turn])
        self.remaining = np.concatenate([self.remaining, nbytes])
        self.rate = self._wait = None

    @property
    def next(self) -> float:
        """The time at which the next flow ends if no flow starts before; infinite without flows."""
        return self.now + float(self._remaining().min(initial=np.inf))

    def run(self, until: float) -> tuple[Integers, Seconds]:
        """Advance the time to `until`; return numbers and end times of flows that end by then.

        Args:
            until: The new simulated time, in s.
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
            # The assignment removes the rounding error of the addition in `_advance`.
            self.now = until
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
        """Return the seconds until each flow ends, if all flows keep their current rates."""
        if self._wait is None:
            rate = self.find_rates()
            self._wait = np.full(len(rate), np.inf)
            np.divide(self.remaining, rate, out=self._wait, where=rate > 0)
        return self._wait

    def find_rates(self) -> Seconds:
        """Return the rate of each flow, in bytes/s; 0 for a flow that waits until its turn."""
        if self.rate is None:
            flowing = self._flowing()
            self.rate = np.zeros(len(self))
            self.rate[flowing] = max_min(self.way[flowing], self._bandwidth)
        return self.rate

    def _flowing(self) -> Integers:
        """Return the indices of the flows that transfer bytes at the current time."""
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
    """Return the end time of each flow in s, for start times that are all known in advance.

    Args:
        way: The link numbers of each flow's route, shape (flows, hops); shorter routes are padded
            with -1.
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

    Flow f has the rate \(x_f\), and link l has the bandwidth \(c_l\). Rates are feasible if each
    link l satisfies \(\sum_{f \ni l} x_f \le c_l\). Feasible rates are max-min fair if every
    increase reduces an equal or smaller rate. Equivalently, rates are max-min fair if every flow
    has a bottleneck link on its route. A bottleneck link of a flow is fully used. No other flow on
    the bottleneck link is faster than the flow.

    The algorithm is progressive filling: the rates of all flows rise together. A flow's rate
    becomes fixed when a link of its route is full. A link becomes full at a certain rate of its
    flows, the fill rate. The fill rate is the remaining capacity divided by the number of rising
    flows. The rate at which a link becomes full never falls during progressive filling. A link with
    the lowest fill rate on its flows' routes is a bottleneck. Because fill rates never fall, no
    later fill rate is lower. One iteration finds all links that are bottlenecks, and fixes the
    rates of their flows.

    Args:
        way: The link numbers of each flow's route, shape (flows, hops); shorter routes are padded
            with -1.
        bandwidth: The bandwidth of each link, in bytes/s, shape (links,).

    Source: Bertsekas and Gallager 1992, *Data Networks*, section 6.5.2. The following papers use
        max-min fair rates as a model of TCP.
    Velho and Legrand 2009, *Accuracy study and improvement of network simulation in the SimGrid
    framework*; Casanova et al. 2014, *Versatile, scalable, and accurate simulation of distributed
    applications and platforms*.
    """
    links = len(bandwidth)
    if len(way) == 1:
        alone: Seconds = bandwidth[way[way >= 0]].min(keepdims=True)
        return alone
    # The index -1 pads short routes. Padding stands for a link with infinite bandwidth.
    way = np.where(way < 0, links, way)
    capacity = np.append(bandwidth, np.inf)
    rate: Seconds = np.zeros(len(way))
    rising = np.arange(len(way))
    while len(rising):
        crossed = way[rising]
        count = np.bincount(crossed.ravel(), minlength=links + 1)
        share = capacity / np.maximum(count, 1)
        lowest = share[crossed].min(axis=1)
        # If no two flows share a link, one iteration gives the final rates. One iteration also
        # suffices if all flows have the same lowest rate.
        if count[:links].max(initial=0) <= 1 or lowest.min() == lowest.max():
            rate[rising] = lowest
            break
        # For each link, the array `along` contains the lowest fill rate on the routes of the link's
        # flows.
        along = np.full(links + 1, np.inf)
        np.minimum.at(along, crossed.ravel(), np.repeat(lowest, crossed.shape[1]))
        full = (along[crossed] >= share[crossed]).any(axis=1)
        rate[rising[full]] = lowest[full]
        used = np.repeat(lowest[full], crossed.shape[1])
        capacity -= np.bincount(crossed[full].ravel(), used, links + 1)
        rising = rising[~full]
    return rate
