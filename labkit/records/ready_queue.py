"""The executor's ready queue, replayed from a step that ran: counts that fall to zero, waits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from labkit.common.errors import LabkitError
from labkit.records.step_graph import Operation, StepGraph

RESOLUTION = 1e-6  # s; events of one thread may touch, and those of two are read by two clocks


@dataclass(frozen=True)
class Served:
    """An operation on its way through the queue; times in s after the step began.

    Attributes:
        operation: which.
        needs: inputs and control inputs, each of which it has to wait for.
        ready: when the last of them had ended: its count of unresolved dependencies fell to zero.
        start, stop: when it ran. Constants and arguments, of which TensorFlow's profiler has no
            event, for nothing is computed, end as soon as they are ready.
        timed: whether there is an event.
    """

    operation: Operation
    needs: int
    ready: float
    start: float
    stop: float
    timed: bool

    @property
    def wait(self) -> float:
        """Seconds in the queue: it could have run, and no thread was free or knew of it."""
        return self.start - self.ready


class Moment(NamedTuple):
    """What the executor holds at a time.

    Attributes:
        time: s after the step began.
        unresolved: by the name of each operation, how many of its dependencies have not ended.
        queued, running, done: names.
    """

    time: float
    unresolved: Mapping[str, int]
    queued: tuple[str, ...]
    running: tuple[str, ...]
    done: tuple[str, ...]


@dataclass(frozen=True)
class ReadyQueue:
    """All operations of a step, in the order in which they became ready.

    Attributes:
        served: a row each.
        before: by name, those whose end each waits for, as often as it waits for them.
    """

    served: tuple[Served, ...]
    before: Mapping[str, tuple[str, ...]]

    def at(self, time: float) -> Moment:
        """The state just after everything has happened that happens at this time."""
        ended = {each.operation.name for each in self.served if each.stop <= time}
        unresolved = {
            name: sum(each not in ended for each in before) for name, before in self.before.items()
        }
        queued = [each for each in self.served if each.ready <= time < each.start]
        running = [each for each in self.served if each.start <= time < each.stop]
        return Moment(
            time,
            unresolved,
            tuple(each.operation.name for each in queued),
            tuple(each.operation.name for each in running),
            tuple(name for name in unresolved if name in ended),
        )

    def moments(self) -> list[Moment]:
        """The state each time that an operation with an event has begun or ended.

        What happens within the clock's resolution is one moment.
        """
        times = {t for each in self.served if each.timed for t in (each.start, each.stop)}
        kept: list[float] = []
        for time in sorted(times, reverse=True):
            # The last of several that cannot be told apart.
            if not kept or kept[-1] - time > RESOLUTION:
                kept.append(time)
        return [self.at(time) for time in reversed(kept)]

    def early(self, resolution: float = RESOLUTION) -> list[str]:
        """Operations that would have started before an input of theirs had ended: there is none."""
        return [each.operation.name for each in self.served if each.wait < -resolution]

    @property
    def waited(self) -> list[Served]:
        """Those with an event, the longest in the queue first."""
        timed = [each for each in self.served if each.timed]
        return sorted(timed, key=lambda each: each.wait, reverse=True)


def ready_queue(graph: StepGraph) -> ReadyQueue:
    r"""Replay a traced step.

    An operation \(v\) with dependencies \(d(v)\) is ready at \(\max_{u \in d(v)} stop(u)\), or
    without any when the first operation starts; it then waits in the queue until it starts. A copy
    between devices counts with what was copied, for TensorFlow's profiler does not show when sends
    and receives ran.

    Args:
        graph: of `labkit.worker.executed_step`, without loops, in which an operation runs once.

    Raises:
        LabkitError: no operation of the step has an event.

    Source: Abadi et al. 2016, *TensorFlow: Large-scale machine learning on heterogeneous
    distributed systems*, section 3.1 (arXiv:1603.04467): a count a node, and a ready queue.
    """
    operations = {operation.name: operation for operation in graph.operations}
    before: dict[str, list[str]] = {name: [] for name in operations}
    for flow in graph.flows:
        before[flow.target].append(flow.source)
    served: dict[str, Served] = {}
    # Before that the step was in Python's hands, and no executor had a queue.
    starts = [operation.start for operation in graph.operations if not math.isnan(operation.start)]
    if not starts:
        raise LabkitError("no operation of this step has times: trace it with step_graph")
    begin = min(starts)
    for name in _in_order(before):
        ready = max((served[each].stop for each in before[name]), default=begin)
        served[name] = _served(operations[name], len(before[name]), ready)
    rows = sorted(served.values(), key=lambda each: (each.ready, each.start))
    return ReadyQueue(tuple(rows), {name: tuple(each) for name, each in before.items()})


def _served(operation: Operation, needs: int, ready: float) -> Served:
    timed = not math.isnan(operation.start)
    start, stop = (operation.start, operation.stop) if timed else (ready, ready)
    return Served(operation, needs, ready, start, stop, timed)


def _in_order(before: Mapping[str, list[str]]) -> Iterator[str]:
    """Names, each behind all that it waits for: as the counts of a queue fall to zero."""
    counts = {name: len(needs) for name, needs in before.items()}
    after: dict[str, list[str]] = {name: [] for name in before}
    for name, needs in before.items():
        for need in needs:
            after[need].append(name)
    ready = [name for name, count in counts.items() if count == 0]
    while ready:
        name = ready.pop()
        yield name
        for each in after[name]:
            counts[each] -= 1
            if counts[each] == 0:
                ready.append(each)
