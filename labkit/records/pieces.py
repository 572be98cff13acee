"""The state of a training as data: named pieces, each a box of a whole tensor, in open files."""

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
_INDEX = "index"  # the array of a file that says what the others are, as UTF-8 of JSON


class Piece(NamedTuple):
    """A box of a tensor.

    Attributes:
        name: of the tensor, in terms of the whole model.
        values: of the box.
        whole: the shape of the tensor.
        corner: where in it the box begins.
        own: it is this rank's alone: others may hold another one of the same name and place.
    """

    name: str
    values: np.ndarray
    whole: tuple[int, ...]
    corner: Corner
    own: bool = False

    @classmethod
    def alone(cls, name: str, values: np.ndarray) -> Piece:
        """A whole tensor that only this rank has."""
        return cls(name, values, values.shape, (0,) * values.ndim, own=True)


def assembled(pieces: Sequence[Piece], corner: Corner, shape: tuple[int, ...]) -> np.ndarray:
    """The box of this corner and shape, made of pieces of one tensor; of two the first counts.

    Raises:
        LabkitError: they leave a hole in it.
    """
    found = np.empty(shape, pieces[0].values.dtype)
    filled = np.zeros(shape, bool)
    for piece in reversed(pieces):
        start = np.maximum(piece.corner, corner)
        stop = np.minimum(
            np.add(piece.corner, piece.values.shape), np.add(corner, shape)
        )  # of what both have
        if np.any(stop <= start):
            continue
        there = tuple(map(slice, start - corner, stop - corner))
        found[there] = piece.values[tuple(map(slice, start - piece.corner, stop - piece.corner))]
        filled[there] = True
    if not filled.all():
        raise LabkitError(f"{pieces[0].name} is not whole in the checkpoint: a part is missing")
    return found


def packed(pieces: Iterable[Piece], told: Mapping[str, JSON]) -> bytes:
    """One rank's pieces as what an .npz file holds.

    Args:
        pieces: what it holds.
        told: what else there is to say of the rank; numbers may be infinite or none.
    """
    arrays: dict[str, Any] = {}
    index: list[JSON] = []
    for number, piece in enumerate(pieces):
        values = np.ascontiguousarray(piece.values).reshape(piece.values.shape)
        arrays[str(number)] = values
        index.append([piece.name, piece.whole, piece.corner, piece.own, values.dtype.name])
    words = json.dumps({"pieces": index, "told": told}).encode()
    file = io.BytesIO()
    np.savez(file, **arrays | {_INDEX: np.frombuffer(words, np.uint8)})
    return file.getvalue()


def write(path: Path, pieces: Iterable[Piece], told: Mapping[str, JSON]) -> dict[str, JSON]:
    """Write one rank's pieces as an .npz file; its size and checksum. Arguments: see `packed`."""
    content = packed(pieces, told)
    store.write_atomically(path, content)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


class Rank:
    """What one rank has written; values are read when they are asked for."""

    def __init__(self, file: Path | bytes) -> None:
        self._name = "a rank's state" if isinstance(file, bytes) else f"the state in {file}"
        content = io.BytesIO(file) if isinstance(file, bytes) else file
        self._index: dict[tuple[bool, str], list[tuple[Any, ...]]] = {}
        with decoding(self._name):
            self._file = _arrays(content)
            said = json.loads(self._file[_INDEX].tobytes())
            self.told: dict[str, JSON] = said["told"]
            for number, (name, *place, own, kind) in enumerate(said["pieces"]):
                known = self._index.setdefault((own, name), [])
                known.append((number, *map(tuple, place), kind))

    def own(self) -> dict[str, np.ndarray]:
        """What this rank alone has had, by name."""
        return {
            name: piece.values
            for own, name in self._index
            if own
            for piece in self.pieces(name, own)
        }

    def pieces(self, name: str, own: bool) -> Iterator[Piece]:
        """Its boxes of a tensor."""
        for number, whole, corner, kind in self._index.get((own, name), ()):
            with decoding(self._name):
                values = self._file[str(number)]
                if values.dtype.kind == "V":  # of a type that NumPy itself does not know
                    values = values.view(np.dtype(kind))
            yield Piece(name, values, whole, corner, own)


class State:
    """What the files of a checkpoint say together.

    Args:
        files: of the ranks, or what they hold, by rank.
    """

    def __init__(self, files: Mapping[int, Path | bytes]) -> None:
        self._files = files

    @classmethod
    def of(cls, folder: Path, ranks: int) -> Self:
        """That of a folder, which so many ranks have written."""
        return cls({rank: file_of(folder, rank) for rank in range(ranks)})

    @cached_property
    def ranks(self) -> dict[int, Rank]:
        """What each rank has written."""
        return {rank: Rank(file) for rank, file in self._files.items()}

    def tensor(self, name: str) -> list[Piece]:
        """All that ranks have of a tensor; first what several have alike."""
        kinds = [(own, rank) for own in (False, True) for rank in self.ranks.values()]
        return [piece for own, rank in kinds for piece in rank.pieces(name, own)]

    def whole(self, name: str) -> np.ndarray | None:
        """A whole tensor; None where no rank has had it."""
        found = self.tensor(name)
        return assembled(found, (0,) * len(found[0].whole), found[0].whole) if found else None


def _arrays(content: Any) -> Any:
    """The arrays of an .npz file, which take as many bytes in memory as in the file."""
    arrays = np.load(content, allow_pickle=False)
    # The last bit of the flags: encrypted.
    if any(each.compress_type != ZIP_STORED or each.flag_bits & 1 for each in arrays.zip.filelist):
        raise ValueError("encrypted or compressed arrays, which labkit writes nowhere")
    return arrays


def file_of(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank{rank}.npz"
