"""Data sets that users provide: arrays, tables, image folders, and Hugging Face data sets."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from labkit.common.errors import InvalidInput
from labkit.common.imports import optional
from labkit.common.nearest import listed
from labkit.datasets.dataset import (
    FEW_CLASSES,
    MOST_CLASSES,
    Array,
    Arrays,
    DatasetSpec,
    Rows,
    Shapes,
    are_whole,
    validate_values,
)
from labkit.datasets.images import pixels_of, read_pictures, size_of, stack
from labkit.datasets.tabular_files import features_of, read_table

if TYPE_CHECKING:
    import pandas as pd

HUB = "hf:"
FILES = (".npz", ".csv", ".parquet")
# If the user names no label column, labkit looks for a column whose name is in `LABELS`.
LABELS = ("label", "labels", "target", "class", "y")


class OwnOptions(Rows):
    """Options of a user's own data set."""

    label: str | None = Field(
        None,
        description="name of the label column; default: the column named label, or the last column",
    )
    task: Literal["classification", "regression"] | None = Field(
        None, description='"classification" or "regression"; default: the labels decide'
    )
    test: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="share of the rows that is held out for tests if the data have no test rows, "
        "between 0 and 1",
    )
    size: int | None = Field(
        None, ge=1, description="width and height to which images are scaled, in pixels, 1 or more"
    )
    sha256: str | None = Field(
        None, description="expected SHA-256 checksum of the data, from the record of an earlier run"
    )


def is_user_dataset(name: str) -> bool:
    """Return whether a name is the path or the address of a user's own data set."""
    if name.startswith(HUB) or "/" in name or name.endswith(FILES):
        return True
    return bool(name) and "\0" not in name and Path(name).is_dir()


def spec(name: str) -> DatasetSpec:
    """Return the specification of a user's own data set, without reading any file."""
    return DatasetSpec(
        read=lambda options, paths: arrays(name, options),
        shapes=lambda options: _shapes(arrays(name, options), options),
        count=lambda options: len(arrays(name, options).x_train),
        options=OwnOptions,
    )


def arrays(name: str, options: OwnOptions) -> Arrays:
    """Return all rows of a user's data set; cache the two data sets that were read last.

    Raises:
        InvalidInput: The data set cannot be read, or its checksum differs from the option `sha256`.
    """
    read_options = options.model_copy(update={"rows": None, "test_rows": None, "sha256": None})
    arrays_read, checksum = _read(name, read_options, _stamp(name))
    if options.sha256 not in (None, checksum):
        raise InvalidInput(
            f"the data of {name} have changed: their checksum is {checksum}, not {options.sha256}"
        )
    return arrays_read


def checksum(name: str, options: dict[str, Any]) -> str:
    """Return the first 16 hexadecimal digits of the sha256 of a user's data set."""
    read_options = OwnOptions.model_validate(
        options | {"rows": None, "test_rows": None, "sha256": None}
    )
    return _read(name, read_options, _stamp(name))[1]


def _stamp(name: str) -> tuple[int, int]:
    """Return a data set's modification time and size; if either changes, labkit reads it again.

    For a folder, the function returns the latest modification time of all files. The returned size
    is the total size of all files below the folder. All files are inspected, because a new image
    changes only the modification time of its direct parent folder.
    """
    if name.startswith(HUB):
        return 0, 0
    try:
        stats = [path.stat() for path in (Path(name), *Path(name).rglob("*"))]
    except OSError as error:
        raise InvalidInput(
            f"the data set {name} cannot be read: {error.strerror} (every host that runs ranks "
            "needs a copy)"
        ) from error
    return max(status.st_mtime_ns for status in stats), sum(status.st_size for status in stats)


@lru_cache(maxsize=2)
def _read(name: str, options: OwnOptions, stamp: tuple[int, int]) -> tuple[Arrays, str]:
    path = Path(name)
    if name.startswith(HUB) or list(path.glob("dataset_*.json")):
        arrays_read = _read_hugging_face(name, options)
    elif path.is_dir():
        arrays_read = _read_image_folder(path, options)
    elif path.suffix in _READERS:
        arrays_read = _READERS[path.suffix](path, options)
    else:
        raise InvalidInput(
            f"{name} is not a data set: give {', '.join(FILES)}, a folder with one subfolder of "
            "images per class, a folder that Hugging Face's datasets has saved, hf:NAME or "
            "hf:NAME:CONFIGURATION"
        )
    if not len(arrays_read.x_train) or not len(arrays_read.x_test):
        raise InvalidInput(
            f"{name} has {len(arrays_read.x_train)} training and {len(arrays_read.x_test)} test "
            "rows: give at least one training row and one test row"
        )
    digest = hashlib.sha256()
    for array in arrays_read:
        digest.update(
            f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes()
        )
    return arrays_read, digest.hexdigest()[:16]


def _shapes(arrays_read: Arrays, options: OwnOptions) -> Shapes:
    y = arrays_read.y_train
    whole = np.issubdtype(y.dtype, np.integer) and y.ndim == 1
    task = options.task or ("classification" if whole else "regression")
    if task == "regression":
        return Shapes(tuple(arrays_read.x_train.shape[1:]), int(np.prod(y.shape[1:])), task)
    if not whole:
        raise InvalidInput("task=classification requires labels that are whole numbers or texts")
    classes = 1 + int(max(y.max(), arrays_read.y_test.max()))
    return Shapes(tuple(arrays_read.x_train.shape[1:]), classes, task)


def _prepare(
    name: str,
    x: Array,
    y: Array,
    options: OwnOptions,
    x_test: Array | None = None,
    y_test: Array | None = None,
) -> Arrays:
    """Return numeric features and labels; if there are no test arrays, reserve rows for tests."""
    if x_test is None or y_test is None:
        if len(x) != len(y):
            raise InvalidInput(
                f"{name} has {len(x)} rows of x and {len(y)} labels: give one label per row"
            )
        out = held_out(len(x), options.test)
        x, y, x_test, y_test = x[~out], y[~out], x[out], y[out]
    if len(x_test) != len(y_test) or x.shape[1:] != x_test.shape[1:]:
        raise InvalidInput(
            f"{name} has test rows of {x_test.shape[1:]} with {len(y_test)} labels, and training "
            f"rows of {x.shape[1:]}: give {len(x_test)} test labels, and training and test rows "
            "of the same shape"
        )
    if missing := sum(int(_is_missing(labels).sum()) for labels in (y, y_test)):
        raise InvalidInput(
            f"{name} has {missing} rows without a label: fill in the labels, or drop these rows"
        )
    for what, array in (("x", x), ("x", x_test), ("y", y), ("y", y_test)):
        validate_values(f"{what} of {name}", array, texts=True)
    if y.dtype.kind == "f" and y.ndim == 1 and options.task != "regression":
        y, y_test = (_classes_of(name, labels, options) for labels in (y, y_test))
    if options.task == "regression" or y.dtype.kind == "f":
        y, y_test = (_targets(name, labels) for labels in (y, y_test))
    elif y.ndim == 1:
        classes = np.unique(np.concatenate([y, y_test]))
        _check_classes(name, classes, len(y) + len(y_test), options)
        y, y_test = np.searchsorted(classes, y), np.searchsorted(classes, y_test)
    return Arrays(_scale(name, x), y, _scale(name, x_test), y_test)


def _is_missing(y: Array) -> Array:
    """Return a mask of the labels that are None or NaN."""
    import pandas as pd

    missing_labels: Array = pd.isna(y)
    return missing_labels


def _classes_of(name: str, y: Array, options: OwnOptions) -> Array:
    """Convert labels with decimal points to integers if the task is a classification."""
    if options.task == "classification" and bool((y % 1 == 0).all()):
        return y.astype(int)
    if options.task is None and are_whole(y):
        raise InvalidInput(
            f"{name} has few distinct labels, all whole numbers written as decimals, so the task "
            'is unclear: give task="classification" or task="regression"'
        )
    return y


def _targets(name: str, y: Array) -> Array:
    try:
        return y.reshape(len(y), -1).astype(np.float32)
    except ValueError as error:
        raise InvalidInput(f"{name} has labels that are not numbers: {error}") from error


def _check_classes(name: str, classes: Array, rows: int, options: OwnOptions) -> None:
    """Raise an error if labels do not look like classes and the option `task` is not set."""
    if len(classes) == 1:
        raise InvalidInput(
            f"all labels of {name} are of one class, {classes[0]!s}: give at least two classes"
        )
    is_few = len(classes) <= FEW_CLASSES or len(classes) <= min(MOST_CLASSES, rows // 10)
    if options.task is None and not is_few:
        number = (
            "" if classes.dtype.kind in "OUS" else ' if labels are amounts, give task="regression",'
        )
        raise InvalidInput(
            f"{name} has {len(classes):,} distinct labels in {rows:,} rows:{number} if labels "
            'are classes, give task="classification"; if another column contains the labels, '
            "give label="
        )


def held_out(rows: int, share: float) -> Array:
    """Return a mask of evenly spaced test rows, which include all classes of sorted rows."""
    places = np.arange(rows)
    mask: Array = np.floor((places + 1) * share) > np.floor(places * share)
    return mask


def _scale(name: str, x: Array) -> Array:
    """Convert features to float32; scale only 8-bit pixels, to the range 0 to 1."""
    try:
        return x.astype(np.float32) / np.float32(255 if x.dtype == np.uint8 else 1)
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"{name} has features that are not numbers: {error}") from error


def _read_arrays(path: Path, options: OwnOptions) -> Arrays:
    """Read x and y, or x_train, y_train, x_test and y_test, from an .npz file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            parts = {name: file[name] for name in file.files}
    except (ValueError, OSError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    x, y = ("x_train", "y_train") if "x_train" in parts else ("x", "y")
    if missing := [name for name in (x, y) if name not in parts]:
        raise InvalidInput(f"{path} has no {missing[0]}, only {', '.join(parts) or 'nothing'}")
    rest = (parts.get("x_test"), parts.get("y_test"))
    return _prepare(str(path), parts[x], parts[y], options, *rest)


def _read_table_file(path: Path, options: OwnOptions) -> Arrays:
    table = read_table(path)
    out = held_out(len(table), options.test)
    return _from_frames(str(path), table[~out], table[out], options)


def _from_frames(name: str, train: pd.DataFrame, test: pd.DataFrame, options: OwnOptions) -> Arrays:
    """Convert tables to arrays, using means, deviations and categories of the training rows."""
    label = _label(name, list(train.columns), options)
    columns = train.columns.drop(label)
    if not len(columns) or not len(train):
        has = f"{len(train)} training rows and {len(columns)} columns besides {label!r}"
        raise InvalidInput(f"{name} has {has}: give at least one row and one column of features")
    try:
        pairs = [features_of(name, train[column], test[column]) for column in columns]
        x, x_test = (np.concatenate(parts, axis=1) for parts in zip(*pairs, strict=True))
    except InvalidInput:
        raise
    except (ValueError, TypeError) as error:
        raise InvalidInput(
            f"the rows of {name} contain arrays of different shapes: {error}"
        ) from error
    y, y_test = (part[label].to_numpy() for part in (train, test))
    return _prepare(name, x, y, options, x_test, y_test)


def _label(name: str, columns: list[str], options: OwnOptions) -> str:
    if options.label is not None and options.label not in columns:
        raise InvalidInput(
            f"{name} has no column {options.label!r}{listed(options.label, columns, 'it has')}"
        )
    return options.label or next((name for name in LABELS if name in columns), columns[-1])


def _read_image_folder(path: Path, options: OwnOptions) -> Arrays:
    """Read images from one folder per class; without a test folder, reserve test images."""
    train = path / "train"
    if not train.is_dir():
        images, y = read_pictures(path, options.size)
        return _prepare(str(path), stack(images)[0], y, options)
    test = next((path / n for n in ("test", "validation", "val") if (path / n).is_dir()), None)
    images, y = read_pictures(train, options.size)
    if test is None:
        return _prepare(str(path), stack(images)[0], y, options)
    images_test, y_test = read_pictures(test, None, size_of(images))
    x, x_test = stack(images, images_test)
    return _prepare(str(path), x, y, options, x_test, y_test)


def _read_hugging_face(name: str, options: OwnOptions) -> Arrays:
    """Read a Hugging Face data set from disk, or download it from the hub and cache it."""
    datasets = optional("datasets")
    try:
        # The name of a data set on the Hugging Face hub has the form hf:NAME or
        # hf:NAME:CONFIGURATION.
        if name.startswith(HUB):
            whole = datasets.load_dataset(*name.removeprefix(HUB).split(":", 1))
        else:
            whole = datasets.load_from_disk(name)
    except (OSError, ValueError) as error:  # Errors of the Hugging Face hub are also OSErrors.
        raise InvalidInput(f"{name} cannot be read: {error}") from error
    parts = dict(whole) if isinstance(whole, datasets.DatasetDict) else {"train": whole}
    train = parts.get("train") or next(iter(parts.values()))
    test = next((parts[n] for n in ("test", "validation") if n in parts), None)
    if test is None:
        out = held_out(len(train), options.test)
        train, test = train.select(np.flatnonzero(~out)), train.select(np.flatnonzero(out))
    image = next((n for n, kind in train.features.items() if _is_image(kind)), None)
    if image is None:
        one, other = (part.with_format("pandas")[:] for part in (train, test))
        return _from_frames(name, one, other, options)
    label = _label(name, [n for n in train.column_names if n != image], options)
    first = size_of([np.asarray(train[0][image])])
    size = (options.size, options.size) if options.size else first
    try:
        pixels = [[pixels_of(row[image], size) for row in part] for part in (train, test)]
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{name} contains an image that cannot be read: {error}") from error
    x, x_test = stack(*pixels)
    return _prepare(name, x, np.array(train[label]), options, x_test, np.array(test[label]))


def _is_image(kind: object) -> bool:
    return type(kind).__name__ == "Image"


_READERS: dict[str, Callable[[Path, OwnOptions], Arrays]] = {
    ".npz": _read_arrays,
    ".csv": _read_table_file,
    ".parquet": _read_table_file,
}
