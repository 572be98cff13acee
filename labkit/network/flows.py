"""Flows under way on links that they share, max-min fair: who has how much left, and until when."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from labkit.network.topology import Seconds
from labkit.schedules.round import Booleans, Integers

FREE = -1  # turn of a flow that waits for no other
NOBODY: Integers = np.empty(0, np.int64)
NEVER: Seconds = np.empty(0)
SAME = 1e-12  # relative: flows that end in one step, closer to each other than sums are exact


class Segment(NamedTuple):
    """Flows that kept their rates from start to stop (s); columns, rates in bytes/s."""

    number: Integers
    way: Integers
    rate: Seconds
    start: float
    stop: float


class Flows:
    """Flows under way, in columns; between two events each has its max-min fair rate (`max_min`).

    A flow takes its rate on all links of its way at once, from its start until it is drained. Of
    the flows with a turn that begin on one link only those of the lowest turn flow: a rank hands
    one round after the other to its link.

    Args: bandwidth: bytes/s of each link; hops: links of the longest way; now: s; log: keep what
    flowed when.

    Attributes: now: s; number: of each flow, given by who starts it; way: shape (flows, hops), -1
    where it is shorter; turn: or `FREE`; left: bytes; rate: bytes/s, None: to be found anew;
    segments: what flowed when, if asked for.
    """

    def __init__(self, bandwidth: Seconds, hops: int, now: float = 0.0, log: bool = False) -> None:
        self.now = now
        self.number: Integers = np.empty(0, np.int64)
        self.way: Integers = np.empty((0, hops), np.int64)
        self.turn: Integers = np.empty(0, np.int64)
        self.left: Seconds = np.empty(0)
        self.rate: Seconds | None = None
        self._wait: Seconds | None = None  # until each is drained, s
        self.segments: list[Segment] = []
        self._bandwidth, self._log = bandwidth, log

    def __len__(self) -> int:
        """How many are under way."""
        return len(self.number)

    def start(self, number: Integers, way: Integers, turn: Integers, nbytes: Seconds) -> None:
        """Flows that are handed over now; columns."""
        self.number = np.concatenate([self.number, number])
        self.way = np.concatenate([self.way, way])
        self.turn = np.concatenate([self.turn, turn])
        self.left = np.concatenate([self.left, nbytes])
        self.rate = self._wait = None

    @property
    def next(self) -> float:
        """When the next flow will have drained, if none joins; inf without flows."""
        return self.now + float(self._remaining().min(initial=np.inf))

    def run(self, until: float) -> tuple[Integers, Seconds]:
        """Let time pass; numbers of the flows that have drained by then, and when."""
        numbers, times = NOBODY, NEVER
        while len(self):
            remaining = self._remaining()
            wait = float(remaining.min())
            if self.now + wait > until:
                break
            stay = remaining > wait * (1 + SAME) + 4 * np.spacing(self.now)
            self._pass(wait)
            numbers = np.concatenate([numbers, self.number[~stay]])
            times = np.concatenate([times, np.full(len(stay) - stay.sum(), self.now)])
            self._keep(stay)
        if self.now < until < np.inf:
            self._pass(until - self.now)
            self.now = until  # and not what the sum is rounded to
        return numbers, times

    def _keep(self, stay: Booleans) -> None:
        self.number, self.way, self.turn = self.number[stay], self.way[stay], self.turn[stay]
        self.left = self.left[stay]
        self.rate = self._wait = None

    def _pass(self, seconds: float) -> None:
        begin, self.now = self.now, self.now + seconds
        if not len(self):
            return
        rate = self.find_rates()
        if self._log and seconds:
            on = rate > 0
            self.segments.append(Segment(self.number[on], self.way[on], rate[on], begin, self.now))
        self.left, self._wait = np.maximum(self.left - rate * seconds, 0.0), None

    def _remaining(self) -> Seconds:
        """Seconds until each is drained, at the rates of now."""
        if self._wait is None:
            rate = self.find_rates()
            self._wait = np.full(len(rate), np.inf)
            np.divide(self.left, rate, out=self._wait, where=rate > 0)
        return self._wait

    def find_rates(self) -> Seconds:
        """The rates of now, bytes/s; 0 for who waits."""
        if self.rate is None:
            flowing = self._flowing()
            self.rate = np.zeros(len(self))
            self.rate[flowing] = max_min(self.way[flowing], self._bandwidth)
        return self.rate

    def _flowing(self) -> Integers:
        """Places of those whose turn it is."""
        queued = self.turn != FREE
        if len(self) == 1 or not queued.any():
            return np.arange(len(self))
        first = self.way[:, 0]
        lowest = np.full(len(self._bandwidth), np.iinfo(np.int64).max)
        np.minimum.at(lowest, first[queued], self.turn[queued])
        return np.flatnonzero(~queued | (self.turn == lowest[first]))


def drained(way: ArrayLike, nbytes: ArrayLike, start: ArrayLike, bandwidth: ArrayLike) -> Seconds:
    """When each of some flows is drained, s, where all starts are known.

    Args: way: links of each flow, shape (flows, hops), -1 where it is shorter; nbytes; start: s;
    bandwidth: bytes/s of each link.
    """
    ways, begin = np.asarray(way, np.int64), np.asarray(start, np.float64)
    size = np.asarray(nbytes, np.float64)
    flows = Flows(np.asarray(bandwidth, np.float64), ways.shape[1])
    done = np.empty(len(ways))
    for moment in [*np.unique(begin), np.inf]:
        numbers, times = flows.run(float(moment))
        done[numbers] = times
        now = np.flatnonzero(begin == moment)
        flows.start(now, ways[now], np.full(len(now), FREE), size[now])
    return done


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
        # Where nobody meets another, or nobody would be slower, each has its bottleneck.
        if count[:links].max(initial=0) <= 1 or own.min() == own.max():
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
