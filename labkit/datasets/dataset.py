"""What a data set is: four arrays, the task they pose, and the shapes a model must fit."""

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
    """Options of every data set: how many rows to keep, counted from the first."""

    rows: Count | None = Field(None, description="number of training rows, 1 or more")
    test_rows: Count | None = Field(None, description="number of test rows, 1 or more")


class Arrays(NamedTuple):
    """Features and labels as a reader found them, before rows are cut and features scaled."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array


@dataclass(frozen=True)
class Shapes:
    """What a model must fit: shape of one example, number of classes or targets, and the task."""

    input_shape: tuple[int, ...]
    outputs: int
    task: Task


@dataclass(frozen=True)
class DatasetSpec:
    """How a data set is read: `read(options, paths of files)`; features are divided by `scale`.

    `shapes(options)` is what a model must fit, `count(options)` the number of training rows, as
    published.
    """

    read: Callable[[Any, Sequence[Path]], Arrays]
    shapes: Callable[[Any], Shapes]
    count: Callable[[Any], int]
    files: tuple[DataFile, ...] = ()
    scale: float = 1.0
    options: type[Rows] = Rows


def images(*input_shape: int) -> Callable[[Rows], Shapes]:
    """The shapes of images of ten classes, whatever the options."""
    return lambda options: Shapes(input_shape, 10, "classification")


def always(rows: int) -> Callable[[Rows], int]:
    """The number of rows, whatever the options."""
    return lambda options: rows


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test arrays, first axis the example.

    Features are float32 (codes of characters: int32); labels are int32 classes, float32 targets of
    shape (rows, outputs) for a regression, or for `next_character` the int32 code that follows each
    character, shape (rows, sequence_length).
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
        """The shapes a model for these data must fit."""
        return Shapes(tuple(self.x_train.shape[1:]), self.outputs, self.task)

    @property
    def summary(self) -> str:
        """One line: name, rows, shape of an example, task."""
        shape = "x".join(map(str, self.shapes.input_shape))
        noun = "targets" if self.task == "regression" else "classes"
        return (
            f"{self.name}: {len(self.x_train):,} training and {len(self.x_test):,} test rows "
            f"of {shape}, {self.task.replace('_', ' ')}, {self.outputs} {noun}"
        )


def labels(y: Array, task: Task) -> Array:
    """Return labels in the type the losses want."""
    return np.asarray(y, np.float32 if task == "regression" else np.int32)
