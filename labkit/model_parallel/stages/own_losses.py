"""What layers of earlier stages add to the loss that the last one knows."""

from __future__ import annotations

from typing import Any

from labkit.communicator import Communicator


class OwnLosses:
    """Adds up what the layers of all stages have added in a step: regularizers and the like.

    Where any stage has such losses it takes a sum over the ranks a step, outside of the traffic:
    those of a lane meet once a step. Where none has, nothing but one question after the first step.

    Args:
        communicator: the ranks of all stages.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._there = False  # on this rank
        self._anywhere: bool | None = None  # not known yet
        self._sum = 0.0

    def take(self, own: Any, weight: float = 1.0) -> None:
        """What the layers of a stage have added in a forward pass; None: they never do."""
        if own is not None:
            self._there = True
            self._sum += float(own) * weight

    def added_to(self, loss: float | None) -> float | None:
        """The loss with those of all layers, where there is one (collective)."""
        if self._anywhere is None:
            everyone = self._communicator.allgather(self._there, "whether layers have losses")
            self._anywhere = any(everyone)
        if not self._anywhere:
            return loss
        total, self._sum = self._communicator.total(self._sum, "the losses of layers"), 0.0
        return None if loss is None else loss + total
