"""A process in which PyTorch trains a model exported by labkit, with DDP or with fully_shard.

The PyTorch benchmark also uses functions of this module. The functions start the benchmark's
process group and distribute its model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from os import environ
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from labkit.frameworks.child import serve
from labkit.frameworks.exported import Batches, Exported, Layer, calls

# The constant TIMEOUT is the maximum time until all workers have joined.
TIMEOUT = timedelta(minutes=5)
LOSSES = {"SparseCategoricalCrossentropy": nn.CrossEntropyLoss, "MeanSquaredError": nn.MSELoss}
ACTIVATIONS = {
    "linear": nn.Identity,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "softplus": nn.Softplus,
}


def join_group(rank: int, size: int, timeout: timedelta, **rendezvous: Any) -> None:
    """Join the gloo process group of all processes, which communicate over loopback.

    Args:
        rank: Rank of this process.
        size: Number of processes.
        timeout: Maximum time for all processes to join, and for each collective call.
        rendezvous: Argument of `torch.distributed.init_process_group` through which the processes
            find each other: `store` or `init_method`.
    """
    environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=size, timeout=timeout, **rendezvous
    )


def replicated(model: nn.Module) -> nn.Module:
    """Return the model in the wrapper DistributedDataParallel; all processes train it together."""
    return nn.parallel.DistributedDataParallel(model)


def sharded(model: nn.Module, layers: Iterable[nn.Module]) -> nn.Module:
    """Shard each layer, so that parameters are gathered only while their layer computes."""
    for layer in layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    return model


def full_tensor(parameter: nn.Parameter) -> torch.Tensor:
    """Return the complete tensor of a parameter; a shard is gathered from all processes."""
    own = parameter.detach()
    tensor: torch.Tensor = own.full_tensor() if isinstance(own, DTensor) else own
    return tensor


class Training:
    """A worker's training state: model, optimizer, batches, and the workers' process group."""

    def __init__(self, exported: Exported) -> None:
        self._exported, self._batches = exported, Batches(exported)
        self._dtype = getattr(torch, exported.dtype)
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
        self._model = TorchModel(exported.layers, self._batches.weights).to(self._dtype)
        for parameter, array in zip(self._model.parameters(), self._batches.weights, strict=True):
            parameter.data.copy_(torch.from_numpy(to_torch(array)))
        self._loss = LOSSES[exported.loss]()

    def open(self) -> int:
        """Create the TCP store on rank 0, through which all workers join, and return its port."""
        self._store = torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        return int(self._store.port)

    def join(self, port: int) -> None:
        """Join the process group of all workers; all start with the weights of rank 0.

        The argument `port` is the port that `open` returned on rank 0.
        """
        rank, size = self._exported.rank, self._exported.size
        if rank > 0:
            self._store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
        join_group(rank, size, TIMEOUT, store=self._store)
        self._distributed = self.distribute(self._model)
        options = self._exported.optimizer
        # The distributed model may have new parameter objects, so the optimizer is created from the
        # distributed model.
        self._optimizer = torch.optim.SGD(
            self._distributed.parameters(),
            options["learning_rate"],
            momentum=options["momentum"],
            nesterov=bool(options["nesterov"]),
        )

    def distribute(self, model: TorchModel) -> nn.Module:
        """Return the model wrapped for distributed training, in which all workers take part."""
        return replicated(model)

    def step(self) -> float:
        """Train on the next batch, and return the mean loss of this worker's samples."""
        x, y, factor = self._batches.next()
        self._optimizer.zero_grad()
        scores = self._distributed(torch.from_numpy(x).to(self._dtype))
        classes = self._exported.loss == "SparseCategoricalCrossentropy"
        targets = torch.from_numpy(y).to(torch.long if classes else self._dtype)
        loss = self._loss(scores, targets if classes else targets.reshape(scores.shape))
        (loss * factor).backward()
        self._optimizer.step()
        return float(loss)

    def weights(self) -> list[np.ndarray]:
        """Return the trained weights in Keras's layout."""
        return [to_keras(full_tensor(each).numpy()) for each in self._distributed.parameters()]

    def describe(self) -> tuple[str, str]:
        """Return the name of the training class, and the version of the framework."""
        kind = nn.parallel.DistributedDataParallel
        return f"{kind.__module__}.{kind.__qualname__}", f"PyTorch {torch.__version__}"


class ShardedTraining(Training):
    """The training of a worker that stores one shard of all parameters, gradients and momenta."""

    def distribute(self, model: TorchModel) -> nn.Module:
        """Return the model with sharded layers, which all workers train together."""
        return sharded(model, model.layers)

    def describe(self) -> tuple[str, str]:
        """Return the name of the sharding function, and the version of the framework."""
        return "torch.distributed.fsdp.fully_shard", f"PyTorch {torch.__version__}"


TRAININGS = {"ddp": Training, "fsdp": ShardedTraining}


class TorchModel(nn.Module):
    """A PyTorch model of the exported Keras layers; its input and `Flatten` use channels last.

    Between the input and `Flatten`, tensors are channels-first views of the same memory.
    """

    def __init__(self, layers: list[Layer], weights: list[np.ndarray]) -> None:
        super().__init__()
        arrays = iter(weights)
        self.layers = nn.ModuleList(
            module for layer in layers for module in _modules(layer, arrays)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the model's scores (logits) of a batch."""
        first = any(isinstance(layer, nn.Conv2d | nn.MaxPool2d) for layer in self.layers)
        x = x.movedim(-1, 1) if first else x
        for layer in self.layers:
            if first and isinstance(layer, nn.Flatten):
                x = x.movedim(1, -1)
            x = layer(x)
        return x


def _modules(layer: Layer, arrays: Iterator[np.ndarray]) -> Iterator[nn.Module]:
    """Yield the PyTorch modules of a Keras layer; the next weights determine their shapes."""
    kind, options = layer
    settings: dict[str, Any] = dict(options)
    if kind == "Flatten":
        yield nn.Flatten()
    elif kind == "MaxPooling2D":
        yield nn.MaxPool2d(settings["pool_size"], settings["strides"])
    else:
        *window, inputs, outputs = next(arrays).shape
        bias = settings["use_bias"] and next(arrays) is not None
        if kind == "Dense":
            yield nn.Linear(inputs, outputs, bias)
        else:
            yield nn.Conv2d(inputs, outputs, tuple(window), settings["strides"], bias=bias)
        yield ACTIVATIONS[settings["activation"]]()


def to_torch(array: np.ndarray) -> np.ndarray:
    """Return a Keras weight in PyTorch's layout: (out, in) or (out, in, y, x)."""
    return array.transpose({4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[array.ndim])


def to_keras(array: np.ndarray) -> np.ndarray:
    """Return a PyTorch weight in Keras's layout: (in, out) or (y, x, in, out)."""
    return np.ascontiguousarray(array.transpose({4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}[array.ndim]))


if __name__ == "__main__":
    serve(lambda task: calls(TRAININGS[task[0]](task[1])))
