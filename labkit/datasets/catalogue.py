"""The data sets by name, and how one is checked, found and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.options import lookup, parse
from labkit.datasets import own
from labkit.datasets.adult import ADULT
from labkit.datasets.dataset import Array, Dataset, DatasetSpec, Rows, Shapes, labels
from labkit.datasets.files import fetch, find, how_to_get
from labkit.datasets.images import CIFAR10, DIGITS, FASHION_MNIST, MNIST
from labkit.datasets.shakespeare import SHAKESPEARE
from labkit.datasets.synthetic import SYNTHETIC

# A data set more is a file with its reader and its facts, and its line here.
DATASETS: dict[str, DatasetSpec] = {
    "digits": DIGITS,
    "mnist": MNIST,
    "fashion_mnist": FASHION_MNIST,
    "cifar10": CIFAR10,
    "adult": ADULT,
    "shakespeare": SHAKESPEARE,
    "synthetic": SYNTHETIC,
}


def check(name: str, options: Mapping[str, object]) -> Shapes:
    """Return what a model for this data set must fit, without reading a file.

    Raises InvalidInput for an unknown data set, an unknown option or an impossible value.
    """
    spec, parsed = _checked(name, options)
    return spec.shapes(parsed)


def count(name: str, options: Mapping[str, object]) -> int:
    """Return the number of training rows that `load` would give, without reading a file.

    Raises InvalidInput as `check` does.
    """
    spec, parsed = _checked(name, options)
    rows = spec.count(parsed)
    return rows if parsed.rows is None else min(rows, parsed.rows)


def locate(name: str) -> tuple[Path, ...]:
    """Return the data set's files: in `LABKIT_DATA`, else in `data/`, else downloaded there.

    Raises LabkitError for a wrong checksum, or when a file is missing and there is no network.
    """
    return tuple(find(file) or fetch(file) for file in _spec(name).files)


def available(name: str) -> str | None:
    """Return None when the data set's files are here and whole, else why not; downloads nothing."""
    files = _spec(name).files
    try:
        missing = [file for file in files if find(file) is None]
    except LabkitError as error:
        return str(error)
    return "; ".join(map(how_to_get, missing)) or None


def ensure(name: str) -> None:
    """Fetch what is missing of a data set: once, before ranks start that would all fetch it."""
    if name.startswith(own.HUB):
        check(name, {})  # `datasets` keeps what it has fetched
    locate(name)


def recorded(name: str, options: Mapping[str, Any]) -> dict[str, JSON]:
    """What a record says of a data set: of one's own no folder, and the checksum of its rows."""
    if name in DATASETS or not own.is_own(name):
        return {"dataset": name, "dataset_options": dict(options)}
    kept = dict(options) | {"sha256": own.checksum(name, dict(options))}
    return {"dataset": label(name), "dataset_options": kept}


def label(name: str) -> str:
    """A data set's name without a folder of this machine."""
    return Path(name).name if Path(name).is_absolute() else name


def load(name: str, **options: Any) -> Dataset:
    """Read a data set: the same call gives the same arrays, on every rank.

    `rows` and `test_rows` keep the first rows. Raises InvalidInput for impossible options,
    LabkitError when files are missing or not the published ones.
    """
    spec, parsed = _checked(name, options)
    shapes = spec.shapes(parsed)
    found = spec.read(parsed, locate(name))
    return Dataset(
        name=name,
        x_train=_features(_first(found.x_train, parsed.rows, name, "rows"), spec, shapes),
        y_train=labels(found.y_train[: parsed.rows], shapes.task),
        x_test=_features(_first(found.x_test, parsed.test_rows, name, "test_rows"), spec, shapes),
        y_test=labels(found.y_test[: parsed.test_rows], shapes.task),
        task=shapes.task,
        outputs=shapes.outputs,
    )


def _spec(name: str) -> DatasetSpec:
    if name not in DATASETS and own.is_own(name):
        return own.spec(name)
    return lookup(DATASETS, name, "data set")


def _checked(name: str, options: Mapping[str, object]) -> tuple[DatasetSpec, Rows]:
    spec = _spec(name)
    return spec, parse(spec.options, f"data set {name!r}", options)


def _first(array: Array, rows: int | None, name: str, option: str) -> Array:
    if rows is not None and rows > len(array):
        raise InvalidInput(
            f"data set {name!r}: {option}={rows} is impossible; allowed: 1 to {len(array)}"
        )
    return array[:rows]


def _features(x: Array, spec: DatasetSpec, shapes: Shapes) -> Array:
    """Scale after the cut: a few rows of a large set then cost no memory."""
    if shapes.task == "next_character":
        return np.asarray(x, np.int32)
    return np.asarray(x, np.float32) / np.float32(spec.scale)
