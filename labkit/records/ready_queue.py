"""A replay of TensorFlow's ready queue in a traced step: unresolved dependencies, waiting times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from labkit.common.errors import LabkitError
from labkit.records.step_graph import Operation, StepGraph

RESOLUTION = 1e-6  # seconds by which the clocks of two threads may differ


@dataclass(frozen=True)
class QueuedOperation:
    """An operation, with the times at which it was ready, started and ended. All times are in
    seconds since the start of the training step.

    Attributes:
        operation: The operation that TensorFlow executed.
        needs: Number of inputs and control inputs that must be complete before the operation can
            start.
        ready: Time at which the operation's last dependency ended, so that it could start.
        start, stop: Times at which the operation started and ended. TensorFlow's profiler records
            no events for constants and arguments. An operation without an event is assumed to end
            as soon as it is ready.
        timed: Whether the profiler recorded an event for the operation.
    """

    operation: Operation
    needs: int
    ready: float
    start: float
    stop: float
    timed: bool

    @property
    def wait(self) -> float:
        """Seconds for which the operation waits in the queue, from ready to start."""
        return self.start - self.ready


class Moment(NamedTuple):
    """The state of TensorFlow's executor at one time in a training step.

    Attributes:
        time: Seconds since the start of the training step.
        unresolved: For each operation, by name, the number of its dependencies that have not yet
            ended.
        queued, running, done: Names of the operations that are queued, running, or finished.
    """

    time: float
    unresolved: Mapping[str, int]
    queued: tuple[str, ...]
    running: tuple[str, ...]
    done: tuple[str, ...]


@dataclass(frozen=True)
class ReadyQueue:
    """All operations of a training step, sorted by the time at which they became ready.

    Attributes:
        served: One entry per operation, sorted by the time at which it became ready.
        before: For each operation, the names of its dependencies; a dependency's name is repeated
            if the operation uses several outputs of this dependency.
    """

    served: tuple[QueuedOperation, ...]
    before: Mapping[str, tuple[str, ...]]

    def at(self, time: float) -> Moment:
        """Return the executor's state at a time, after all events of that time."""
        ended = {entry.operation.name for entry in self.served if entry.stop <= time}
        unresolved = {
            name: sum(entry not in ended for entry in before)
            for name, before in self.before.items()
        }
        queued = [entry for entry in self.served if entry.ready <= time < entry.start]
        running = [entry for entry in self.served if entry.start <= time < entry.stop]
        return Moment(
            time,
            unresolved,
            tuple(entry.operation.name for entry in queued),
            tuple(entry.operation.name for entry in running),
            tuple(name for name in unresolved if name in ended),
        )

    def moments(self) -> list[Moment]:
        """Return the executor's states at all starts and ends of operations in the profile.

        Events that are closer in time than the clock's resolution are combined into one moment.
        """
        times = {t for entry in self.served if entry.timed for t in (entry.start, entry.stop)}
        distinct_times: list[float] = []
        for time in sorted(times, reverse=True):
            # If several times are closer than the clock's resolution, the last of them is used.
            if not distinct_times or distinct_times[-1] - time > RESOLUTION:
                distinct_times.append(time)
        return [self.at(time) for time in reversed(distinct_times)]

    def started_early(self, resolution: float = RESOLUTION) -> list[str]:
        """Return the operations that start before their inputs end; a correct trace has none."""
        return [entry.operation.name for entry in self.served if entry.wait < -resolution]

    @property
    def waited(self) -> list[QueuedOperation]:
        """Operations with a profiler event, sorted by waiting time in the queue, longest first."""
        timed = [entry for entry in self.served if entry.timed]
        return sorted(timed, key=lambda entry: entry.wait, reverse=True)


def ready_queue(graph: StepGraph) -> ReadyQueue:
    r"""Compute when each operation of a traced step was ready, and how long it waited to start.

    An operation \(v\) with dependencies \(d(v)\) is ready at \(\max_{u \in d(v)} stop(u)\), when
    the last dependency ends. An operation without dependencies is ready when the first operation of
    the step starts. A ready operation waits in the queue until it starts. A copy between devices
    counts as part of its source operation, because TensorFlow's profiler does not show when sends
    and receives run.

    Args:
        graph: Step graph from `labkit.worker.executed_step`, which must not contain loops.

    Raises:
        LabkitError: If no operation of the step has a profiler event.

    Source: Abadi et al. 2016, *TensorFlow: Large-scale machine learning on heterogeneous
    distributed systems*, section 3.1 (arXiv:1603.04467): a count of unresolved dependencies per
    node, and a ready queue.
    """
    operations = {operation.name: operation for operation in graph.operations}
    before: dict[str, list[str]] = {name: [] for name in operations}
    for flow in graph.flows:
        before[flow.target].append(flow.source)
    served: dict[str, QueuedOperation] = {}
    # Times are counted from the start of the first operation, because only Python code runs before
    # it.
    starts = [operation.start for operation in graph.operations if not math.isnan(operation.start)]
    if not starts:
        raise LabkitError("no operation of this step has times; trace the step with step_graph")
    first_start = min(starts)
    for name in _in_order(before):
        ready = max((served[source].stop for source in before[name]), default=first_start)
        served[name] = _queued_operation(operations[name], len(before[name]), ready)
    rows = sorted(served.values(), key=lambda entry: (entry.ready, entry.start))
    return ReadyQueue(tuple(rows), {name: tuple(sources) for name, sources in before.items()})


def _queued_operation(operation: Operation, needs: int, ready: float) -> QueuedOperation:
    timed = not math.isnan(operation.start)
    start, stop = (operation.start, operation.stop) if timed else (ready, ready)
    return QueuedOperation(operation, needs, ready, start, stop, timed)


def _in_order(before: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the names in topological order: each name follows all names that it depends on."""
    counts = {name: len(needs) for name, needs in before.items()}
    after: dict[str, list[str]] = {name: [] for name in before}
    for name, needs in before.items():
        for need in needs:
            after[need].append(name)
    ready = [name for name, count in counts.items() if count == 0]
    while ready:
        name = ready.pop()
        yield name
        for successor in after[name]:
            counts[successor] -= 1
            if counts[successor] == 0:
                ready.append(successor)
