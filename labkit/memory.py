"""What a rank keeps in memory: tensors by kind, and the most that its process took."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

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


def describe(model: Any) -> dict[str, int]:
    """Bytes of a trained model's weights, of its gradients and optimizer, and the process's peak.

    Gradients have the dtype of the weights. Under a mixed policy weights stay float32 and are
    cast where they are used, so that policies differ in activations, which the peak tells of.
    """
    return {
        "weights": _nbytes(model.variables),
        "gradients": _nbytes(model.trainable_variables),
        "optimizer": _nbytes(model.optimizer.variables),
        "peak": peak(),
    }


def _nbytes(variables: Any) -> int:
    return sum(int(variable.value.numpy().nbytes) for variable in variables)
