"""The simulator of pipelines: a table, seconds a stage, a network, and no processes."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from labkit.common.errors import InvalidInput
from labkit.network import Network, carrier
from labkit.network.topology import Seconds
from labkit.schedules.interpreter import ScheduleError
from labkit.schedules.pipeline.table import Row, Table


@dataclass(frozen=True, eq=False)
class PipelineSimulation:
    """When each row of a table takes place on a network.

    Args: table; network: None where messages take no time; start, stop: columns in the order of
    the table's rows, s; measured: whether these are times of the wall clock, and not a simulation.
    A computation lasts from start to stop; a `send` from its first byte until its delivery, while
    the sender goes on; a `receive` for as long as the receiver waits.
    """

    table: Table
    network: Network | None
    start: Seconds
    stop: Seconds
    measured: bool = False

    @property
    def seconds(self) -> float:
        """When the last rank is done."""
        return float(self.stop.max(initial=0.0))

    @property
    def busy(self) -> Seconds:
        """For how long each rank computes, shape (ranks,), s."""
        return self._busy(0.0, self.seconds)

    @property
    def bubble(self) -> float:
        """The most that a rank waits between its first row and its last, s."""
        computes, rank = self.table.computes, self.table.rank
        spans = [
            float(self.stop[own].max(initial=0.0) - self.start[own].min(initial=np.inf))
            for own in (computes & (rank == each) for each in range(self.table.ranks))
        ]
        return float((np.array(spans) - self.busy).max())

    @property
    def bubble_share(self) -> float:
        """Share of the time of all ranks in which they do nothing, from the first to the last."""
        return float(1 - self.utilisation().mean())

    def utilisation(self, begin: float = 0.0, end: float | None = None) -> Seconds:
        """Share of the time from begin to end (s) for which each rank computes, shape (ranks,)."""
        end = self.seconds if end is None else end
        if not begin < end:
            raise InvalidInput(f"no time passes from {begin} s to {end} s: give an end after begin")
        return self._busy(begin, end) / (end - begin)

    def _busy(self, begin: float, end: float) -> Seconds:
        inside = np.clip(self.stop, begin, end) - np.clip(self.start, begin, end)
        weights = np.where(self.table.computes, inside, 0.0)
        return np.bincount(self.table.rank, weights, self.table.ranks).astype(np.float64)


def simulate_pipeline(
    table: Table,
    forward: ArrayLike,
    backward_input: ArrayLike,
    backward_weight: ArrayLike = 0.0,
    *,
    network: str | Network | None = None,
    nbytes: ArrayLike = 0.0,
) -> PipelineSimulation:
    """Time of a pipeline: a rank does its rows in order, each as soon as it can.

    A receive ends when its message is delivered; a send hands over and does not wait; `backward`
    takes as long as both of its parts. Messages wait for each other on the network's links.

    Args: forward, backward_input, backward_weight: s a micro-batch, one value or shape (stages,),
    times the compute factor of the stage's rank; network: a name, a `Network`, or None: messages
    take no time; nbytes: of the activation of one micro-batch that leaves a stage, one value or
    shape (stages,); the gradient that comes back has as many.
    Raises: InvalidInput, for names or numbers that cannot be; ScheduleError, for a table in which
    messages are missing.
    """
    given = {"forward": forward, "backward_input": backward_input}
    given |= {"backward_weight": backward_weight, "nbytes": nbytes}
    columns = {name: _per_stage(name, value, table.stages) for name, value in given.items()}
    columns["backward"] = columns["backward_input"] + columns["backward_weight"]
    world = _World(table, Network.parse(network), columns)
    world.run()
    return PipelineSimulation(table, world.network, world.start, world.stop)


def _per_stage(name: str, value: ArrayLike, stages: int) -> Seconds:
    array = np.asarray(value, np.float64)
    if array.shape not in ((), (stages,)):
        raise InvalidInput(
            f"{name} of shape {array.shape}: give one value, or one for each of {stages} stages"
        )
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise InvalidInput(f"{name}={array.tolist()}: give nothing negative, infinite or undefined")
    return np.broadcast_to(array, (stages,))


class _World:
    """Events in order of time: a rank goes on, or something happens to messages on their way.

    A message's number is that of the row that sent it.
    """

    def __init__(self, table: Table, network: Network | None, columns: dict[str, Seconds]) -> None:
        self.table = table
        self.network = network
        self.columns = columns
        self.carrier = None if network is None else carrier(network, table.ranks)
        self.start: Seconds = np.zeros(len(table))
        self.stop: Seconds = np.zeros(len(table))
        self.rows = table.rows()
        self.programs = [np.flatnonzero(table.rank == r).tolist() for r in range(table.ranks)]
        self.places = [0] * table.ranks
        self.numbers = [0] * table.ranks  # computations so far: what a random slowness draws by
        self.delivered: dict[tuple[int, int, int], float] = {}
        self.waiting: dict[tuple[int, int, int], tuple[int, float]] = {}
        self.events: list[tuple[float, int, int]] = []
        self.counted = 0

    def run(self) -> None:
        for rank in range(self.table.ranks):
            self._later(0.0, rank)
        while True:
            carried = self.carrier.next if self.carrier else np.inf
            if self.carrier and carried < np.inf and carried <= self._next:
                for number, start, delivery in self.carrier.step():
                    self._arrive(number, start, delivery)
            elif self.events:
                now, _, rank = heapq.heappop(self.events)
                self._go_on(rank, now)
            else:
                break
        if self.waiting:
            lost = [self.rows[row] for row, _ in self.waiting.values()]
            raise ScheduleError(f"{self.table.name}: nobody can go on, these wait for ever: {lost}")

    @property
    def _next(self) -> float:
        """When the next rank goes on."""
        return self.events[0][0] if self.events else np.inf

    def _later(self, time: float, rank: int) -> None:
        """Equal times are served in the order in which they became known."""
        heapq.heappush(self.events, (time, self.counted, rank))
        self.counted += 1

    def _go_on(self, rank: int, now: float) -> None:
        """Carry out the rank's next row."""
        if self.places[rank] == len(self.programs[rank]):
            return
        number = self.programs[rank][self.places[rank]]
        self.places[rank] += 1
        row = self.rows[number]
        if row[2] == "receive":
            self._receive(rank, number, row, now)
            return
        if row[2] == "send":
            self._send(rank, number, row, now)
            self._later(now, rank)
            return
        self.start[number] = now
        self.stop[number] = now + self._seconds(rank, row)
        self._later(float(self.stop[number]), rank)

    def _seconds(self, rank: int, row: Row) -> float:
        seconds = float(self.columns[row[2]][row[1]])
        if self.network is None:
            return seconds
        self.numbers[rank] += 1
        return seconds * self.network.compute_factor(rank, self.numbers[rank] - 1)

    def _send(self, rank: int, number: int, row: Row, now: float) -> None:
        _, stage, _, _, peer = row
        nbytes = float(self.columns["nbytes"][min(stage, peer)])
        if self.carrier is None:
            self._arrive(number, now, now)
        else:
            self.carrier.start(number, rank, peer % self.table.ranks, nbytes, now)

    def _arrive(self, number: int, start: float, delivery: float) -> None:
        self.start[number], self.stop[number] = start, delivery
        _, stage, _, microbatch, peer = self.rows[number]
        key = (stage, peer, microbatch)
        self.delivered[key] = delivery
        if key in self.waiting:
            row, since = self.waiting.pop(key)
            self._received(peer % self.table.ranks, row, since, delivery)

    def _receive(self, rank: int, number: int, row: Row, now: float) -> None:
        _, stage, _, microbatch, peer = row
        key = (peer, stage, microbatch)
        if key in self.delivered:
            self._received(rank, number, now, self.delivered[key])
        else:
            self.waiting[key] = number, now

    def _received(self, rank: int, number: int, since: float, delivery: float) -> None:
        self.start[number] = since
        self.stop[number] = max(since, delivery)
        self._later(float(self.stop[number]), rank)
