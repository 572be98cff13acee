"""Models with names; a notebook checks their options without importing TensorFlow."""

from __future__ import annotations

from labkit.models.named_models import (
    MODELS,
    ModelSpec,
    blocks,
    build,
    check,
    check_recurrent,
    grid_layers,
    max_slices,
    task_loss,
    task_metrics,
)

__all__ = [
    "MODELS",
    "ModelSpec",
    "blocks",
    "build",
    "check",
    "check_recurrent",
    "grid_layers",
    "max_slices",
    "task_loss",
    "task_metrics",
]
