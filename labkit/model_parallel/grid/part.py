"""One machine's part of a model: its weights beside the whole ones, and its side of the loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.freed import free, is_there, put
from labkit.model_parallel.grid.tiles import Index, Tiles
from labkit.model_parallel.stages.footprint import weights
from labkit.model_parallel.tensor import uncounted
from labkit.schedules.grid import Grid

Record = dict[str, Any]


class Part:
    """What machine `communicator.rank` of a grid has of a model, with the weights of the whole.

    The whole weights are the model's own: `release` frees them while machines train, `collect`
    brings them back.

    Args:
        model, communicator, grid, algorithm: see `Tiles`.

    Attributes:
        model: what computes this machine's part.
        first: whether this is the machine that holds the outputs.
    """

    def __init__(self, model: Any, communicator: Communicator, grid: Grid, algorithm: str) -> None:
        self._whole, self._communicator = model, communicator
        self.model = Tiles(model, communicator, grid, algorithm)
        self.first = communicator.rank == 0
        self._released = False
        for whole, own, index in self.pairs():
            own.assign(whole.numpy()[index])

    def predict(self, x: Any) -> Any:
        """The outputs of the whole model for x on the first machine."""
        return self.model(x)

    def objective(self, x: Any, y: Any, weight: Any) -> Any:
        """The loss of a batch, on the first machine."""
        found = self.model(x)
        if self.first:
            return self._whole._compile_loss(y, found, weight)
        return tf.reduce_sum(found)  # of nothing: its gradient is what the first machine sends

    def uncounted(self) -> AbstractContextManager[None]:
        """What crosses between machines in here is none of their training's."""
        return uncounted([*self.model.halos, *self.model.links])

    def pairs(self) -> Iterator[tuple[Any, Any, Index]]:
        """Each whole weight, what this machine has of it, and where that is in the whole one."""
        for number, (piece, own) in enumerate(zip(self.model.pieces, self.model.own, strict=True)):
            index = self.model.places(number)
            for whole, mine in zip(piece.layer.variables, own.variables, strict=True):
                yield whole, mine, index

    def release(self, look: bool = True) -> None:
        """Free the weights of the whole model, until `collect`; tiles first take what was set.

        Args:
            look: whether some may have been set since they were freed.
        """
        if self._released and not look:
            return
        for whole, own, index in self.pairs():
            if is_there(whole):
                own.assign(whole.value.numpy()[index])
                free(whole)
        self._released = True

    def collect(self) -> None:
        """Bring the weights of the whole model up to date, on all machines of the replica."""
        if self._released:
            self.release()  # what was set since then
        for whole, own, index in self.pairs():
            mine = own.numpy()
            found = self._communicator.allgather((index, mine), "the weights of the grid")
            value = np.empty(whole.shape, mine.dtype)
            for place, part in found:
                value[place] = part
            put(whole, value)
        self._released = False

    def describe(self, steps: int = 1) -> list[Record]:
        """A row a layer: what this machine has of it, bytes that it sends before it, of weights.

        Bytes are those of a step: values forward, gradients back, sums of shared kernels apart.

        Args:
            steps: taken so far.
        """
        tiles = self.model
        halos = [None, *tiles.halos]  # none before the first layer
        rows: list[Record] = []
        for plane, halo in zip(tiles.planes[1:], halos, strict=True):
            row: Record = {"layer": plane.name, "slices": plane.kind, "why": ""}
            for way in ("forward", "backward"):
                row[f"{way}_bytes"] = halo.payload[way] / steps if halo else 0.0
                row[f"{way}_wire_bytes"] = halo.wire[way] / steps if halo else 0.0
            rows.append(row)
        for row, piece, own, link in zip(rows, tiles.pieces, tiles.own, tiles.links, strict=False):
            row["weights_bytes"] = weights([own])["weights"]
            row["whole_weights_bytes"] = weights([piece.layer])["weights"]
            row["kernels_bytes"] = link.payload["backward"] / steps
        rows[-1] |= {"weights_bytes": 0, "whole_weights_bytes": 0, "kernels_bytes": 0.0}
        return rows
