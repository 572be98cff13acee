"""Readers of image sets: scikit-learn's digits, MNIST's idx files, CIFAR-10's archive."""

from __future__ import annotations

import gzip
import pickle
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from labkit.common.errors import LabkitError
from labkit.common.options import Options
from labkit.datasets.dataset import Array, Arrays


def read_digits(options: Options, paths: Sequence[Path]) -> Arrays:
    """Return scikit-learn's 1,797 digits (8, 8, 1), a fixed fifth of them as test rows.

    The bundled file is ordered by writer and holds runs of 0, 1, …, 9, hence the shuffle.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    x, y = bunch.images[order][..., np.newaxis], bunch.target[order]
    return Arrays(x[360:], y[360:], x[:360], y[:360])


def read_idx_set(options: Options, paths: Sequence[Path]) -> Arrays:
    """Return MNIST or a set of its format: training images, labels, test images, labels."""
    x_train, y_train, x_test, y_test = (read_idx(path) for path in paths)
    return Arrays(x_train[..., np.newaxis], y_train, x_test[..., np.newaxis], y_test)


def read_idx(path: Path) -> Array:
    """Return the bytes of a gzipped idx file in its shape.

    The file: two zeros, the type (8: unsigned byte), the number of axes, their lengths as
    big-endian int32, the values (Y. LeCun, C. Cortes, C. Burges, "The MNIST database").
    """
    content = gzip.decompress(path.read_bytes())
    if content[:3] != b"\0\0\x08":
        raise LabkitError(f"{path} is not an idx file of bytes: it starts with {content[:4]!r}")
    axes = content[3]
    shape = np.frombuffer(content, ">i4", count=axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def read_cifar10(options: Options, paths: Sequence[Path]) -> Arrays:
    """Return CIFAR-10 (32, 32, 3) from its archive of pickles (A. Krizhevsky 2009)."""
    with tarfile.open(paths[0]) as archive:
        batches = [_cifar_batch(archive, f"data_batch_{number}") for number in range(1, 6)]
        x_test, y_test = _cifar_batch(archive, "test_batch")
    x_train = np.concatenate([x for x, _ in batches])
    return Arrays(x_train, np.concatenate([y for _, y in batches]), x_test, y_test)


def _cifar_batch(archive: tarfile.TarFile, name: str) -> tuple[Array, Array]:
    stream = archive.extractfile(f"cifar-10-batches-py/{name}")
    if stream is None:
        raise LabkitError(f"the CIFAR-10 archive holds a folder where the file {name} belongs")
    # A pickle can run code; this one is the publisher's, as its checksum has shown.
    batch = pickle.load(stream, encoding="bytes")
    planes = batch[b"data"].reshape(-1, 3, 32, 32)  # colour planes first
    return planes.transpose(0, 2, 3, 1), np.array(batch[b"labels"])
