"""Training state in .npz files, which contain tensors or rectangular parts of tensors."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias
from zipfile import ZIP_STORED

import numpy as np

from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError
from labkit.common.state import decoding
from labkit.records import store

Corner: TypeAlias = tuple[int, ...]
# The array `index` contains UTF-8 JSON that describes the other arrays in the file.
_INDEX = "index"


class TensorBox(NamedTuple):
    """A rectangular part (box) of a tensor: all elements whose indices are in given ranges.

    Attributes:
        name: Name of the tensor in the whole model.
        values: The elements of the tensor that are in the box.
        whole: Shape of the whole tensor.
        corner: The index, in the whole tensor, of the box's first element.
        own: True if the tensor is local to one rank, so that other ranks may have other values;
            default: False.
    """

    name: str
    values: np.ndarray
    whole: tuple[int, ...]
    corner: Corner
    own: bool = False

    @classmethod
    def local(cls, name: str, values: np.ndarray) -> TensorBox:
        """Return a box that contains a whole tensor, which is local to this rank."""
        return cls(name, values, values.shape, (0,) * values.ndim, own=True)


def assemble(pieces: Sequence[TensorBox], corner: Corner, shape: tuple[int, ...]) -> np.ndarray:
    """Return the part of a tensor in a box with the given corner and shape, assembled from pieces.

    Where two pieces overlap, the result contains the values of the earlier piece.

    Raises:
        LabkitError: If the pieces do not cover the whole box.
    """
    values = np.empty(shape, pieces[0].values.dtype)
    filled = np.zeros(shape, bool)
    for piece in reversed(pieces):
        start = np.maximum(piece.corner, corner)
        stop = np.minimum(
            np.add(piece.corner, piece.values.shape), np.add(corner, shape)
        )  # Only the part of the piece inside the requested box is copied.
        if np.any(stop <= start):
            continue
        target = tuple(map(slice, start - corner, stop - corner))
        values[target] = piece.values[tuple(map(slice, start - piece.corner, stop - piece.corner))]
        filled[target] = True
    if not filled.all():
        raise LabkitError(
            f"{pieces[0].name} is incomplete in the checkpoint: a part of the tensor is missing"
        )
    return values


def pack(pieces: Iterable[TensorBox], record: Mapping[str, JSON]) -> bytes:
    """Return the bytes of an .npz file that contains the tensors of one rank.

    Args:
        pieces: The tensors, or parts of tensors, in the rank's training state.
        record: Other state of the rank as JSON values, in which numbers may be infinite or NaN.
    """
    arrays: dict[str, Any] = {}
    index: list[JSON] = []
    for number, piece in enumerate(pieces):
        values = np.ascontiguousarray(piece.values).reshape(piece.values.shape)
        arrays[str(number)] = values
        index.append([piece.name, piece.whole, piece.corner, piece.own, values.dtype.name])
    words = json.dumps({"pieces": index, "told": record}).encode()
    file = io.BytesIO()
    np.savez(file, **arrays | {_INDEX: np.frombuffer(words, np.uint8)})
    return file.getvalue()


def write(path: Path, pieces: Iterable[TensorBox], record: Mapping[str, JSON]) -> dict[str, JSON]:
    """Write a rank's tensors to an .npz file, and return the file's size in bytes and its checksum.

    Args: See `pack`.
    """
    content = pack(pieces, record)
    store.write_atomically(path, content)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


class RankFile:
    """The state file of one rank, from which each tensor is read only when it is accessed."""

    def __init__(self, file: Path | bytes) -> None:
        self._name = "a rank's state" if isinstance(file, bytes) else f"the state in {file}"
        content = io.BytesIO(file) if isinstance(file, bytes) else file
        self._index: dict[tuple[bool, str], list[tuple[Any, ...]]] = {}
        with decoding(self._name):
            self._file = _arrays(content)
            content_index = json.loads(self._file[_INDEX].tobytes())
            self.record: dict[str, JSON] = content_index["told"]
            for number, (name, *place, is_local, kind) in enumerate(content_index["pieces"]):
                entries = self._index.setdefault((is_local, name), [])
                entries.append((number, *map(tuple, place), kind))

    def local_tensors(self) -> dict[str, np.ndarray]:
        """Return a dict from names to the tensors that are local to this rank."""
        return {
            name: piece.values
            for is_local, name in self._index
            if is_local
            for piece in self.pieces(name, is_local)
        }

    def pieces(self, name: str, is_local: bool) -> Iterator[TensorBox]:
        """Yield the parts of the tensor `name` that the rank's file contains."""
        for number, whole, corner, kind in self._index.get((is_local, name), ()):
            with decoding(self._name):
                values = self._file[str(number)]
                # NumPy lacks some tensor types, such as bfloat16. NumPy reads a bfloat16 tensor as
                # raw bytes (dtype kind V).
                if values.dtype.kind == "V":
                    values = values.view(np.dtype(kind))
            yield TensorBox(name, values, whole, corner, is_local)


class CheckpointState:
    """The training state of all ranks, read from the state files of a checkpoint.

    Args:
        files: For each rank, the path of its state file, or the content of the file.
    """

    def __init__(self, files: Mapping[int, Path | bytes]) -> None:
        self._files = files

    @classmethod
    def from_folder(cls, folder: Path, ranks: int) -> Self:
        """Return the training state from a checkpoint folder that `ranks` ranks wrote."""
        return cls({rank: rank_file(folder, rank) for rank in range(ranks)})

    @cached_property
    def ranks(self) -> dict[int, RankFile]:
        """The state file of each rank; each key is a rank number."""
        return {rank: RankFile(file) for rank, file in self._files.items()}

    def tensor(self, name: str) -> list[TensorBox]:
        """Return all ranks' parts of a tensor, with parts that are local to a rank at the end."""
        kinds = [(is_local, rank) for is_local in (False, True) for rank in self.ranks.values()]
        return [piece for is_local, rank in kinds for piece in rank.pieces(name, is_local)]

    def full_tensor(self, name: str) -> np.ndarray | None:
        """Return a whole tensor, assembled from all ranks' files, or None if none contains it."""
        pieces = self.tensor(name)
        return assemble(pieces, (0,) * len(pieces[0].whole), pieces[0].whole) if pieces else None


def _arrays(content: Any) -> Any:
    """Return the arrays of an .npz file; raise an error if any is compressed or encrypted."""
    arrays = np.load(content, allow_pickle=False)
    # Bit 0 of a ZIP entry's flags means that the entry is encrypted.
    if any(
        entry.compress_type != ZIP_STORED or entry.flag_bits & 1 for entry in arrays.zip.filelist
    ):
        raise ValueError(
            "the file contains encrypted or compressed arrays, which labkit does not write"
        )
    return arrays


def rank_file(folder: Path, rank: int) -> Path:
    """Return the path of the state file of a rank in a checkpoint folder."""
    return folder / f"rank{rank}.npz"
