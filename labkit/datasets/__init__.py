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

__all__ = [
    "DATASETS",
    "Dataset",
    "DatasetSpec",
    "Shapes",
    "available",
    "check",
    "count",
    "ensure",
    "label",
    "load",
    "locate",
    "recorded",
]
