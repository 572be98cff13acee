"""Types that describe data sets: arrays, task, and the shapes that a model must fit."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.imports import optional
from labkit.common.options import Count, Options


@dataclass(frozen=True)
class DataFile:
    """One file of a data set: its path `folder/name` below a data folder, its URL and checksum."""

    folder: str
    name: str
    url: str
    sha256: str


def search_folders() -> list[Path]:
    """Return the folders to search, in order: `LABKIT_DATA`, then `data/` in the working folder.

    Raises:
        LabkitError: LABKIT_DATA names no folder; this error keeps a misspelled path from starting a
            download.
    """
    named = os.environ.get("LABKIT_DATA")
    if named and not Path(named).is_dir():
        raise LabkitError(
            f"LABKIT_DATA={named} is not a folder; set LABKIT_DATA to the folder that contains "
            "mnist/, adult/ and so on, or unset it to use data/"
        )
    return [Path(named), Path("data")] if named else [Path("data")]


def find(file: DataFile) -> Path | None:
    """Return the file's path after verifying its checksum, or None if no folder contains it.

    Raises:
        LabkitError: A file with the name of the data set's file has a different checksum.
    """
    # labkit searches the folder in the environment variable LABKIT_DATA before the folder `data/`.
    for folder in search_folders():
        path = folder / file.folder / file.name
        if path.is_file():
            verify(path, file.sha256)
            return path
    return None


def verify(path: Path, expected: str) -> None:
    """Raise LabkitError if the file's sha256 differs from `expected`; cache the sha256."""
    status = path.stat()
    checksum = _sha256(path.resolve(), status.st_mtime_ns, status.st_size)
    if checksum != expected:
        raise LabkitError(
            f"{path} is not the published file: expected sha256 {expected}, found {checksum}; "
            "delete the file, and the next run downloads it again"
        )


def fetch(file: DataFile) -> Path:
    """Download the file into the first writable data folder, and return its path.

    Several processes may download the file at once. Each process writes a temporary file. A process
    renames its temporary file after the checksum matches.

    Raises:
        LabkitError: The download failed; the message names folder, file and URL.
    """
    pooch = optional("pooch")
    # Folders without write permission, such as a shared data folder, are skipped.
    writable = [folder for folder in search_folders() if os.access(folder, os.W_OK)]
    folder = [*writable, Path("data")][0] / file.folder
    paths = [place for place in (folder, folder.parent) if not place.exists()]
    try:
        # pooch verifies the checksum before it renames the downloaded file.
        return Path(pooch.retrieve(file.url, f"sha256:{file.sha256}", file.name, folder))
    except OSError as error:
        raise LabkitError(f"{how_to_get(file)}; the download failed: {_cause(error)}") from error
    except ValueError as error:
        raise LabkitError(
            f"the file downloaded from {file.url} is not the published file: {error}"
        ) from error
    finally:
        for place in paths:
            # The method `rmdir` raises an OSError if the folder is not empty.
            with suppress(OSError):
                place.rmdir()


def how_to_get(file: DataFile) -> str:
    """Return a message that names the missing file, its folder and its URL."""
    places = " or ".join(str(folder / file.folder) for folder in search_folders())
    return f"{file.name} is missing: download it from {file.url}, and put it into {places}"


@cache
def _sha256(path: Path, mtime_ns: int, size: int) -> str:
    """Return the sha256 of a file, cached until the file's modification time or size changes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _cause(error: BaseException) -> str:
    """Return the innermost cause of an error, such as the refused connection in its wrappers."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return f"{type(error).__name__}: {error}"


Array = NDArray[Any]
Task = Literal["classification", "regression", "next_character"]


class Rows(Options):
    """Options of every data set: use only the first `rows` training and `test_rows` test rows."""

    rows: Count | None = Field(None, description="number of training rows, 1 or more")
    test_rows: Count | None = Field(None, description="number of test rows, 1 or more")


class Arrays(NamedTuple):
    """Features and labels as a reader returns them: all rows, with unscaled features."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array


@dataclass(frozen=True)
class Shapes:
    """What a data set requires of a model: example shape, number of outputs, and task."""

    input_shape: tuple[int, ...]
    outputs: int
    task: Task


@dataclass(frozen=True)
class DatasetSpec:
    """Specification of a data set: its reader, its shapes, its number of rows, and its files.

    Attributes:
        read: Function that takes the options and the file paths, and returns the data set's arrays.
        shapes: Function that takes the options, and returns the input and output shapes that a
            model needs.
        count: Function that takes the options, and returns the number of training rows in the
            published data set.
        files: Files of the data set; the reader receives their paths.
        scale: Divisor of all features, such as 255 for 8-bit pixels.
        options: Class of the data set's options.
    """

    read: Callable[[Any, Sequence[Path]], Arrays]
    shapes: Callable[[Any], Shapes]
    count: Callable[[Any], int]
    files: tuple[DataFile, ...] = ()
    scale: float = 1.0
    options: type[Rows] = Rows


def images(*input_shape: int) -> Callable[[Rows], Shapes]:
    """Return a `DatasetSpec.shapes` function for images of `input_shape` and ten classes."""
    return lambda options: Shapes(input_shape, 10, "classification")


def always(rows: int) -> Callable[[Rows], int]:
    """Return a `DatasetSpec.count` function that always returns `rows`."""
    return lambda options: rows


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test arrays, with examples along the first axis.

    Features are float32 numbers, or int32 codes of characters. The type of the labels depends on
    the task. For a classification, labels are int32 classes. For a regression, labels are float32
    targets of shape (rows, outputs). For the task `next_character`, labels are the int32 codes of
    the next characters, with shape (rows, sequence_length).
    """

    name: str
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    task: Task
    outputs: int

    @property
    def shapes(self) -> Shapes:
        """The shapes that a model for this data set must fit."""
        return Shapes(tuple(self.x_train.shape[1:]), self.outputs, self.task)

    @property
    def summary(self) -> str:
        """One line of text: name, numbers of rows, shape of an example, and task."""
        shape = "x".join(map(str, self.shapes.input_shape))
        noun = "targets" if self.task == "regression" else "classes"
        return (
            f"{self.name}: {len(self.x_train):,} training and {len(self.x_test):,} test rows of "
            f"shape {shape}, {self.task.replace('_', ' ')}, {self.outputs} {noun}"
        )


def labels(y: Array, task: Task) -> Array:
    """Return labels with the dtype that the losses expect."""
    return np.asarray(y, np.float32 if task == "regression" else np.int32)


FEW_CLASSES, MOST_CLASSES = 20, 1000


def to_array(label: str, value: Any) -> Array:
    """Convert an array of pandas, TensorFlow or NumPy to a plain NumPy array.

    Raises:
        InvalidInput: The array has masked values, or its type is not supported.
    """
    if isinstance(value, np.ma.MaskedArray):
        if hidden := int(np.ma.getmaskarray(value).sum()):
            raise InvalidInput(
                f"{label} has {hidden} masked values: fill in these values, or drop their rows"
            )
        return np.asarray(value.data)
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    # NumPy converts a sparse matrix, for example, to an array of another shape.
    if array.shape != tuple(value.shape):
        raise InvalidInput(
            f"{label} is a {type(value).__name__}, which labkit cannot convert: give a NumPy array"
        )
    return array


def validate_values(label: str, array: Array, texts: bool = False) -> None:
    """Raise an error if an array has values that no model can use, such as NaN or dates.

    Args:
        label: Name of the array in the error message.
        array: Features or labels.
        texts: Whether texts are allowed; later code converts texts to categories or classes.

    Raises:
        InvalidInput: Some values are infinite or not numbers.
    """
    kind = array.dtype.kind
    if kind in "US" or (kind == "O" and all(isinstance(v, str | bytes) for v in array.flat)):
        if texts:
            return
        raise InvalidInput(
            f"{label} contains texts: give whole numbers, such as numpy.unique({label}, "
            "return_inverse=True)[1]"
        )
    if kind in "mM":
        raise InvalidInput(
            f"{label} contains dates: give numbers, such as seconds or days since a date"
        )
    if kind not in "biuf" and array.dtype.name not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        raise InvalidInput(
            f"{label} has the type {array.dtype}: give an array of numbers whose rows have the "
            "same length"
        )
    # The minimum and the maximum show whether an array has non-finite values. The computation of
    # the minimum and the maximum needs no second array. The number of non-finite values is only
    # computed for the error message.
    if kind == "f" and array.size and not np.isfinite([array.min(), array.max()]).all():
        count = int((~np.isfinite(array)).sum())
        raise InvalidInput(
            f"{label} has {count} values that are infinite or NaN: replace these values, or drop "
            "their rows"
        )


def shapes_of(data: tuple[Any, Any], y_validation: Any = None) -> Shapes | None:
    """Return the data's shapes and task, or None if x or y is no array."""
    x, y = data
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
        return None
    if y.dtype.kind in "biu" and y.ndim == 1:
        labels = [part for part in (y, y_validation) if isinstance(part, np.ndarray)]
        most = max(int(part.max()) for part in labels)
        return Shapes(tuple(x.shape[1:]), most + 1, "classification")
    return Shapes(tuple(x.shape[1:]), int(np.prod(y.shape[1:])), "regression")


def check_task(data: tuple[Any, Any], y_validation: Any = None, loss: str | None = None) -> None:
    """Raise an error if the arrays do not determine whether a model classifies or regresses.

    Args:
        data: The training arrays (x, y).
        y_validation: Labels of the validation data, or None.
        loss: The name of the loss, or None if the user has named no loss. Floating-point labels are
            checked only if `loss` is None.

    Raises:
        InvalidInput: Features are texts, labels are invalid classes, or labels may be either
            classes or regression targets.
    """
    x, y = data
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
        return
    validate_values("x", x)
    if y.dtype.kind == "f":
        if loss is None:
            _check_amounts(y)
    elif y.ndim > 1:
        raise InvalidInput(
            f"y is an array of whole numbers of shape {y.shape}: give one class per row, such as "
            "y.ravel() or y.argmax(axis=1), or y.astype(float) for a regression"
        )
    else:
        labels = [part for part in (y, y_validation) if isinstance(part, np.ndarray)]
        least, most = (int(one) for one in (min(map(np.min, labels)), max(map(np.max, labels))))
        if least < 0 or most >= max(MOST_CLASSES, len(y)):
            raise InvalidInput(
                f"y has labels from {least} to {most}, but classes must be numbered from 0: give "
                "numpy.unique(y, return_inverse=True)[1], or y.astype(float) for a regression"
            )


def are_whole(y: Array) -> bool:
    """Return whether floating-point labels may be classes: few distinct values, all integers."""
    distinct = np.unique(y)
    return len(distinct) <= min(FEW_CLASSES, len(y) // 2) and bool((distinct % 1 == 0).all())


def _check_amounts(y: Array) -> None:
    if y.ndim == 1 and are_whole(y):
        raise InvalidInput(
            "y has few distinct whole numbers, which may be classes or amounts: give "
            "y.astype(int) for classes, or y.reshape(-1, 1) for a regression"
        )
    if y.ndim == 2 and y.shape[1] > 1 and (y.max(axis=1) == 1).all() and (y.sum(axis=1) == 1).all():
        raise InvalidInput(
            "y contains one-hot labels: give one class per row, such as y.argmax(axis=1)"
        )
