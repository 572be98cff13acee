"""The benchmark of PyTorch's fully_shard (FSDP2) over gloo, applied to each layer."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from labkit.bench.peers import ddp
from labkit.bench.peers.meeting import Meeting, Task


def join(meeting: Meeting, task: Task) -> Peer:
    """Start PyTorch with a process group, and return the object that measures its steps."""
    return Peer(meeting, ddp.start(meeting, task))


class Peer(ddp.Peer):
    """Measures the training steps of one process, which stores a shard of each parameter."""

    def spread(self, model: Any) -> Any:
        """Shard each layer with parameters, then the model, as `labkit.frameworks.fsdp` does."""
        fully_shard = import_module("torch.distributed.fsdp").fully_shard
        for layer in model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
        return fully_shard(model)

    def full_value(self, parameter: Any) -> Any:
        """Return all values of a parameter, gathered from all processes."""
        return parameter.detach().full_tensor()
