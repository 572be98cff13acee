"""Data sets of one's own by path or address: arrays, tables, folders of images, Hugging Face's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from labkit.common.errors import InvalidInput
from labkit.common.nearest import listed
from labkit.common.optional import optional
from labkit.datasets.dataset import Array, Arrays, DatasetSpec, Rows, Shapes
from labkit.datasets.pictures import pixels_of, read_pictures, size_of, stack
from labkit.datasets.table import features_of, read_table
from labkit.datasets.values import FEW_CLASSES, MOST_CLASSES, are_whole, check_values

if TYPE_CHECKING:
    import pandas as pd

HUB = "hf:"
FILES = (".npz", ".csv", ".parquet")
LABELS = ("label", "labels", "target", "class", "y")  # columns, where none is named


class OwnOptions(Rows):
    """Options of a data set of one's own."""

    label: str | None = Field(None, description="the column to learn; default: label, or the last")
    task: Literal["classification", "regression"] | None = Field(
        None, description='"classification" or "regression"; default: by the labels'
    )
    test: float = Field(
        0.2, gt=0, lt=1, description="share held out where no test rows are, between 0 and 1"
    )
    size: int | None = Field(None, ge=1, description="edge of images in pixels, 1 or more")
    sha256: str | None = Field(None, description="the checksum that a record has of the data")


def is_own(name: str) -> bool:
    """Whether a name is a path or an address, and none of the catalogue."""
    if name.startswith(HUB) or "/" in name or name.endswith(FILES):
        return True
    return bool(name) and "\0" not in name and Path(name).is_dir()


def spec(name: str) -> DatasetSpec:
    """How a data set of one's own is read; nothing is read yet."""
    return DatasetSpec(
        read=lambda options, paths: arrays(name, options),
        shapes=lambda options: _shapes(arrays(name, options), options),
        count=lambda options: len(arrays(name, options).x_train),
        options=OwnOptions,
    )


def arrays(name: str, options: OwnOptions) -> Arrays:
    """The rows of a data set, all of them; those that were read last are kept.

    Raises:
        InvalidInput: there is none, or it is none; its checksum is not that of the record.
    """
    asked = options.model_copy(update={"rows": None, "test_rows": None, "sha256": None})
    found, checksum = _read(name, asked, _stamp(name))
    if options.sha256 not in (None, checksum):
        raise InvalidInput(f"{name} has changed: its checksum is {checksum}, not {options.sha256}")
    return found


def checksum(name: str, options: dict[str, Any]) -> str:
    """What tells these data from others of the same name."""
    asked = OwnOptions.model_validate(options | {"rows": None, "test_rows": None, "sha256": None})
    return _read(name, asked, _stamp(name))[1]


def _stamp(name: str) -> tuple[int, int]:
    """When it was last written and how large it is: what changes is read again.

    Of a folder with all that is below it: an image that is added to a class changes that alone.
    """
    if name.startswith(HUB):
        return 0, 0
    try:
        found = [each.stat() for each in (Path(name), *Path(name).rglob("*"))]
    except OSError as error:
        raise InvalidInput(
            f"no data set {name}: {error.strerror} (ranks on other hosts need it there, too)"
        ) from error
    return max(each.st_mtime_ns for each in found), sum(each.st_size for each in found)


@lru_cache(maxsize=2)
def _read(name: str, options: OwnOptions, stamp: tuple[int, int]) -> tuple[Arrays, str]:
    path = Path(name)
    if name.startswith(HUB) or list(path.glob("dataset_*.json")):
        found = _of_hugging_face(name, options)
    elif path.is_dir():
        found = _of_pictures(path, options)
    elif path.suffix in _READERS:
        found = _READERS[path.suffix](path, options)
    else:
        raise InvalidInput(
            f"{name} is no data set: give {', '.join(FILES)}, a folder of images by class, "
            "a folder of Hugging Face's datasets, hf:NAME or hf:NAME:CONFIGURATION"
        )
    if not len(found.x_train) or not len(found.x_test):
        raise InvalidInput(f"{name} has {len(found.x_train)} training and {len(found.x_test)} rows")
    digest = hashlib.sha256()
    for array in found:
        digest.update(
            f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes()
        )
    return found, digest.hexdigest()[:16]


def _shapes(found: Arrays, options: OwnOptions) -> Shapes:
    y = found.y_train
    whole = np.issubdtype(y.dtype, np.integer) and y.ndim == 1
    task = options.task or ("classification" if whole else "regression")
    if task == "regression":
        return Shapes(tuple(found.x_train.shape[1:]), int(np.prod(y.shape[1:])), task)
    if not whole:
        raise InvalidInput("task=classification wants labels that are whole numbers or texts")
    classes = 1 + int(max(y.max(), found.y_test.max()))
    return Shapes(tuple(found.x_train.shape[1:]), classes, task)


def _arranged(
    name: str,
    x: Array,
    y: Array,
    options: OwnOptions,
    x_test: Array | None = None,
    y_test: Array | None = None,
) -> Arrays:
    """Features as numbers, labels as classes or targets; with test rows, or some held out."""
    if x_test is None or y_test is None:
        if len(x) != len(y):
            raise InvalidInput(f"{name} has {len(x)} rows of x and {len(y)} labels: give as many")
        out = held_out(len(x), options.test)
        x, y, x_test, y_test = x[~out], y[~out], x[out], y[out]
    if len(x_test) != len(y_test) or x.shape[1:] != x_test.shape[1:]:
        raise InvalidInput(
            f"{name} has test rows of {x_test.shape[1:]} with {len(y_test)} labels, and training "
            f"rows of {x.shape[1:]}: give {len(x_test)} labels, and rows of one shape"
        )
    if missing := sum(int(_is_missing(each).sum()) for each in (y, y_test)):
        raise InvalidInput(f"{name} has {missing} rows without a label: fill them in or drop them")
    for what, array in (("x", x), ("x", x_test), ("y", y), ("y", y_test)):
        check_values(f"{what} of {name}", array, texts=True)
    if y.dtype.kind == "f" and y.ndim == 1 and options.task != "regression":
        y, y_test = (_classes_of(name, each, options) for each in (y, y_test))
    if options.task == "regression" or y.dtype.kind == "f":
        y, y_test = (_targets(name, each) for each in (y, y_test))
    elif y.ndim == 1:
        classes = np.unique(np.concatenate([y, y_test]))
        _check_classes(name, classes, len(y) + len(y_test), options)
        y, y_test = np.searchsorted(classes, y), np.searchsorted(classes, y_test)
    return Arrays(_scaled(name, x), y, _scaled(name, x_test), y_test)


def _is_missing(y: Array) -> Array:
    """Where a label is None, or not a number."""
    import pandas as pd

    missing: Array = pd.isna(y)
    return missing


def _classes_of(name: str, y: Array, options: OwnOptions) -> Array:
    """Decimals as whole numbers, where they are said to be classes."""
    if options.task == "classification" and bool((y % 1 == 0).all()):
        return y.astype(int)
    if options.task is None and are_whole(y):
        raise InvalidInput(
            f"{name} has labels that are few whole numbers as decimals: give "
            'task="classification" or task="regression"'
        )
    return y


def _targets(name: str, y: Array) -> Array:
    try:
        return y.reshape(len(y), -1).astype(np.float32)
    except ValueError as error:
        raise InvalidInput(f"{name} has labels that are no numbers: {error}") from error


def _check_classes(name: str, classes: Array, rows: int, options: OwnOptions) -> None:
    """Refuse what looks like amounts, or names of rows, unless they are said to be classes."""
    if len(classes) == 1:
        raise InvalidInput(f"{name} has one class, {classes[0]!s}: there is nothing to tell apart")
    is_few = len(classes) <= FEW_CLASSES or len(classes) <= min(MOST_CLASSES, rows // 10)
    if options.task is None and not is_few:
        number = "" if classes.dtype.kind in "OUS" else ' amounts want task="regression",'
        raise InvalidInput(
            f"{name} has {len(classes):,} distinct labels in {rows:,} rows:{number} classes "
            'task="classification"; another column is named by label'
        )


def held_out(rows: int, share: float) -> Array:
    """Which rows are held out: evenly over all, so that classes in their order all have some."""
    places = np.arange(rows)
    taken: Array = np.floor((places + 1) * share) > np.floor(places * share)
    return taken


def _scaled(name: str, x: Array) -> Array:
    """Pixels from 0 to 1; other numbers as they are."""
    try:
        return x.astype(np.float32) / np.float32(255 if x.dtype == np.uint8 else 1)
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"{name} has features that are no numbers: {error}") from error


def _of_arrays(path: Path, options: OwnOptions) -> Arrays:
    """x and y, or x_train, y_train, x_test and y_test."""
    try:
        with np.load(path, allow_pickle=False) as file:
            parts = {name: file[name] for name in file.files}
    except (ValueError, OSError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    x, y = ("x_train", "y_train") if "x_train" in parts else ("x", "y")
    if missing := [name for name in (x, y) if name not in parts]:
        raise InvalidInput(f"{path} has no {missing[0]}, only {', '.join(parts) or 'nothing'}")
    rest = (parts.get("x_test"), parts.get("y_test"))
    return _arranged(str(path), parts[x], parts[y], options, *rest)


def _of_table(path: Path, options: OwnOptions) -> Arrays:
    table = read_table(path)
    out = held_out(len(table), options.test)
    return _of_frames(str(path), table[~out], table[out], options)


def _of_frames(name: str, train: pd.DataFrame, test: pd.DataFrame, options: OwnOptions) -> Arrays:
    """Numbers standardised, texts one-hot, both by the training rows; arrays as they are."""
    label = _label(name, list(train.columns), options)
    columns = train.columns.drop(label)
    if not len(columns) or not len(train):
        has = f"{len(train)} training rows and {len(columns)} columns beside {label!r}"
        raise InvalidInput(f"{name} has {has}: there is nothing to learn from")
    try:
        pairs = [features_of(name, train[column], test[column]) for column in columns]
        x, x_test = (np.concatenate(parts, axis=1) for parts in zip(*pairs, strict=True))
    except InvalidInput:
        raise
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"{name} has arrays of shapes that do not fit: {error}") from error
    y, y_test = (part[label].to_numpy() for part in (train, test))
    return _arranged(name, x, y, options, x_test, y_test)


def _label(name: str, columns: list[str], options: OwnOptions) -> str:
    if options.label is not None and options.label not in columns:
        raise InvalidInput(
            f"{name} has no column {options.label!r}{listed(options.label, columns, 'it has')}"
        )
    return options.label or next((each for each in LABELS if each in columns), columns[-1])


def _of_pictures(path: Path, options: OwnOptions) -> Arrays:
    """Images in folders by class; in train/ and test/, or some held out."""
    train = path / "train"
    if not train.is_dir():
        images, y = read_pictures(path, options.size)
        return _arranged(str(path), stack(images)[0], y, options)
    test = next((path / n for n in ("test", "validation", "val") if (path / n).is_dir()), None)
    images, y = read_pictures(train, options.size)
    if test is None:
        return _arranged(str(path), stack(images)[0], y, options)
    images_test, y_test = read_pictures(test, None, size_of(images))
    x, x_test = stack(images, images_test)
    return _arranged(str(path), x, y, options, x_test, y_test)


def _of_hugging_face(name: str, options: OwnOptions) -> Arrays:
    """A data set of Hugging Face's `datasets`, on disk or fetched once from their hub."""
    datasets = optional("datasets", "datasets")
    try:
        if name.startswith(HUB):  # and behind another colon which configuration of it
            whole = datasets.load_dataset(*name.removeprefix(HUB).split(":", 1))
        else:
            whole = datasets.load_from_disk(name)
    except (OSError, ValueError) as error:  # those of its hub are OSErrors, too
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
        return _of_frames(name, one, other, options)
    label = _label(name, [n for n in train.column_names if n != image], options)
    first = size_of([np.asarray(train[0][image])])
    size = (options.size, options.size) if options.size else first
    try:
        pixels = [[pixels_of(row[image], size) for row in part] for part in (train, test)]
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{name} has an image that cannot be read: {error}") from error
    x, x_test = stack(*pixels)
    return _arranged(name, x, np.array(train[label]), options, x_test, np.array(test[label]))


def _is_image(kind: object) -> bool:
    return type(kind).__name__ == "Image"


_READERS: dict[str, Callable[[Path, OwnOptions], Arrays]] = {
    ".npz": _of_arrays,
    ".csv": _of_table,
    ".parquet": _of_table,
}
