"""Models by name: checked in the kernel without TensorFlow, built uncompiled inside a rank."""

from __future__ import annotations

from labkit.models.catalogue import (
    MODELS,
    ModelSpec,
    blocks,
    build,
    check,
    check_recurrent,
    task_loss,
    task_metrics,
    widest,
)
from labkit.models.planes import planes

__all__ = [
    "MODELS",
    "ModelSpec",
    "blocks",
    "build",
    "check",
    "check_recurrent",
    "planes",
    "task_loss",
    "task_metrics",
    "widest",
]
