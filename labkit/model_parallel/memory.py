"""What a rank keeps in memory: tensors by kind, and the peak of its process."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

Parts = dict[str, Any]  # stages; whole; measured and predicted, by kind

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


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


def describe(parts: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of the weights that this rank trains, of their gradients and optimizer, and the peak.

    Gradients have the dtype of the weights. Under a mixed policy weights stay float32 and are
    cast where they are used, so that policies differ in activations.

    Args:
        parts: what `by_kind` gives.
    """
    own = parts["measured"]
    gradients = own["gradients"] or parts["predicted"]["gradients"]
    return {
        "weights": own["weights"],
        "gradients": gradients,
        "optimizer": own["optimizer"],
        "peak": peak(),
    }


def by_kind(
    model: Any,
    part: Any,
    used: Any,
    plain: Any,
    rows: int,
    look: bool,
    a_row: int | None = None,
) -> Parts:
    """What a rank keeps that trains a model by itself, or some of each layer.

    Beside what is measured stands what is predicted.

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
    predicted: dict[str, Any] = footprint.weights([part])
    predicted["optimizer"] = footprint.optimizer(plain, predicted["gradients"])
    predicted["activations"] = None
    if known:
        predicted["activations"] = rows * (a_row or footprint.activations(part))
    return {
        "stages": [0],
        "whole": nbytes(model.variables),
        "measured": {
            "weights": nbytes(part.variables),
            "gradients": nbytes(part.trainable_variables),
            "optimizer": nbytes(used.variables),
            "activations": kept_bytes(part, rows) if known and look else None,
            "versions": 0,
        },
        "predicted": predicted | {"versions": 0},
    }


def _takes_one_tensor(model: Any) -> bool:
    """Whether its shapes say all: one input of numbers, and of known lengths but for the rows."""
    graph = getattr(model, "_functional", model)  # of a keras.Sequential; None before it is built
    inputs = getattr(graph, "inputs", None) or []
    nested = isinstance(getattr(graph, "_inputs_struct", None), dict | list | tuple)
    if len(inputs) != 1 or nested:
        return False
    return None not in inputs[0].shape[1:] and inputs[0].dtype != "string"


def nbytes(variables: Any) -> int:
    """Bytes of Keras variables."""
    return sum(int(variable.value.numpy().nbytes) for variable in variables)


def together(*variables: Iterable[Any]) -> int:
    """Bytes of all of these Keras variables, each once."""
    return nbytes({id(each): each for some in variables for each in some}.values())
