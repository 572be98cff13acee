"""Data sets by name, as NumPy arrays: found in a folder, or fetched once from their publishers."""

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
from labkit.datasets.dataset import Dataset, DatasetSpec, Shapes
from labkit.datasets.values import check_task, check_values, shapes_of, to_array

__all__ = [
    "DATASETS",
    "Dataset",
    "DatasetSpec",
    "Shapes",
    "available",
    "check",
    "check_task",
    "check_values",
    "count",
    "ensure",
    "label",
    "load",
    "locate",
    "recorded",
    "shapes_of",
    "to_array",
]
