"""The variables that a rank trains, and where they lie in the tensors of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import keras
import numpy as np

from labkit.records.tensor_boxes import Corner, TensorBox
from labkit.strategies import TrainingState


class LocalVariable(NamedTuple):
    """A variable, its offset in the whole tensor, and whether its values differ between ranks."""

    name: str
    variable: keras.Variable
    whole: tuple[int, ...]
    corner: Corner
    is_local: bool

    def piece(self) -> TensorBox:
        """Return a copy of the values with their position in the whole tensor, for a checkpoint."""
        return TensorBox(
            self.name, np.array(self.variable.numpy()), self.whole, self.corner, self.is_local
        )


def local_variables(state: TrainingState) -> list[LocalVariable]:
    """Build this rank's optimizers if necessary; return its weights and its optimizer variables."""
    build(state)
    return [*_weights(state), *_slots(state)]


def build(state: TrainingState) -> None:
    """Build the optimizers, so that their slots exist even if the first training step fails."""
    for optimizer, variables in state.optimizers:
        if variables and not optimizer.built:
            optimizer.build(list(variables))


def _weights(state: TrainingState) -> Iterator[LocalVariable]:
    pairs = {id(pair.local): pair for pair in state.pairs}
    for variable in state.variables:
        pair = pairs.get(id(variable))
        whole = variable if pair is None else pair.whole
        shape = tuple(whole.shape)
        corner = (0,) * len(shape) if pair is None else pair.corner
        is_local = not variable.trainable
        yield LocalVariable(f"weights/{whole.path}", variable, shape, corner, is_local)


def _slots(state: TrainingState) -> Iterator[LocalVariable]:
    """Yield the variables of the rank's optimizers."""
    weights = {weight.variable.path: weight for weight in _weights(state)}
    counts: dict[str, int] = {}
    for optimizer, variables in state.optimizers:
        # Callbacks read the learning rate of an optimizer that trains no variables.
        if not variables:
            if isinstance(optimizer._learning_rate, keras.Variable):
                yield LocalVariable("rate/learning_rate", optimizer._learning_rate, (), (), False)
            continue
        flat = {v.path.replace("/", "_"): weights[v.path] for v in variables}
        for slot in optimizer.variables:
            matches = [path for path in flat if slot.name.startswith(f"{path}_")]
            if not matches:
                name = f"optimizer/{slot.name}"
                counts[name] = number = counts.get(name, 0) + 1
                shape = tuple(slot.shape)
                place = shape, (0,) * len(shape)
                yield LocalVariable(
                    name if number == 1 else f"{name}#{number}", slot, *place, False
                )
                continue
            path = max(matches, key=len)
            weight, kind = flat[path], slot.name[len(path) + 1 :]
            name, shape = weight.name.replace("weights", "slots", 1), tuple(slot.shape)
            is_local = kind == "gradient_accumulator"
            if shape == tuple(weight.variable.shape):
                yield LocalVariable(f"{name}/{kind}", slot, weight.whole, weight.corner, is_local)
            else:  # row or column slots, valid only for the same division of the model
                is_divided = weight.whole != tuple(weight.variable.shape)
                yield LocalVariable(
                    f"{name}/{kind}", slot, shape, (0,) * len(shape), is_local or is_divided
                )
