"""The axes of the field's taxonomy, the names of the places on each, and cells: one place on all.

Source: Z. Tang et al., Communication-efficient distributed deep learning: a comprehensive survey,
2020, arXiv 2003.06307; M. Langer et al., Distributed training of deep learning models: a taxonomic
perspective, 2020, arXiv 2007.03970. Differs from them: compression is an axis of the first alone;
how a model is cut, and what bounded staleness is, are said in more places.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from labkit.common.errors import InvalidInput
from labkit.compression import FAMILIES


class Cell(NamedTuple):
    """Where one method stands, on each axis by one of the names that `AXES` has for it."""

    architecture: str
    synchronization: str
    parallelism: str
    compression: str
    scheduling: str


_PLACES: dict[str, dict[str, str]] = {
    "architecture": {
        "collective": "ranks alike, which meet all at once",
        "parameter servers": "some hold the weights that count, and answer the others",
        "neighbours": "each with a few: from stage to stage, from tile to tile, or by gossip",
    },
    "synchronization": {
        "synchronous": "each step waits for all with whom it exchanges",
        "stale synchronous": "a bounded number of updates may be missing",
        "asynchronous": "each step exchanges, and nobody waits for who is slower",
        "periodic": "several steps alone, then all meet",
        "asynchronous periodic": "several steps alone, then one exchanges and waits for nobody",
    },
    "parallelism": {
        "data": "each has the whole model",
        "model by layers": "each has some of the layers",
        "model by units": "each has some units of every layer",
        "model by tiles": "each has a tile of every layer",
        "model by blocks": "each updates some blocks of the weights at a time",
        "hybrid": "replicas of a model that is cut, or one that is cut twice",
    },
    "compression": {"none": "all is said", **FAMILIES},
    "scheduling": {
        "sequential": "first one computes, then one exchanges",
        "overlap": "messages travel while one computes",
        "priority": "what counts most comes first: in the exchange, or in what is changed",
        "staggered": "ranks take turns at a link that they share",
        "micro-batches": "parts of a batch follow each other from rank to rank",
        "unlocked": "no backward pass waits for the one behind it",
    },
}
# By axis, in the order of a cell: the names that are allowed, each with what it says.
AXES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {axis: MappingProxyType(_PLACES[axis]) for axis in Cell._fields}
)
# Those that a class of strategies states; its compression follows from the compressors it takes.
PLACED = tuple(axis for axis in AXES if axis != "compression")


def check_places(who: str, axis: str, given: tuple[str, ...]) -> None:
    """Refuse what is no tuple of names of an axis.

    Raises:
        InvalidInput: what is given, and what is allowed.
    """
    # A text would be a sequence of letters.
    names = given if isinstance(given, tuple) else ()
    if not names or {*names} - {*AXES[axis]} or len({*names}) < len(names):
        raise InvalidInput(
            f"{who}.{axis}={given!r} is no tuple of places on that axis, each once; allowed: "
            f"{', '.join(map(repr, AXES[axis]))}"
        )
