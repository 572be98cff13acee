"""The benchmark of PyTorch over gloo: with DistributedDataParallel, or fully_shard (FSDP2).

PyTorch is imported inside functions, because it is an optional package. `labkit.frameworks.torch`
starts the process group and distributes the model, as in training with `ExternalFramework`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from labkit.bench.peers.rank import LIMIT, Agreed, Meeting, Task, agreed, measure
from labkit.bench.steps import MOMENTUM, RATE, ModelCase, checksum

if TYPE_CHECKING:
    from torch import nn


class TorchPeer:
    """Measures the training steps of one process of DistributedDataParallel or fully_shard."""

    def __init__(self, meeting: Meeting, task: Task) -> None:
        import torch

        from labkit.frameworks.torch import join_group

        torch.set_num_threads(1)
        meets_at = f"file://{task['meeting']}.gloo"
        join_group(meeting.rank, meeting.size, timedelta(seconds=LIMIT), init_method=meets_at)
        self._meeting, self._peer = meeting, task["peer"]
        self.version = f"PyTorch {torch.__version__}"

    def measure(self, case: ModelCase, repeats: int) -> Agreed:
        """Measure local steps, steps with exchange and allreduces; compare final weights."""
        import torch

        from labkit.frameworks.torch import full_tensor

        alone, together = _model(case), self._spread(_model(case))
        buffer = torch.zeros(case.parameters)
        steps = {
            "local": self._step(case, alone),
            "step": self._step(case, together),
            "raw allreduce": lambda: torch.distributed.all_reduce(buffer),
        }
        found = measure(self._meeting, steps, repeats)
        ones = torch.full((8,), float(self._meeting.rank + 1))
        torch.distributed.all_reduce(ones)
        weights = [full_tensor(each).numpy() for each in together.parameters()]
        return agreed(self._meeting, found, ones.numpy(), checksum(weights))

    def leave(self) -> None:
        """End PyTorch's process group."""
        import torch

        torch.distributed.destroy_process_group()

    def _spread(self, model: nn.Sequential) -> nn.Module:
        from labkit.frameworks.torch import replicated, sharded

        return replicated(model) if self._peer == "ddp" else sharded(model, model)

    def _step(self, case: ModelCase, model: nn.Module) -> Callable[[], float]:
        import torch

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


PEERS = {"ddp": TorchPeer, "fsdp": TorchPeer}


def _model(case: ModelCase) -> nn.Sequential:
    """Return the case's model with its initial weights, in PyTorch's layout."""
    import torch

    from labkit.frameworks.torch import to_torch

    model = torch.nn.Sequential(*(_perceptron(case) if case.widths else _convolutions()))
    with torch.no_grad():
        for parameter, array in zip(model.parameters(), case.arrays(), strict=True):
            parameter.copy_(torch.from_numpy(to_torch(array)))
    return model


def _perceptron(case: ModelCase) -> list[nn.Module]:
    from torch import nn

    layers: list[Any] = []
    for inputs, outputs in pairwise((784, *case.widths)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return [*layers, nn.Linear(case.widths[-1], 10)]


def _convolutions() -> list[nn.Module]:
    from torch import nn

    return [
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10)),
    ]
