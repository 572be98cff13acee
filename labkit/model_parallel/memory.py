"""What a rank keeps in memory: tensors by kind, and the peak of its process."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import keras

Bytes: TypeAlias = dict[str, int | None]  # by kind; None where nobody knows

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Memory:
    """The bytes that a rank keeps while it trains, by kind (see `stages.footprint.KINDS`).

    Attributes:
        stages: their numbers; of a model that is not cut into stages only 0.
        whole: all weights of the model, which a rank holds before and after training.
        measured: real tensors.
        predicted: what shapes and the schedule say.
    """

    stages: list[int]
    whole: int
    measured: Bytes
    predicted: Bytes

    def trained(self) -> dict[str, int]:
        """Of the weights that this rank trains, their gradients and its optimizer."""
        gradients = self.measured["gradients"] or self.predicted["gradients"]
        kept = self.measured | {"gradients": gradients}
        return {kind: kept[kind] or 0 for kind in ("weights", "gradients", "optimizer")}


def reset_peak() -> None:
    """Let the peak of this process begin here (Linux; elsewhere it began with the process)."""
    with suppress(OSError):  # not there on macOS, read-only in some containers
        _CLEAR.write_text("5")


def peak() -> int:
    """The most memory that this process has taken, bytes."""
    if _STATUS.exists():
        lines = _STATUS.read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def by_kind(
    model: keras.Model,
    part: keras.Model,
    used: keras.optimizers.Optimizer,
    plain: keras.optimizers.Optimizer,
    rows: int,
    look: bool,
    a_row: int | None = None,
) -> Memory:
    """What a rank keeps that trains a model by itself, or some of each layer.

    Measured are real tensors: variables of the model and the optimizer, one gradient a trained
    variable (there while they are applied), and the activations of a pass beside training, see
    `stages.kept_bytes`. Predicted is what `stages.footprint` knows from shapes.

    Args:
        model: the whole one.
        part: what of it this rank trains.
        used: the optimizer.
        plain: an optimizer of the same settings, new.
        rows: of this rank in a step; 0: not known, and so are the activations.
        look: whether to measure activations, which takes the tracing of a pass; else None.
        a_row: bytes of activations that a row is predicted to leave; None: as of
            `labkit.model_parallel.stages.footprint.activations`.
    """
    from labkit.model_parallel.stages import footprint, kept_bytes

    known = rows > 0 and _takes_one_tensor(part)
    own = footprint.weights([part])
    return Memory(
        stages=[0],
        whole=nbytes(model.variables),
        measured={
            "weights": nbytes(part.variables),
            "gradients": nbytes(part.trainable_variables),
            "optimizer": nbytes(used.variables),
            "activations": kept_bytes(part, rows) if known and look else None,
            "versions": 0,
        },
        predicted={
            **own,
            "optimizer": footprint.optimizer(plain, own["gradients"]),
            "activations": rows * (a_row or footprint.activations(part)) if known else None,
            "versions": 0,
        },
    )


def _takes_one_tensor(model: keras.Model) -> bool:
    """Whether its shapes say all: one input of numbers, and of known lengths but for the rows."""
    graph = getattr(model, "_functional", model)  # of a keras.Sequential; None before it is built
    inputs = getattr(graph, "inputs", None) or []
    nested = isinstance(getattr(graph, "_inputs_struct", None), dict | list | tuple)
    if len(inputs) != 1 or nested:
        return False
    return None not in inputs[0].shape[1:] and inputs[0].dtype != "string"


def nbytes(variables: Iterable[keras.Variable]) -> int:
    """Bytes of Keras variables."""
    return sum(int(variable.value.numpy().nbytes) for variable in variables)


def together(*variables: Iterable[keras.Variable]) -> int:
    """Bytes of all of these Keras variables, each once."""
    return nbytes({id(each): each for some in variables for each in some}.values())
