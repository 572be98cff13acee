"""Readers of image sets: scikit-learn's digits, MNIST's files, CIFAR-10, and image folders."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.imports import installed, optional
from labkit.common.options import Options
from labkit.datasets.dataset import Array, Arrays, DataFile, DatasetSpec, always, images


def read_digits(options: Options, paths: Sequence[Path]) -> Arrays:
    """Return scikit-learn's 1,797 digit images (8, 8, 1); the test set is a fixed set of 360.

    The rows are shuffled with a fixed seed. The file is ordered by writer and contains runs of 0,
    1, …, 9.
    """
    images, target = _bundled_digits()
    order = np.random.default_rng(0).permutation(len(target))
    x, y = images[order][..., np.newaxis], target[order]
    return Arrays(x[360:], y[360:], x[:360], y[:360])


@cache
def _bundled_digits() -> tuple[Array, Array]:
    """Read scikit-learn's data file; an import of scikit-learn would take ten times as long."""
    origin = installed("sklearn").origin or ""
    rows = np.loadtxt(Path(origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(int)


def read_idx_set(options: Options, paths: Sequence[Path]) -> Arrays:
    """Return training and test arrays of MNIST, or of another data set in MNIST's format."""
    x_train, y_train, x_test, y_test = (read_idx(path) for path in paths)
    return Arrays(x_train[..., np.newaxis], y_train, x_test[..., np.newaxis], y_test)


def read_idx(path: Path) -> Array:
    """Return the bytes of a gzipped idx file as an array.

    An idx file starts with two zero bytes and the type (8: unsigned byte). The number of axes and
    their lengths (big-endian int32) follow the type. The values are at the end of the idx file.
    Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST database".
    """
    content = gzip.decompress(path.read_bytes())
    if content[:3] != b"\0\0\x08":
        raise LabkitError(
            f"{path} is not a file in the IDX format with 8-bit values: it begins with "
            f"{content[:4]!r}"
        )
    axes = content[3]
    shape = np.frombuffer(content, ">i4", count=axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def read_cifar10(options: Options, paths: Sequence[Path]) -> Arrays:
    """Return the CIFAR-10 images (32, 32, 3) from the binary archive (see Krizhevsky 2009)."""
    with tarfile.open(paths[0]) as archive:
        batches = [_cifar_batch(archive, f"data_batch_{number}.bin") for number in range(1, 6)]
        x_test, y_test = _cifar_batch(archive, "test_batch.bin")
    x_train = np.concatenate([x for x, _ in batches])
    return Arrays(x_train, np.concatenate([y for _, y in batches]), x_test, y_test)


def _cifar_batch(archive: tarfile.TarFile, name: str) -> tuple[Array, Array]:
    """Return the images and labels of a binary file from the CIFAR-10 archive."""
    stream = archive.extractfile(f"cifar-10-batches-bin/{name}")
    if stream is None:
        raise LabkitError(f"the CIFAR-10 archive contains a folder instead of the file {name}")
    rows = np.frombuffer(stream.read(), np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    return rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, 0].astype(np.int64)


def _idx_files(folder: str, address: str, *checksums: str) -> tuple[DataFile, ...]:
    names = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in IDX_KINDS]
    return tuple(
        DataFile(folder, name, f"{address}/{name}", checksum)
        for name, checksum in zip(names, checksums, strict=True)
    )


IDX_KINDS = ("images-idx3", "labels-idx1")
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
    # labkit downloads CIFAR-10's binary archive, because the archive for Python has pickles, which
    # can run code.
    "cifar-10-binary.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
DIGITS = DatasetSpec(read_digits, images(8, 8, 1), always(1437), scale=16)
MNIST = DatasetSpec(read_idx_set, images(28, 28, 1), always(60_000), _MNIST, scale=255)
FASHION_MNIST = DatasetSpec(read_idx_set, images(28, 28, 1), always(60_000), _FASHION, scale=255)
CIFAR10 = DatasetSpec(read_cifar10, images(32, 32, 3), always(50_000), (_CIFAR10,), scale=255)


PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
GREY = ("1", "L", "I", "F")
DEEPEST = 2**16 - 1  # White has the value 65,535 in a 16-bit image.

Size = tuple[int, int]  # width, height


def read_pictures(
    path: Path, edge: int | None, size: Size | None = None
) -> tuple[list[Array], Array]:
    """Read images from one folder per class; return arrays (rows, columns, channels) and classes.

    Args:
        path: Folder with one folder per class.
        edge: Width and height in pixels to which images are resized; None: the size of the first
            image.
        size: Size (width, height) of images that were read earlier; overrides `edge`.

    Raises:
        InvalidInput: There are no images, or an image cannot be read.
    """
    files = sorted(
        file
        for file in path.glob("[!.]*/*")
        if file.suffix.lower() in PICTURES and not file.name.startswith("._")  # macOS metadata
    )
    if not files:
        raise InvalidInput(
            f"{path} contains no images; give a folder with one subfolder of images per "
            f"class ({', '.join(PICTURES)})"
        )
    opener = optional("PIL.Image")
    images: list[Array] = []
    for file in files:
        try:
            with opener.open(file) as image:
                size = size or ((edge, edge) if edge else image.size)
                images.append(pixels_of(image, size))
        except (OSError, ValueError, SyntaxError, opener.DecompressionBombError) as error:
            raise InvalidInput(
                f"the image {file} cannot be read: {error}; repair or remove it"
            ) from error
    return images, np.array([file.parent.name for file in files])


def pixels_of(image: Any, size: Size) -> Array:
    """Convert a PIL image to an array (rows, columns, channels); black is 0, and white is 1.

    Raises:
        ValueError: The image's mode does not define the value of white.
    """
    width, height = size
    if image.mode.startswith("I") or image.mode == "F":
        if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
            raise ValueError(
                f"the pixel mode {image.mode} does not define the value of white; save the "
                "image with 8 or 16 bits"
            )
        # A 16-bit image is not converted to 8 bits, because PIL would clip values above 255.
        grey = np.asarray(image).astype(np.float32) / np.float32(DEEPEST)
        scaled = np.asarray(optional("PIL.Image").fromarray(grey).resize(size))
        return scaled.clip(0, 1).reshape(height, width, 1)
    channels = 1 if image.mode in GREY else 3
    plain = image.convert("L" if channels == 1 else "RGB").resize(size)
    pixels: Array = np.asarray(plain, np.uint8).reshape(height, width, channels)
    return pixels.astype(np.float32) / np.float32(255)


def stack(*parts: Sequence[Array]) -> list[Array]:
    """Stack each list of images in an array; if any image has color, all get 3 channels."""
    channels = max(image.shape[-1] for part in parts for image in part)
    return [
        np.stack([np.broadcast_to(image, (*image.shape[:2], channels)) for image in part])
        for part in parts
    ]


def size_of(images: Sequence[Array]) -> Size:
    """Return width and height of the first image."""
    height, width = images[0].shape[:2]
    return width, height
