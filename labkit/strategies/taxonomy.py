"""The axes of a taxonomy of distributed training, and the names that each axis has.

A cell of the taxonomy is a combination of one name from each axis.

Source: Z. Tang et al., Communication-efficient distributed deep learning: a comprehensive survey,
2020, arXiv 2003.06307. M. Langer et al., Distributed training of deep learning models: a taxonomic
perspective, 2020, arXiv 2007.03970. Difference from the papers: only the survey of Tang et al. has
compression as an axis. labkit has additional names for ways to cut a model, and for bounded
staleness.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from labkit.common.errors import InvalidInput
from labkit.compression import FAMILIES


class Cell(NamedTuple):
    """The place of a method in the taxonomy: one name from each axis of `AXES`."""

    architecture: str
    synchronization: str
    parallelism: str
    compression: str
    scheduling: str


_MEANINGS: dict[str, dict[str, str]] = {
    "architecture": {
        "collective": "all ranks have the same role and exchange messages together",
        "parameter servers": "servers hold the weights and answer the workers",
        "neighbours": "each rank exchanges with few ranks: stages, tiles, or partners of gossip",
    },
    "synchronization": {
        "synchronous": "each step waits for all ranks that exchange",
        "stale synchronous": "the weights of a step may lack a bounded number of updates",
        "asynchronous": "each step exchanges without waiting for slower ranks",
        "periodic": "several local steps, then an exchange of all ranks",
        "asynchronous periodic": "several local steps, then an exchange without waiting",
    },
    "parallelism": {
        "data": "each rank holds the whole model",
        "model by layers": "each rank holds some of the layers",
        "model by units": "each rank holds some units of every layer",
        "model by tiles": "each rank holds a tile of every layer",
        "model by blocks": "each round updates some blocks of the weights",
        "hybrid": "replicas of a divided model, or a model divided in two ways",
    },
    "compression": {"none": "all values are sent in full", **FAMILIES},
    "scheduling": {
        "sequential": "each rank first computes, then exchanges",
        "overlap": "messages travel during computation",
        "priority": "the most urgent messages, or the most important weights, come first",
        "staggered": "ranks take turns on a shared link",
        "micro-batches": "parts of a batch pass from rank to rank as a pipeline",
        "unlocked": "no module's backward pass waits for that of the next module",
    },
}
# `AXES` gives the allowed names on each axis of the taxonomy, with their meanings. The axes have
# the order of the fields of `Cell`.
AXES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {axis: MappingProxyType(_MEANINGS[axis]) for axis in Cell._fields}
)
# A strategy class declares its names on all axes of the taxonomy except compression. A strategy's
# names on the compression axis follow from the compressors that it supports.
DECLARED_AXES = tuple(axis for axis in AXES if axis != "compression")


def validate_places(class_name: str, axis: str, places: tuple[str, ...]) -> None:
    """Raise an error unless the attribute is a tuple of different names of its axis.

    Raises:
        InvalidInput: If the attribute is not a tuple of different names of its axis. The message
            shows the value and the allowed names.
    """
    # A string is rejected, because Python would treat it as a sequence of one-letter names.
    names = places if isinstance(places, tuple) else ()
    if not names or {*names} - {*AXES[axis]} or len({*names}) < len(names):
        raise InvalidInput(
            f"{class_name}.{axis}={places!r} is not a tuple of different places on that axis; "
            f"allowed: {', '.join(map(repr, AXES[axis]))}"
        )
