"""The data sets: name to files, reader and shapes; and how one is checked, found and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.options import lookup, parse
from labkit.datasets.adult import read_adult
from labkit.datasets.dataset import Array, Arrays, Dataset, Rows, Shapes, labels
from labkit.datasets.files import DataFile, fetch, find, how_to_get
from labkit.datasets.images import read_cifar10, read_digits, read_idx_set
from labkit.datasets.shakespeare import CHARACTERS, TextOptions, read_shakespeare, sequences
from labkit.datasets.synthetic import ROWS, SyntheticOptions, read_synthetic


@dataclass(frozen=True)
class DatasetSpec:
    """How a data set is read: `read(options, paths of files)`; features are divided by `scale`.

    `count(options)` is the number of its training rows, as published.
    """

    read: Callable[[Any, Sequence[Path]], Arrays]
    shapes: Callable[[Any], Shapes]
    count: Callable[[Any], int]
    files: tuple[DataFile, ...] = ()
    scale: float = 1.0
    options: type[Rows] = Rows


def _images(*input_shape: int) -> Callable[[Rows], Shapes]:
    return lambda options: Shapes(input_shape, 10, "classification")


def _always(rows: int) -> Callable[[Rows], int]:
    return lambda options: rows


def _idx_files(folder: str, address: str, *checksums: str) -> tuple[DataFile, ...]:
    names = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in _IDX_KINDS]
    return tuple(
        DataFile(folder, name, f"{address}/{name}", checksum)
        for name, checksum in zip(names, checksums, strict=True)
    )


_IDX_KINDS = ("images-idx3", "labels-idx1")
_MNIST = _idx_files(
    "mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
)
_FASHION = _idx_files(
    "fashion-mnist",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
)
_CIFAR10 = DataFile(
    "cifar10",
    "cifar-10-python.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
)
_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult"
_ADULT = (
    DataFile(
        "adult",
        "adult.data",
        f"{_UCI}/adult.data",
        "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    ),
    DataFile(
        "adult",
        "adult.test",
        f"{_UCI}/adult.test",
        "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
    ),
)
_SHAKESPEARE = DataFile(
    "tinyshakespeare",
    "input.txt",
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)

DATASETS: dict[str, DatasetSpec] = {
    "digits": DatasetSpec(read_digits, _images(8, 8, 1), _always(1437), scale=16),
    "mnist": DatasetSpec(read_idx_set, _images(28, 28, 1), _always(60_000), _MNIST, scale=255),
    "fashion_mnist": DatasetSpec(
        read_idx_set, _images(28, 28, 1), _always(60_000), _FASHION, scale=255
    ),
    "cifar10": DatasetSpec(
        read_cifar10, _images(32, 32, 3), _always(50_000), (_CIFAR10,), scale=255
    ),
    "adult": DatasetSpec(
        read_adult, lambda _: Shapes((108,), 2, "classification"), _always(32_561), _ADULT
    ),
    "shakespeare": DatasetSpec(
        read_shakespeare,
        lambda options: Shapes((options.sequence_length,), CHARACTERS, "next_character"),
        lambda options: sequences(options.sequence_length),
        (_SHAKESPEARE,),
        options=TextOptions,
    ),
    "synthetic": DatasetSpec(
        read_synthetic,
        lambda options: Shapes(options.shape, options.outputs, options.task),
        lambda options: options.rows or ROWS,
        options=SyntheticOptions,
    ),
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
    return tuple(find(file) or fetch(file) for file in lookup(DATASETS, name, "data set").files)


def available(name: str) -> str | None:
    """Return None when the data set's files are here and whole, else why not; downloads nothing."""
    files = lookup(DATASETS, name, "data set").files
    try:
        missing = [file for file in files if find(file) is None]
    except LabkitError as error:
        return str(error)
    return "; ".join(map(how_to_get, missing)) or None


def ensure(name: str) -> None:
    """Fetch what is missing of a data set: once, before ranks start that would all fetch it."""
    locate(name)


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


def _checked(name: str, options: Mapping[str, object]) -> tuple[DatasetSpec, Rows]:
    spec = lookup(DATASETS, name, "data set")
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
