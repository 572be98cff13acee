"""The executed graph of a TensorFlow step: operations, devices, dependencies and transfers."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """An operation of the executed graph, with its device and its times.

    Attributes:
        name: Name of the graph node.
        op: Type of the operation, such as `MatMul`.
        device: Device that executed the operation, in short form such as `CPU:1`.
        bytes: Bytes of all outputs; NaN if the shape of an output is known only during execution.
        seconds: Median duration over the traced steps; 0 for operations without events in
            TensorFlow's profiler, such as constants and arguments.
        start, stop: Times in seconds since the start of the step that figures show; NaN if the
            profiler recorded no event.
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
        source, target: Names of the operation that produces the tensor, and of the operation that
            uses it.
        bytes: Bytes of the tensor.
        control: Whether this is a control dependency, which transfers no tensor.
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
        seconds: Duration of the step for which the times `start` and `stop` of operations were
            measured.
        transfers: Pairs of a send and a receive (`Transfer`), which carry out dependencies between
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
        """Dependencies between devices: one per tensor and device that receives the tensor.

        A control dependency between devices also counts, because TensorFlow implements it by
        sending an empty constant.
        """
        device_of = {operation.name: operation.device for operation in self.operations}
        copies: dict[tuple[str, int, str], Flow] = {}
        for flow in self.flows:
            if device_of[flow.source] != device_of[flow.target] and not flow.control:
                copies.setdefault((flow.source, flow.output, device_of[flow.target]), flow)
        return list(copies.values())
