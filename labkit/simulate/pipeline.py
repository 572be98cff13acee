"""The pipeline simulator, which computes times from a pipeline schedule without processes."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from labkit.common.errors import InvalidInput
from labkit.network import Network, carrier
from labkit.network.topology import Seconds
from labkit.schedules.interpreter import ScheduleError
from labkit.schedules.pipeline_table import Row, ScheduleTable


@dataclass(frozen=True, eq=False)
class PipelineSimulation:
    """The start and end times of all computations and messages of a pipeline schedule on a network.

    A computation in `table` lasts from `start` to `stop` of its row. A `send` lasts from its first
    byte until its delivery; the sender goes on meanwhile. A `receive` row lasts as long as the
    receiver waits for the message.

    Args:
        table: The schedule.
        network: The network that carries the messages. If None, messages take no time.
        start, stop: Times in s, in the order of the table's rows.
        measured: Whether the times were measured by a wall clock; if not, they were simulated.
    """

    table: ScheduleTable
    network: Network | None
    start: Seconds
    stop: Seconds
    measured: bool = False

    @property
    def seconds(self) -> float:
        """Time at which the last rank finishes, in s."""
        return float(self.stop.max(initial=0.0))

    @property
    def busy(self) -> Seconds:
        """Compute time of each rank in s, shape (ranks,)."""
        return self._busy(0.0, self.seconds)

    @property
    def bubble(self) -> float:
        """Longest idle time of a rank between its first and its last computation, in s."""
        computes, rank = self.table.computes, self.table.rank
        spans = [
            float(self.stop[mask].max(initial=0.0) - self.start[mask].min(initial=np.inf))
            for mask in (computes & (rank == r) for r in range(self.table.ranks))
        ]
        return float((np.array(spans) - self.busy).max())

    @property
    def bubble_share(self) -> float:
        """Fraction of the total time in which ranks are idle, as a mean over all ranks."""
        return float(1 - self.utilisation().mean())

    def utilisation(self, begin: float = 0.0, end: float | None = None) -> Seconds:
        """Return the busy fraction of each rank in [begin, end] (in s), shape (ranks,)."""
        end = self.seconds if end is None else end
        if not begin < end:
            raise InvalidInput(
                f"begin={begin} s is not before end={end} s; give an end after begin"
            )
        return self._busy(begin, end) / (end - begin)

    def _busy(self, begin: float, end: float) -> Seconds:
        inside = np.clip(self.stop, begin, end) - np.clip(self.start, begin, end)
        weights = np.where(self.table.computes, inside, 0.0)
        return np.bincount(self.table.rank, weights, self.table.ranks).astype(np.float64)


def simulate_pipeline(
    table: ScheduleTable,
    forward: ArrayLike,
    backward_input: ArrayLike,
    backward_weight: ArrayLike = 0.0,
    *,
    network: str | Network | None = None,
    nbytes: ArrayLike = 0.0,
) -> PipelineSimulation:
    """Simulate a pipeline; each rank executes its table rows in order and as early as possible.

    A receive ends when its message is delivered. A rank does not wait after a send. A `backward`
    takes as long as `backward_input` and `backward_weight` together. Messages share the links of
    the network.

    Args:
        table: The schedule.
        forward, backward_input, backward_weight: Time in s per micro-batch, as one value or with
            shape (stages,). Each time is multiplied by the compute factor of the rank that has the
            stage.
        network: Name of a network, or a `Network`. If None, messages take no time.
        nbytes: Size in bytes of the activation of a micro-batch between two stages. The value is
            one number or has shape (stages,). The gradient of the activation has the same size.

    Raises:
        InvalidInput: If a name or number is invalid.
        ScheduleError: If the table lacks messages that its computations need.
    """
    values = {"forward": forward, "backward_input": backward_input}
    values |= {"backward_weight": backward_weight, "nbytes": nbytes}
    columns = {name: _per_stage(name, value, table.stages) for name, value in values.items()}
    columns["backward"] = columns["backward_input"] + columns["backward_weight"]
    simulator = _Simulator(table, Network.parse(network), columns)
    simulator.run()
    return PipelineSimulation(table, simulator.network, simulator.start, simulator.stop)


def _per_stage(name: str, value: ArrayLike, stages: int) -> Seconds:
    array = np.asarray(value, np.float64)
    if array.shape not in ((), (stages,)):
        raise InvalidInput(
            f"{name} has shape {array.shape}; give one value, or one for each of {stages} stages"
        )
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise InvalidInput(
            f"{name}={array.tolist()} is impossible; give finite numbers, at least 0"
        )
    return np.broadcast_to(array, (stages,))


class _Simulator:
    """A simulator with two kinds of events: a rank executes its next row, or a message progresses.

    Each message has the number of the table row that sends it.
    """

    def __init__(
        self, table: ScheduleTable, network: Network | None, columns: dict[str, Seconds]
    ) -> None:
        self.table = table
        self.network = network
        self.columns = columns
        self.carrier = None if network is None else carrier(network, table.ranks)
        self.start: Seconds = np.zeros(len(table))
        self.stop: Seconds = np.zeros(len(table))
        self.rows = table.rows()
        self.programs = [np.flatnonzero(table.rank == r).tolist() for r in range(table.ranks)]
        self.places = [0] * table.ranks
        # The random slowdown of a rank depends on its number of past computations.
        self.numbers = [0] * table.ranks
        self.delivered: dict[tuple[int, int, int], float] = {}
        self.waiting: dict[tuple[int, int, int], tuple[int, float]] = {}
        self.events: list[tuple[float, int, int]] = []
        self.counted = 0

    def run(self) -> None:
        for rank in range(self.table.ranks):
            self._schedule(0.0, rank)
        while True:
            network_time = self.carrier.next if self.carrier else np.inf
            if self.carrier and network_time < np.inf and network_time <= self._next:
                for number, start, delivery in self.carrier.step():
                    self._arrive(number, start, delivery)
            elif self.events:
                now, _, rank = heapq.heappop(self.events)
                self._execute_next(rank, now)
            else:
                break
        if self.waiting:
            missing = [self.rows[row] for row, _ in self.waiting.values()]
            raise ScheduleError(
                f"{self.table.name}: deadlock: no message ever arrives for {missing}"
            )

    @property
    def _next(self) -> float:
        """Time of the next event in the queue of the ranks."""
        return self.events[0][0] if self.events else np.inf

    def _schedule(self, time: float, rank: int) -> None:
        """Queue an event of a rank; events of equal time keep their order of insertion."""
        heapq.heappush(self.events, (time, self.counted, rank))
        self.counted += 1

    def _execute_next(self, rank: int, now: float) -> None:
        """Execute the rank's next row."""
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
            self._schedule(now, rank)
            return
        self.start[number] = now
        self.stop[number] = now + self._seconds(rank, row)
        self._schedule(float(self.stop[number]), rank)

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
            self._finish_receive(peer % self.table.ranks, row, since, delivery)

    def _receive(self, rank: int, number: int, row: Row, now: float) -> None:
        _, stage, _, microbatch, peer = row
        key = (peer, stage, microbatch)
        if key in self.delivered:
            self._finish_receive(rank, number, now, self.delivered[key])
        else:
            self.waiting[key] = number, now

    def _finish_receive(self, rank: int, number: int, since: float, delivery: float) -> None:
        self.start[number] = since
        self.stop[number] = max(since, delivery)
        self._schedule(float(self.stop[number]), rank)
