"""A file format that stores a model without its zero weights, and restores it bit for bit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
from numpy.typing import NDArray

from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError
from labkit.deployment.smaller_models import config_of
from labkit.records.store import write_atomically

if TYPE_CHECKING:
    import keras

Array = NDArray[np.generic]


class TensorRecord(TypedDict):
    """A tensor's shape, dtype, coding in the file, and number of stored values (`kept`)."""

    shape: list[int]
    dtype: str
    coding: str
    kept: int


class Header(TypedDict):
    """The header of a file: schema version, the model's layers, and one record per tensor."""

    schema: int
    model: dict[str, JSON]
    tensors: list[TensorRecord]


MAGIC = b"LKSPARSE"
SCHEMA = 1
# The prefix of a sparse file consists of the text `MAGIC` and the header's length (uint32, 4
# bytes).
PREFIX = len(MAGIC) + 4


def coded_bytes(size: int, count: int, itemsize: int) -> dict[str, int]:
    r"""Return a tensor's size in bytes in each coding; a file uses the smallest coding.

    A tensor has \(n\) elements of \(w\) bytes each, and \(k\) elements are nonzero. The tensor's
    size in bytes depends on the coding:

    - `dense`: \(n w\).
    - `bitmap`: \(\lceil n/8 \rceil + k w\), one bit per element.
    - `indices`: the nonzero values, and one packed index per nonzero value. Each of the k nonzero
      elements has one packed index. The coding `indices` is the smallest if fewer than about \(n /
      \log_2 n\) elements are nonzero.

    Args:
        size: Number n of elements of the tensor.
        count: Number k of nonzero elements.
        itemsize: Number w of bytes per element.
    """
    values = count * itemsize
    return {
        "dense": size * itemsize,
        "bitmap": math.ceil(size / 8) + values,
        "indices": math.ceil(count * _width(size) / 8) + values,
    }


def write_sparse(model: keras.Model, path: Path | str) -> Path:
    """Write a model to a sparse file (a JSON header, then the tensors), and return the path.

    The header has the model's layers and each tensor's coding. The file contains no optimizer,
    loss, metrics, or layer state other than weights.
    """
    tensors, parts = [], []
    for weight in model.weights:
        record, content = pack(weight.numpy())
        tensors.append(record)
        parts.append(content)
    header = Header(schema=SCHEMA, model=config_of(model), tensors=tensors)
    text = json.dumps(header, separators=(",", ":")).encode()
    prefix = MAGIC + len(text).to_bytes(4, "little")
    return write_atomically(Path(path), b"".join([prefix, text, *parts]))


def read_sparse(path: Path | str) -> keras.Model:
    """Return the model in a file that `write_sparse` has written.

    Raises:
        LabkitError: The file is not a sparse model file, or the file is truncated.
    """
    from labkit.keras.safe_mode import model_of

    path = Path(path)
    content = path.read_bytes()
    header, start = _header(content, path.name)
    expected = start + sum(_bytes_of(record) for record in header["tensors"])
    # The length check rejects a truncated file before any weight is read.
    if len(content) != expected:
        raise LabkitError(
            f"{path.name} has {len(content)} bytes instead of {expected}, so it is incomplete or "
            "damaged: write the file again"
        )
    model = model_of(header["model"], path.name)
    for weight, record in zip(model.weights, header["tensors"], strict=True):
        end = start + _bytes_of(record)
        weight.assign(unpack(record, content[start:end]))
        start = end
    return model


def pack(tensor: Array) -> tuple[TensorRecord, bytes]:
    """Return a tensor's record and its coded bytes; -0.0 and NaN are stored like nonzero values."""
    tensor = np.ascontiguousarray(tensor)
    flat = tensor.reshape(-1)
    # An element counts as zero only if all its bits are 0. The value -0.0 equals 0.0, but differs
    # in its bits.
    bits = flat.view(f"u{flat.itemsize}")
    indices = np.flatnonzero(bits)
    sizes = coded_bytes(flat.size, len(indices), flat.itemsize)
    coding = min(sizes, key=lambda name: sizes[name])
    record = TensorRecord(
        shape=list(tensor.shape), dtype=flat.dtype.name, coding=coding, kept=len(indices)
    )
    if coding == "dense":
        return record, flat.tobytes()
    if coding == "bitmap":
        packed = np.packbits(bits != 0)
    else:
        steps = np.arange(_width(flat.size))
        packed = np.packbits((indices[:, None] >> steps).astype(np.uint8) & 1)
    return record, packed.tobytes() + flat[indices].tobytes()


def unpack(record: TensorRecord, content: bytes) -> Array:
    """Rebuild a tensor from the record and the bytes that `pack` returned."""
    shape, dtype = tuple(record["shape"]), _dtype(record["dtype"])
    if record["coding"] == "dense":
        return np.frombuffer(content, dtype).reshape(shape)
    size, kept = math.prod(shape), record["kept"]
    split = len(content) - kept * dtype.itemsize
    packed = np.frombuffer(content[:split], np.uint8)
    if record["coding"] == "bitmap":
        indices = np.flatnonzero(np.unpackbits(packed, count=size))
    else:
        width = _width(size)
        bits = np.unpackbits(packed, count=kept * width).reshape(kept, width)
        indices = bits.astype(np.int64) @ (1 << np.arange(width))
    flat = np.zeros(size, dtype)
    flat[indices] = np.frombuffer(content[split:], dtype)
    return flat.reshape(shape)


def _width(size: int) -> int:
    """Return the number of bits that a packed index needs in a tensor with `size` elements."""
    return max(1, (size - 1).bit_length())


def _bytes_of(record: TensorRecord) -> int:
    size = math.prod(record["shape"])
    sizes = coded_bytes(size, record["kept"], _dtype(record["dtype"]).itemsize)
    return sizes[record["coding"]]


def _dtype(name: str) -> np.dtype[np.generic]:
    import ml_dtypes  # noqa: F401  # adds bfloat16 to NumPy

    return np.dtype(name)


def _header(content: bytes, name: str) -> tuple[Header, int]:
    start = PREFIX + int.from_bytes(content[len(MAGIC) : PREFIX], "little")
    if not content.startswith(MAGIC) or len(content) < start:
        raise LabkitError(
            f"{name} is not a sparse model file: give a file that write_sparse has written"
        )
    header: Header = json.loads(content[PREFIX:start])
    if header["schema"] > SCHEMA:
        raise LabkitError(
            f"{name} has the schema version {header['schema']}, but this labkit reads versions "
            f"up to {SCHEMA}: update labkit"
        )
    return header, start
