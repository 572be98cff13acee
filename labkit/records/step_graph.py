"""A step of TensorFlow as it was carried out: operations where they ran, what went between them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """A node of the graph that ran.

    Attributes:
        name: its own.
        op: its type, such as `MatMul`.
        device: where it ran, such as `CPU:1`.
        bytes: of all its outputs; NaN where a shape is not known before it runs.
        seconds: that it takes in the median of the steps; 0 where the profiler has no event of it,
            as of constants and arguments, which compute nothing.
        start, stop: s after the beginning of the step that is drawn; NaN without an event.
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
    """That an operation waits for another one; control: it reads nothing of it.

    output: the number of the tensor that is read, of those that the source makes.
    """

    source: str
    target: str
    bytes: float
    control: bool = False
    output: int = 0


@dataclass(frozen=True)
class Transfer:
    """A pair of operations that TensorFlow's partitioner has put where an edge left its device.

    Attributes:
        tensor_name: by which the two find each other.
        source: what is sent: the operation that made it.
        send, receive: names of the two.
        sender, receiver: devices on which they are.
        bytes: of the tensor; 0 where only an end is told, as a control dependency is.
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
    """A step as it was carried out.

    Attributes:
        operations: of all devices, in the order in which TensorFlow lists them.
        flows: between them. A copy between two devices, which TensorFlow sends and receives, is one
            flow; the edges that lead back to the head of a loop are left out.
        seconds: of the step whose `start` and `stop` the operations have.
        transfers: the sends and receives behind the flows between devices.
    """

    operations: tuple[Operation, ...]
    flows: tuple[Flow, ...]
    seconds: float = math.nan
    transfers: tuple[Transfer, ...] = ()

    @property
    def devices(self) -> list[str]:
        """On which something ran."""
        return sorted({operation.device for operation in self.operations})

    @property
    def copies(self) -> list[Flow]:
        """What went from device to device: once for each tensor and receiving device.

        Also signals: where an operation only waits for one elsewhere, an empty constant is sent.
        """
        on = {operation.name: operation.device for operation in self.operations}
        found: dict[tuple[str, int, str], Flow] = {}
        for flow in self.flows:
            if on[flow.source] != on[flow.target] and not flow.control:
                found.setdefault((flow.source, flow.output, on[flow.target]), flow)
        return list(found.values())
