"""Named data sets as NumPy arrays, from a local folder or downloaded once from the publisher."""

from __future__ import annotations

from labkit.datasets.catalogue import (
    DATASETS,
    available,
    check,
    count,
    ensure,
    label,
    load,
    locate,
    recorded,
)
from labkit.datasets.dataset import (
    Dataset,
    DatasetSpec,
    Shapes,
    check_task,
    shapes_of,
    to_array,
    validate_values,
)

__all__ = [
    "DATASETS",
    "Dataset",
    "DatasetSpec",
    "Shapes",
    "available",
    "check",
    "check_task",
    "count",
    "ensure",
    "label",
    "load",
    "locate",
    "recorded",
    "shapes_of",
    "to_array",
    "validate_values",
]
