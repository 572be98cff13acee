"""What a rank holds of a training in variables, in terms of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import keras
import numpy as np

from labkit.records.pieces import Corner, Piece
from labkit.strategies import TrainingState


class LocalVariable(NamedTuple):
    """A variable, the tensor that it is a box of, and whether other ranks may hold another."""

    name: str
    variable: keras.Variable
    whole: tuple[int, ...]
    corner: Corner
    own: bool

    def piece(self) -> Piece:
        """A copy of it."""
        return Piece(self.name, np.array(self.variable.numpy()), self.whole, self.corner, self.own)


def held(kept: TrainingState) -> list[LocalVariable]:
    """Weights, and what optimizers know of them, which are built for it."""
    build(kept)
    return [*_weights(kept), *_slots(kept)]


def build(kept: TrainingState) -> None:
    """Make what optimizers know: in a first step that is broken off it would be without values."""
    for optimizer, variables in kept.optimizers:
        if variables and not optimizer.built:
            optimizer.build(list(variables))


def _weights(kept: TrainingState) -> Iterator[LocalVariable]:
    pairs = {id(pair.own): pair for pair in kept.pairs}
    for variable in kept.variables:
        pair = pairs.get(id(variable))
        whole = variable if pair is None else pair.whole
        shape = tuple(whole.shape)
        corner = (0,) * len(shape) if pair is None else pair.corner
        own = not variable.trainable
        yield LocalVariable(f"weights/{whole.path}", variable, shape, corner, own)


def _slots(kept: TrainingState) -> Iterator[LocalVariable]:
    """Those of each variable by its name in the whole model."""
    of = {weight.variable.path: weight for weight in _weights(kept)}
    seen: dict[str, int] = {}
    for optimizer, variables in kept.optimizers:
        if not variables:  # another one applies; callbacks look at this one's rate
            if isinstance(optimizer._learning_rate, keras.Variable):
                yield LocalVariable("rate/learning_rate", optimizer._learning_rate, (), (), False)
            continue
        flat = {v.path.replace("/", "_"): of[v.path] for v in variables}
        for slot in optimizer.variables:
            fit = [path for path in flat if slot.name.startswith(f"{path}_")]
            if not fit:
                name = f"optimizer/{slot.name}"
                seen[name] = number = seen.get(name, 0) + 1
                shape = tuple(slot.shape)
                place = shape, (0,) * len(shape)
                yield LocalVariable(
                    name if number == 1 else f"{name}#{number}", slot, *place, False
                )
                continue
            path = max(fit, key=len)
            held, kind = flat[path], slot.name[len(path) + 1 :]
            name, shape = held.name.replace("weights", "slots", 1), tuple(slot.shape)
            own = kind == "gradient_accumulator"
            if shape == tuple(held.variable.shape):
                yield LocalVariable(f"{name}/{kind}", slot, held.whole, held.corner, own)
            else:  # of rows or columns, which nobody can cut otherwise
                cut = held.whole != tuple(held.variable.shape)
                yield LocalVariable(f"{name}/{kind}", slot, shape, (0,) * len(shape), own or cut)
