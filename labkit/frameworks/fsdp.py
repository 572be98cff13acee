"""A process in which PyTorch's fully_shard trains a model exported by labkit."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from labkit.frameworks import ddp
from labkit.frameworks.child import serve
from labkit.frameworks.exported import calls


class Training(ddp.Training):
    """The training of a worker that stores one shard of all parameters, gradients and momenta."""

    def distribute(self, model: ddp.TorchModel) -> nn.Module:
        """Shard each layer, so that parameters are gathered only while their layer computes."""
        for layer in model.layers:
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
        fully_shard(model)
        return model

    def full_tensor(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the complete tensor of a parameter, gathered from all workers."""
        tensor: torch.Tensor = parameter.detach().full_tensor()
        return tensor

    def describe(self) -> tuple[str, str]:
        """Return the name of the sharding function, and the version of the framework."""
        return "torch.distributed.fsdp.fully_shard", f"PyTorch {torch.__version__}"


if __name__ == "__main__":
    serve(lambda exported: calls(Training(exported)))
