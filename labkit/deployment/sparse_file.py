"""A file that holds a model without its zeros, and reads back bit for bit."""

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
    """How a tensor lies in the file: its coding, and how many values are kept."""

    shape: list[int]
    dtype: str
    coding: str
    kept: int


class Header(TypedDict):
    """What stands before the tensors: the model's layers, and a record a tensor."""

    schema: int
    model: dict[str, JSON]
    tensors: list[TensorRecord]


MAGIC = b"LKSPARSE"
SCHEMA = 1
PREFIX = len(MAGIC) + 4  # the header's length, uint32, follows the magic


def coded_bytes(size: int, kept: int, itemsize: int) -> dict[str, int]:
    r"""Bytes of a tensor in each coding; a file takes the smallest.

    With \(n\) elements of \(w\) bytes, \(k\) of them not zero: `dense` \(n w\); `bitmap`
    \(\lceil n/8 \rceil + k w\), a bit an element; `indices`
    \(\lceil k \lceil \log_2 n \rceil / 8 \rceil + k w\), a packed place a value. Places win where
    fewer than about one in \(\log_2 n\) is left.

    Args: size, n; kept, k; itemsize, w in bytes.
    """
    values = kept * itemsize
    return {
        "dense": size * itemsize,
        "bitmap": math.ceil(size / 8) + values,
        "indices": math.ceil(kept * _width(size) / 8) + values,
    }


def write_sparse(model: keras.Model, path: Path | str) -> Path:
    """Write a model: a header (its layers as JSON, and each tensor's coding), then its tensors.

    Optimizer, loss and metrics stay out, as does a layer's state that is no weight.
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
    """The model that `write_sparse` wrote; raises LabkitError for any other file."""
    from labkit.keras.safe_mode import model_of

    path = Path(path)
    content = path.read_bytes()
    header, start = _header(content, path.name)
    expected = start + sum(_bytes_of(record) for record in header["tensors"])
    # A torn file is refused before any weight is read from it.
    if len(content) != expected:
        raise LabkitError(
            f"{path.name} has {len(content)} bytes instead of {expected}: write it again"
        )
    model = model_of(header["model"], path.name)
    for weight, record in zip(model.weights, header["tensors"], strict=True):
        end = start + _bytes_of(record)
        weight.assign(unpack(record, content[start:end]))
        start = end
    return model


def pack(tensor: Array) -> tuple[TensorRecord, bytes]:
    """A tensor's record (shape, dtype, coding, kept) and its bytes; -0.0 and NaN are kept."""
    tensor = np.ascontiguousarray(tensor)
    flat = tensor.reshape(-1)
    # As bits: -0.0 equals zero, but is another value, and NaN equals nothing.
    bits = flat.view(f"u{flat.itemsize}")
    places = np.flatnonzero(bits)
    sizes = coded_bytes(flat.size, len(places), flat.itemsize)
    coding = min(sizes, key=lambda name: sizes[name])
    record = TensorRecord(
        shape=list(tensor.shape), dtype=flat.dtype.name, coding=coding, kept=len(places)
    )
    if coding == "dense":
        return record, flat.tobytes()
    if coding == "bitmap":
        where = np.packbits(bits != 0)
    else:
        steps = np.arange(_width(flat.size))
        where = np.packbits((places[:, None] >> steps).astype(np.uint8) & 1)
    return record, where.tobytes() + flat[places].tobytes()


def unpack(record: TensorRecord, content: bytes) -> Array:
    """The tensor that `pack` packed."""
    shape, dtype = tuple(record["shape"]), _dtype(record["dtype"])
    if record["coding"] == "dense":
        return np.frombuffer(content, dtype).reshape(shape)
    size, kept = math.prod(shape), record["kept"]
    cut = len(content) - kept * dtype.itemsize
    packed = np.frombuffer(content[:cut], np.uint8)
    if record["coding"] == "bitmap":
        places = np.flatnonzero(np.unpackbits(packed, count=size))
    else:
        width = _width(size)
        bits = np.unpackbits(packed, count=kept * width).reshape(kept, width)
        places = bits.astype(np.int64) @ (1 << np.arange(width))
    flat = np.zeros(size, dtype)
    flat[places] = np.frombuffer(content[cut:], dtype)
    return flat.reshape(shape)


def _width(size: int) -> int:
    """Bits of a place."""
    return max(1, (size - 1).bit_length())


def _bytes_of(record: TensorRecord) -> int:
    size = math.prod(record["shape"])
    sizes = coded_bytes(size, record["kept"], _dtype(record["dtype"]).itemsize)
    return sizes[record["coding"]]


def _dtype(name: str) -> np.dtype[np.generic]:
    import ml_dtypes  # noqa: F401  # teaches NumPy bfloat16

    return np.dtype(name)


def _header(content: bytes, name: str) -> tuple[Header, int]:
    start = PREFIX + int.from_bytes(content[len(MAGIC) : PREFIX], "little")
    if not content.startswith(MAGIC) or len(content) < start:
        raise LabkitError(f"{name} is no sparse file: give one that write_sparse has written")
    header: Header = json.loads(content[PREFIX:start])
    if header["schema"] > SCHEMA:
        raise LabkitError(
            f"{name} has schema {header['schema']}, this labkit reads up to {SCHEMA}: update labkit"
        )
    return header, start
