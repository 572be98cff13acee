"""Models by name: checked in the kernel without TensorFlow, built uncompiled inside a rank."""

from __future__ import annotations

from labkit.models.catalogue import (
    MODELS,
    ModelSpec,
    build,
    check,
    task_loss,
    task_metrics,
)

__all__ = ["MODELS", "ModelSpec", "build", "check", "task_loss", "task_metrics"]
