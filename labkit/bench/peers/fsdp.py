"""PyTorch's fully_shard over gloo, layer by layer."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from labkit.bench.peers import ddp
from labkit.bench.peers.meeting import Meeting, Task


def join(meeting: Meeting, task: Task) -> Peer:
    """Meet."""
    return Peer(meeting, ddp.start(meeting, task))


class Peer(ddp.Peer):
    """The steps of one process, which holds a part of each parameter."""

    def spread(self, model: Any) -> Any:
        """See `labkit.frameworks.fsdp`."""
        fully_shard = import_module("torch.distributed.fsdp").fully_shard
        for layer in model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
        return fully_shard(model)

    def whole(self, parameter: Any) -> Any:
        """Gathered from all processes."""
        return parameter.detach().full_tensor()
