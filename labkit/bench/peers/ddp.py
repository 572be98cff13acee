"""The benchmark of PyTorch's DistributedDataParallel over gloo."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from itertools import pairwise
from os import environ
from typing import Any

import numpy as np

from labkit.bench.peers.meeting import LIMIT, Agreed, Meeting, Task, measure, same
from labkit.bench.steps import MOMENTUM, RATE, ModelCase


def join(meeting: Meeting, task: Task) -> Peer:
    """Start PyTorch with a process group, and return the object that measures its steps."""
    return Peer(meeting, start(meeting, task))


def start(meeting: Meeting, task: Task) -> Any:
    """Return the module torch after the start of a gloo process group over loopback."""
    environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch = import_module("torch")  # torch is an optional package, so it is imported by name
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{task['meeting']}.gloo",
        rank=meeting.rank,
        world_size=meeting.size,
        timeout=timedelta(seconds=LIMIT),
    )
    return torch


class Peer:
    """Measures the training steps of one process of DistributedDataParallel."""

    def __init__(self, meeting: Meeting, torch: Any) -> None:
        self._meeting, self.torch = meeting, torch
        self.version = f"PyTorch {torch.__version__}"

    def measure(self, case: ModelCase, repeats: int) -> Agreed:
        """Measure local steps, steps with exchange and allreduces; compare final weights."""
        torch, distributed = self.torch, self.torch.distributed
        alone, together = self._model(case), self.spread(self._model(case))
        buffer = torch.zeros(case.parameters)
        steps = {
            "local": self._step(case, alone),
            "step": self._step(case, together),
            "raw allreduce": lambda: distributed.all_reduce(buffer),
        }
        found = measure(self._meeting, steps, repeats)
        ones = torch.full((8,), float(self._meeting.rank + 1))
        distributed.all_reduce(ones)
        # An allreduce of known values is verified, because the sum of a step's gradients is
        # unknown.
        right = np.allclose(ones.numpy(), self._meeting.size * (self._meeting.size + 1) / 2)
        weights = [self.full_value(each) for each in together.parameters()]
        checksum = float(sum(each.double().abs().sum() for each in weights))
        return Agreed(**found, same_weights=same(self._meeting, checksum) and bool(right))

    def spread(self, model: Any) -> Any:
        """Return the model wrapped in DistributedDataParallel."""
        return self.torch.nn.parallel.DistributedDataParallel(model)

    def full_value(self, parameter: Any) -> Any:
        """Return all values of a parameter; every process has a complete copy."""
        return parameter.detach()

    def leave(self) -> None:
        """End PyTorch's process group."""
        self.torch.distributed.destroy_process_group()

    def _step(self, case: ModelCase, model: Any) -> Callable[[], float]:
        torch = self.torch
        x, y = (torch.from_numpy(array) for array in case.data(self._meeting.rank))
        optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)
        loss = torch.nn.CrossEntropyLoss()

        def step() -> float:
            optimizer.zero_grad()
            value = loss(model(x), y)
            value.backward()
            optimizer.step()
            return float(value)

        return step

    def _model(self, case: ModelCase) -> Any:
        """Return the case's model; weights are in PyTorch's order: (out, in) or (out, in, y, x)."""
        torch = self.torch
        layers = self._perceptron(case) if case.widths else self._convolutions()
        model = torch.nn.Sequential(*layers)
        with torch.no_grad():
            for parameter, array in zip(model.parameters(), case.arrays(), strict=True):
                # Weights of convolutions have four dimensions, weights of dense layers two, and
                # biases one.
                order = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[array.ndim]
                parameter.copy_(torch.from_numpy(array.transpose(order)))
        return model

    def _perceptron(self, case: ModelCase) -> list[Any]:
        nn = self.torch.nn
        layers: list[Any] = []
        for inputs, outputs in pairwise((784, *case.widths)):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return [*layers, nn.Linear(case.widths[-1], 10)]

    def _convolutions(self) -> list[Any]:
        nn = self.torch.nn
        return [
            nn.Unflatten(1, (1, 28, 28)),
            *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10)),
        ]
