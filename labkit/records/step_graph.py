"""The executed graph of a TensorFlow step: operations, devices, data flows and transfers."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """A node of the executed graph.

    Attributes:
        name: Name of the node.
        op: Type of the operation, such as `MatMul`.
        device: Device that executed the operation, such as `CPU:1`.
        bytes: Bytes of all outputs; NaN if a shape is unknown before execution.
        seconds: Median duration over steps; 0 for constants, arguments and other operations without
            profiler events.
        start, stop: Times in seconds from the start of the step that figures show; NaN without a
            profiler event.
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
    """A data or control dependency between two operations.

    Attributes:
        source, target: Names of the operation that produces the tensor and of the one that uses it.
        bytes: Bytes of the tensor.
        control: True for a control dependency, which carries no tensor.
        output: Index of the tensor among the outputs of `source`.
    """

    source: str
    target: str
    bytes: float
    control: bool = False
    output: int = 0


@dataclass(frozen=True)
class Transfer:
    """A send and a receive that TensorFlow's partitioner inserts for an edge between devices.

    Attributes:
        tensor_name: Key that matches the send to the receive.
        source: Operation that produces the tensor.
        send, receive: Names of the send operation and of the receive operation.
        sender, receiver: Devices of the send operation and of the receive operation.
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
    """The executed graph of a step.

    Attributes:
        operations: Operations of all devices, in the order of TensorFlow's graph.
        flows: Dependencies between operations. A copy between devices is one flow. Edges that lead
            back to the head of a loop are left out.
        seconds: Duration of the step from which the operations' `start` and `stop` come.
        transfers: Sends and receives that carry out the flows between devices.
    """

    operations: tuple[Operation, ...]
    flows: tuple[Flow, ...]
    seconds: float = math.nan
    transfers: tuple[Transfer, ...] = ()

    @property
    def devices(self) -> list[str]:
        """Devices that executed operations."""
        return sorted({operation.device for operation in self.operations})

    @property
    def copies(self) -> list[Flow]:
        """Flows between devices: one per tensor and receiving device.

        Control dependencies between devices count, because TensorFlow sends an empty constant for
        each of them.
        """
        device_of = {operation.name: operation.device for operation in self.operations}
        copies: dict[tuple[str, int, str], Flow] = {}
        for flow in self.flows:
            if device_of[flow.source] != device_of[flow.target] and not flow.control:
                copies.setdefault((flow.source, flow.output, device_of[flow.target]), flow)
        return list(copies.values())
