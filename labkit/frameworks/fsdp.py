"""A process in which PyTorch's fully_shard trains what labkit has exported."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from labkit.frameworks import ddp
from labkit.frameworks.child import serve
from labkit.frameworks.exported import calls


class Training(ddp.Training):
    """Each worker holds a part of each parameter, of its gradient and of its momentum."""

    def spread(self, model: ddp.Model) -> nn.Module:
        """Layer by layer: a layer's parameters are gathered when it computes."""
        for layer in model.layers:
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
        fully_shard(model)
        return model

    def whole(self, parameter: nn.Parameter) -> torch.Tensor:
        """Gathered from all workers."""
        found: torch.Tensor = parameter.detach().full_tensor()
        return found

    def describe(self) -> tuple[str, str]:
        """The function that shards, and the framework's version."""
        return "torch.distributed.fsdp.fully_shard", f"PyTorch {torch.__version__}"


if __name__ == "__main__":
    serve(lambda told: calls(Training(told)))
