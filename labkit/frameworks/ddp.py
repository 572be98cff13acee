"""A process in which PyTorch's DistributedDataParallel trains what labkit has exported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from os import environ
from typing import Any

import numpy as np
import torch
from torch import nn

from labkit.frameworks.child import serve
from labkit.frameworks.exported import Batches, Exported, Layer, calls

LIMIT = timedelta(minutes=5)  # for the others to join
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


class Training:
    """A model, an optimizer, this worker's batches, and the group of all workers."""

    def __init__(self, told: Exported) -> None:
        self._told, self._batches = told, Batches(told)
        self._dtype = getattr(torch, told.dtype)
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
        self._model = Model(told.layers, self._batches.weights).to(self._dtype)
        for parameter, array in zip(self._model.parameters(), self._batches.weights, strict=True):
            parameter.data.copy_(torch.from_numpy(turned(array)))
        self._loss = LOSSES[told.loss]()

    def open(self) -> int:
        """The port at which all workers meet; asked of the first one."""
        self._store = torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        return int(self._store.port)

    def join(self, port: int) -> None:
        """Meet the others, who start with the weights of the first one."""
        environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        rank, size = self._told.rank, self._told.size
        if rank > 0:
            self._store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
        torch.distributed.init_process_group(
            "gloo", store=self._store, rank=rank, world_size=size, timeout=LIMIT
        )
        self._together = self.spread(self._model)
        options = self._told.optimizer
        # Of what is spread: its parameters may be other ones.
        self._optimizer = torch.optim.SGD(
            self._together.parameters(),
            options["learning_rate"],
            momentum=options["momentum"],
            nesterov=bool(options["nesterov"]),
        )

    def spread(self, model: Model) -> nn.Module:
        """The model as all workers train it together."""
        return nn.parallel.DistributedDataParallel(model)

    def whole(self, parameter: nn.Parameter) -> torch.Tensor:
        """All of a parameter's values."""
        return parameter.detach()

    def step(self) -> float:
        """Train on the next batch; the mean loss of this worker's rows."""
        x, y, factor = self._batches.next()
        self._optimizer.zero_grad()
        scores = self._together(torch.from_numpy(x).to(self._dtype))
        classes = self._told.loss == "SparseCategoricalCrossentropy"
        wanted = torch.from_numpy(y).to(torch.long if classes else self._dtype)
        loss = self._loss(scores, wanted if classes else wanted.reshape(scores.shape))
        (loss * factor).backward()
        self._optimizer.step()
        return float(loss)

    def weights(self) -> list[np.ndarray]:
        """As Keras has them."""
        parameters = [self.whole(parameter).numpy() for parameter in self._together.parameters()]
        return [turned_back(array) for array in parameters]

    def describe(self) -> tuple[str, str]:
        """The class that trains, and the framework's version."""
        kind = nn.parallel.DistributedDataParallel
        return f"{kind.__module__}.{kind.__qualname__}", f"PyTorch {torch.__version__}"


class Model(nn.Module):
    """Layers as Keras computes them: images come in with channels last, and are flattened so.

    Between, they are views with channels first, whose memory stays as it was.
    """

    def __init__(self, layers: list[Layer], weights: list[np.ndarray]) -> None:
        super().__init__()
        arrays = iter(weights)
        self.layers = nn.ModuleList(
            module for layer in layers for module in _modules(layer, arrays)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of a batch."""
        first = any(isinstance(layer, nn.Conv2d | nn.MaxPool2d) for layer in self.layers)
        x = x.movedim(-1, 1) if first else x
        for layer in self.layers:
            if first and isinstance(layer, nn.Flatten):
                x = x.movedim(1, -1)
            x = layer(x)
        return x


def _modules(layer: Layer, arrays: Iterator[np.ndarray]) -> Iterator[nn.Module]:
    """What a layer of Keras's is in PyTorch; it takes the shapes of its weights."""
    kind, options = layer
    given: dict[str, Any] = dict(options)
    if kind == "Flatten":
        yield nn.Flatten()
    elif kind == "MaxPooling2D":
        yield nn.MaxPool2d(given["pool_size"], given["strides"])
    else:
        *window, inputs, outputs = next(arrays).shape
        bias = given["use_bias"] and next(arrays) is not None
        if kind == "Dense":
            yield nn.Linear(inputs, outputs, bias)
        else:
            yield nn.Conv2d(inputs, outputs, tuple(window), given["strides"], bias=bias)
        yield ACTIVATIONS[given["activation"]]()


def turned(array: np.ndarray) -> np.ndarray:
    """A weight of Keras's as PyTorch has it: (out, in), (out, in, y, x)."""
    return array.transpose({4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[array.ndim])


def turned_back(array: np.ndarray) -> np.ndarray:
    """The other way: (in, out), (y, x, in, out)."""
    return np.ascontiguousarray(array.transpose({4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}[array.ndim]))


if __name__ == "__main__":
    serve(lambda told: calls(Training(told)))
