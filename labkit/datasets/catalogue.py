"""Catalogue of the named data sets, with functions that validate, locate and load data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.options import lookup, parse
from labkit.datasets import user_data
from labkit.datasets.dataset import (
    Array,
    Arrays,
    DataFile,
    Dataset,
    DatasetSpec,
    Rows,
    Shapes,
    fetch,
    find,
    how_to_get,
    labels,
)
from labkit.datasets.images import CIFAR10, DIGITS, FASHION_MNIST, MNIST
from labkit.datasets.synthetic import SYNTHETIC
from labkit.datasets.tabular_files import ADULT

CHARACTERS = 65  # The Shakespeare text has 65 distinct characters.
LENGTH = 1_115_394  # characters


class TextOptions(Rows):
    """Options of the data set `shakespeare`."""

    # The upper limit of `sequence_length` ensures at least one sequence in the test text, which has
    # 111,540 characters.
    sequence_length: int = Field(
        64,
        strict=True,
        ge=1,
        le=100_000,
        description="number of characters per sequence, 1 to 100000",
    )


def read_shakespeare(options: TextOptions, paths: Sequence[Path]) -> Arrays:
    """Return character codes (sequences, sequence_length), and the next characters' codes.

    The first nine tenths of the text are training data, and the rest is test data. Sequences do not
    overlap. The code of a character is its position in the sorted list of the text's distinct
    characters.
    Reference: A. Karpathy 2015.
    """
    text = np.frombuffer(paths[0].read_bytes(), np.uint8)
    _, codes = np.unique(text, return_inverse=True)
    cut = len(codes) * 9 // 10
    return Arrays(
        *_sequences(codes[:cut], options.sequence_length),
        *_sequences(codes[cut:], options.sequence_length),
    )


def sequences(length: int, characters: int = LENGTH * 9 // 10) -> int:
    """Return the number of sequences in a text of `characters` characters (default: training)."""
    # The last sequence needs one more character, which is the label of its last character.
    return (characters - 1) // length


def _sequences(codes: Array, length: int) -> tuple[Array, Array]:
    count = sequences(length, len(codes))
    x = codes[: count * length].reshape(count, length)
    y = codes[1 : count * length + 1].reshape(count, length)
    return x, y


_TEXT = DataFile(
    "tinyshakespeare",
    "input.txt",
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
SHAKESPEARE = DatasetSpec(
    read_shakespeare,
    lambda options: Shapes((options.sequence_length,), CHARACTERS, "next_character"),
    lambda options: sequences(options.sequence_length),
    (_TEXT,),
    options=TextOptions,
)


# To add a data set, write a file with its reader and specification. Each data set also needs a line
# in the dict `DATASETS`.
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
    """Return a data set's input and output shapes; read no file of a catalogued data set.

    Raises:
        InvalidInput: The data set or an option is unknown, or a value is invalid.
    """
    spec, parsed = _checked(name, options)
    return spec.shapes(parsed)


def count(name: str, options: Mapping[str, object]) -> int:
    """Return the number of training rows that `load` would return, without reading a file.

    Raises:
        InvalidInput: The data set or an option is unknown, or a value is invalid.
    """
    spec, parsed = _checked(name, options)
    rows = spec.count(parsed)
    return rows if parsed.rows is None else min(rows, parsed.rows)


def locate(name: str) -> tuple[Path, ...]:
    """Return the paths of a data set's files in `LABKIT_DATA` or `data/`; download missing files.

    Raises:
        LabkitError: A checksum is wrong, or a file is missing and cannot be downloaded.
    """
    return tuple(find(file) or fetch(file) for file in _spec(name).files)


def available(name: str) -> str | None:
    """Return the reason why files of a data set are missing or damaged, or None; download none."""
    files = _spec(name).files
    try:
        missing = [file for file in files if find(file) is None]
    except LabkitError as error:
        return str(error)
    return "; ".join(map(how_to_get, missing)) or None


def ensure(name: str) -> None:
    """Download a data set's missing files once, so that not every rank downloads them."""
    if name.startswith(user_data.HUB):
        # The function `check` loads the Hugging Face data set, whose download is cached.
        check(name, {})
    locate(name)


def recorded(name: str, options: Mapping[str, Any]) -> dict[str, JSON]:
    """Return what a run's record stores: data set name without folder, options, and checksum."""
    if name in DATASETS or not user_data.is_user_dataset(name):
        return {"dataset": name, "dataset_options": dict(options)}
    options_with_checksum = dict(options) | {"sha256": user_data.checksum(name, dict(options))}
    return {"dataset": label(name), "dataset_options": options_with_checksum}


def label(name: str) -> str:
    """Return a data set's name; of an absolute path, return only the last component."""
    return Path(name).name if Path(name).is_absolute() else name


def load(name: str, **options: Any) -> Dataset:
    """Load a data set; the same call returns the same arrays on every rank.

    Args:
        name: Name in the catalogue, path, or Hugging Face address of the data set.
        options: Options of the data set; `rows` and `test_rows` limit the data set to its first
            rows.

    Raises:
        InvalidInput: An option is unknown, or its value is invalid.
        LabkitError: Files are missing, or their checksums differ from those of the published files.
    """
    spec, parsed = _checked(name, options)
    shapes = spec.shapes(parsed)
    arrays = spec.read(parsed, locate(name))
    return Dataset(
        name=name,
        x_train=_features(_first(arrays.x_train, parsed.rows, name, "rows"), spec, shapes),
        y_train=labels(arrays.y_train[: parsed.rows], shapes.task),
        x_test=_features(_first(arrays.x_test, parsed.test_rows, name, "test_rows"), spec, shapes),
        y_test=labels(arrays.y_test[: parsed.test_rows], shapes.task),
        task=shapes.task,
        outputs=shapes.outputs,
    )


def _spec(name: str) -> DatasetSpec:
    if name not in DATASETS and user_data.is_user_dataset(name):
        return user_data.spec(name)
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
    """Return the scaled features of the selected rows; scaling all rows might exceed the memory."""
    if shapes.task == "next_character":
        return np.asarray(x, np.int32)
    return np.asarray(x, np.float32) / np.float32(spec.scale)
