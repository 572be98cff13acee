"""Memory of a rank: the bytes of each kind of tensor, and the peak memory of its process."""

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

# The type `Bytes` maps a kind of tensor to its bytes. If the number of bytes is unknown, the value
# is None.
Bytes: TypeAlias = dict[str, int | None]

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Memory:
    """The bytes that a rank stores during training, one entry per kind of tensor.

    Attributes:
        stages: Numbers of the pipeline stages on this rank; [0] for a model without stages.
        whole: Bytes of all weights of the whole model, which every rank stores before and after
            training.
        measured: Dict from kind of tensor to bytes, measured on real tensors.
        predicted: Dict from kind of tensor to bytes, predicted from tensor shapes and the pipeline
            schedule.
    """

    stages: list[int]
    whole: int
    measured: Bytes
    predicted: Bytes

    def trained(self) -> dict[str, int]:
        """Return a dict with the bytes of this rank's weights, gradients and optimizer state."""
        gradients = self.measured["gradients"] or self.predicted["gradients"]
        values = self.measured | {"gradients": gradients}
        return {kind: values[kind] or 0 for kind in ("weights", "gradients", "optimizer")}


def reset_peak() -> None:
    """Reset the peak memory of this process (Linux only; elsewhere the peak is never reset)."""
    with suppress(OSError):  # /proc is missing on macOS, and read-only in some containers
        _CLEAR.write_text("5")


def peak() -> int:
    """Return the peak memory of this process, in bytes."""
    if _STATUS.exists():
        lines = _STATUS.read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return maximum if sys.platform == "darwin" else 1024 * maximum


def by_kind(
    model: keras.Model,
    part: keras.Model,
    used: keras.optimizers.Optimizer,
    plain: keras.optimizers.Optimizer,
    rows: int,
    look: bool,
    bytes_per_row: int | None = None,
) -> Memory:
    """Return the memory of a rank that trains a whole model, or a slice of each layer.

    Measured values come from variables of the model and the optimizer, and from activations. Each
    trained variable also counts one gradient. The activations are measured in a separate forward
    pass (`stages.kept_bytes`). Gradients occupy memory only until they are applied. Predicted
    values are computed from tensor shapes (`stages.footprint`).

    Args:
        model: The whole Keras model.
        part: The model part that this rank trains: the whole model, or a slice of each layer.
        used: The optimizer that trains `part`, with its current state.
        plain: A new optimizer with the same settings, from which the size of the optimizer state is
            predicted.
        rows: Batch rows of this rank per training step, or 0 if unknown. Without the number of
            rows, the bytes of activations are None.
        look: Whether to measure activations in a separate traced pass. Without a separate pass, the
            measured bytes of activations are None.
        bytes_per_row: Predicted bytes of activations per row; if None,
            `labkit.model_parallel.stages.footprint.activations` predicts them.
    """
    from labkit.model_parallel.stages import footprint, kept_bytes

    predictable = rows > 0 and _takes_one_tensor(part)
    weights = footprint.weights([part])
    return Memory(
        stages=[0],
        whole=nbytes(model.variables),
        measured={
            "weights": nbytes(part.variables),
            "gradients": nbytes(part.trainable_variables),
            "optimizer": nbytes(used.variables),
            "activations": kept_bytes(part, rows) if predictable and look else None,
            "versions": 0,
        },
        predicted={
            **weights,
            "optimizer": footprint.optimizer(plain, weights["gradients"]),
            "activations": rows * (bytes_per_row or footprint.activations(part))
            if predictable
            else None,
            "versions": 0,
        },
    )


def _takes_one_tensor(model: keras.Model) -> bool:
    """Return whether a model has one numeric input, with a shape known except for the row count."""
    # The attribute `_functional` of a `keras.Sequential` model is None before the model is built.
    graph = getattr(model, "_functional", model)
    inputs = getattr(graph, "inputs", None) or []
    nested = isinstance(getattr(graph, "_inputs_struct", None), dict | list | tuple)
    if len(inputs) != 1 or nested:
        return False
    return None not in inputs[0].shape[1:] and inputs[0].dtype != "string"


def nbytes(variables: Iterable[keras.Variable]) -> int:
    """Return the total bytes of Keras variables."""
    return sum(int(variable.value.numpy().nbytes) for variable in variables)


def unique_nbytes(*variables: Iterable[keras.Variable]) -> int:
    """Return the total bytes of Keras variables, counting each distinct variable once."""
    return nbytes({id(variable): variable for group in variables for variable in group}.values())
