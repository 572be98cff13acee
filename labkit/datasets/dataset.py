"""Types that describe data sets: arrays, task, and the shapes that a model must fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from labkit.common.options import Count, Options
from labkit.datasets.files import DataFile

Array = NDArray[Any]
Task = Literal["classification", "regression", "next_character"]


class Rows(Options):
    """Options of every data set: the number of first rows to use for training and for tests."""

    rows: Count | None = Field(None, description="number of training rows, 1 or more")
    test_rows: Count | None = Field(None, description="number of test rows, 1 or more")


class Arrays(NamedTuple):
    """Features and labels from a reader, before rows are selected and features scaled."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array


@dataclass(frozen=True)
class Shapes:
    """What a model must fit: an example's shape, the number of classes or targets, and the task."""

    input_shape: tuple[int, ...]
    outputs: int
    task: Task


@dataclass(frozen=True)
class DatasetSpec:
    """Specification of a data set: its reader, its shapes, its number of rows, and its files.

    Attributes:
        read: Function of (options, paths of the files) that returns the data set's arrays.
        shapes: Function of the options that returns the shapes that a model must fit.
        count: Function of the options that returns the published number of training rows.
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
    """Return a `DatasetSpec.shapes` function for images of this shape with ten classes."""
    return lambda options: Shapes(input_shape, 10, "classification")


def always(rows: int) -> Callable[[Rows], int]:
    """Return a `DatasetSpec.count` function that always returns this number of rows."""
    return lambda options: rows


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test arrays, with examples along the first axis.

    Features are float32 numbers, or int32 codes of characters. The type of the labels depends on
    the task. A classification has int32 classes; a regression has float32 targets of shape (rows,
    outputs). For the task `next_character`, labels are the int32 codes of the next characters, with
    shape (rows, sequence_length).
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
