"""Models by name: checked in the kernel without TensorFlow, built uncompiled inside a rank."""

from __future__ import annotations

from labkit.models.named_models import (
    MODELS,
    ModelSpec,
    blocks,
    build,
    check,
    check_recurrent,
    planes,
    task_loss,
    task_metrics,
    widest,
)

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
