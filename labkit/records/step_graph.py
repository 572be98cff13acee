"""The executed graph of a TensorFlow step: operations, devices, dependencies and transfers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from labkit.common.errors import LabkitError
from labkit.simulate.placement import TaskGraph


@dataclass(frozen=True)
class Operation:
    """An operation of the executed graph, with its device and its times.

    Attributes:
        name: Name of the graph node.
        op: Type of the operation, such as `MatMul`.
        device: Device that executed the operation, in short form such as `CPU:1`.
        bytes: Bytes of all outputs; NaN if the shape of an output is known only during execution.
        seconds: Median duration over the traced steps. The value is 0 for operations without
            profiler events, such as constants.
        start, stop: Seconds since the start of the displayed step; NaN if the profiler recorded no
            event.
    """

    name: str
    op: str
    device: str
    bytes: float
    seconds: float = 0.0
    start: float = math.nan
    stop: float = math.nan


@dataclass(frozen=True)
class Flow:
    """A dependency between two operations, which transfers a tensor or only controls their order.

    Attributes:
        source, target: Names of the operations that produce and use the tensor.
        bytes: Bytes of the tensor.
        control: Whether the dependency is a control dependency, which transfers no tensor.
        output: Index of the tensor among the outputs of `source`.
    """

    source: str
    target: str
    bytes: float
    control: bool = False
    output: int = 0


@dataclass(frozen=True)
class Transfer:
    """A send and a receive that TensorFlow inserts for a dependency between two devices.

    Attributes:
        tensor_name: Key that the send and the receive have in common.
        source: Name of the operation that produces the tensor.
        send, receive: Names of the send operation and of the receive operation.
        sender, receiver: Devices on which the send and the receive run.
        bytes: Bytes of the tensor; 0 for a control dependency.
    """

    tensor_name: str
    source: str
    send: str
    sender: str
    receive: str
    receiver: str
    bytes: float


@dataclass(frozen=True)
class StepGraph:
    """The graph that TensorFlow executed in a step, with the operations of all devices.

    Attributes:
        operations: Operations of all devices, in the order of TensorFlow's graph.
        flows: Dependencies between operations (`Flow`). A copy from one device to another is a
            single dependency. Dependencies that lead back to the start of a loop are omitted.
        seconds: Duration of the measured step.
        transfers: Pairs of a send and a receive (`Transfer`), which implement dependencies between
            devices.
    """

    operations: tuple[Operation, ...]
    flows: tuple[Flow, ...]
    seconds: float = math.nan
    transfers: tuple[Transfer, ...] = ()

    @property
    def devices(self) -> list[str]:
        """The names of the devices that executed operations."""
        return sorted({operation.device for operation in self.operations})

    @property
    def copies(self) -> list[Flow]:
        """Dependencies between devices, one for each pair of a tensor and a receiving device.

        A control dependency between devices also counts, because TensorFlow implements it by
        sending an empty constant.
        """
        device_of = {operation.name: operation.device for operation in self.operations}
        copies: dict[tuple[str, int, str], Flow] = {}
        for flow in self.flows:
            if device_of[flow.source] != device_of[flow.target] and not flow.control:
                copies.setdefault((flow.source, flow.output, device_of[flow.target]), flow)
        return list(copies.values())


Row: TypeAlias = dict[str, str | int | float | bool]
# The label `WAY` marks matrix products whose times include copies between devices.
WAY = "product, with the copies"


@dataclass(frozen=True)
class PlacementMeasurements:
    """Measurements of devices and operations, made before placement plans are executed.

    Attributes:
        listed: Names of all logical devices, as TensorFlow lists them.
        kernels: Rows of TensorFlow's kernel registry, each with op, device and types.
        rules: Test results of TensorFlow's placer, each with the requested and the resulting
            device.
        scoped: Executed graph of a training step with a device scope per tower. A tower is a
            parallel branch of the model.
        log: Device of each graph node in `scoped`, from TensorFlow's placement log.
        tasks: Graph of a training step without device scopes, with the seconds and output bytes of
            each operation.
        links: Rows of timed copies between two logical devices, each with bytes and seconds.
        latency, bandwidth: Fixed time in s of a copy between two logical devices, and its rate in
            bytes/s.
        dispatch: Seconds that TensorFlow needs per operation in addition to the computation.
        speeds: Rows of timed matrix products and copies of different sizes; empty without a GPU.
    """

    listed: Sequence[str]
    kernels: Sequence[Row]
    rules: Sequence[Row]
    scoped: StepGraph
    log: Mapping[str, str]
    tasks: TaskGraph
    links: Sequence[Row]
    latency: float
    bandwidth: float
    dispatch: float
    speeds: Sequence[Row]


@dataclass(frozen=True)
class PlanMeasurement:
    """The measurement of a placement plan that TensorFlow has executed.

    Attributes:
        name: Name of the plan.
        seconds: Duration of each training step.
        losses: Training losses of the first steps, which should be the same for all plans.
        copies: Number of tensors and signals that TensorFlow sends between devices in a training
            step.
        graph: Graph that TensorFlow executed with this plan.
    """

    name: str
    seconds: Sequence[float]
    losses: Sequence[float]
    copies: int
    graph: StepGraph


RESOLUTION = 1e-6  # The clocks of two threads may differ by up to 1 µs.


@dataclass(frozen=True)
class QueuedOperation:
    """An operation, with the times at which it was ready, started and ended. All times are in
    seconds since the start of the training step.

    Attributes:
        operation: The operation that TensorFlow executed.
        needs: Number of inputs and control inputs that must be complete before the operation can
            start.
        ready: Time at which the operation's last dependency ended, so that the operation could
            start.
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
        unresolved: For each operation name, the number of dependencies that have not yet ended.
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
        before: For each operation, the names of its dependencies. A name is repeated if the
            operation uses several outputs of the dependency.
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
            # Of several times within the clock's resolution, only the last time is used.
            if not distinct_times or distinct_times[-1] - time > RESOLUTION:
                distinct_times.append(time)
        return [self.at(time) for time in reversed(distinct_times)]

    def started_early(self, resolution: float = RESOLUTION) -> list[str]:
        """Return the operations that start before their inputs end (none in a correct trace)."""
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
    counts as part of its source operation. TensorFlow's profiler does not show when sends and
    receives run.

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
