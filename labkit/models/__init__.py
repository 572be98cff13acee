"""Named models: notebooks check their options without TensorFlow; ranks build them uncompiled."""

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
