"""The families of compressors, by what of a gradient they say less of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from types import MappingProxyType

from labkit.common.errors import InvalidInput
from labkit.compression.compressor import COMPRESSORS, Compressor

FAMILIES = MappingProxyType(
    {
        "quantization": "fewer bits an element",
        "sparsification": "fewer elements",
        "low rank": "factors of fewer dimensions",
        "hybrid": "two of these, one after the other",
    }
)


@cache
def samples() -> tuple[Compressor, ...]:
    """Each compressor with its defaults, and those that wrap others around all that fit.

    Of numbers without a default any will do: 1.
    """
    kinds = COMPRESSORS.values()
    simple = [kind(**dict.fromkeys(_needed(kind), 1)) for kind in kinds if not _inner(kind)]
    around = [compressor for kind in kinds if _inner(kind) for compressor in _around(kind, simple)]
    return (*simple, *around)


def _needed(kind: type[Compressor]) -> list[str]:
    return [name for name, field in kind.model_fields.items() if field.is_required()]


def _inner(kind: type[Compressor]) -> list[str]:
    """The fields that must hold another compressor."""
    return [name for name in _needed(kind) if kind.model_fields[name].annotation is Compressor]


def _around(kind: type[Compressor], simple: Sequence[Compressor]) -> Iterator[Compressor]:
    names = _inner(kind)
    for chosen in product(simple, repeat=len(names)):
        try:
            yield kind(**dict(zip(names, chosen, strict=True)))
        except InvalidInput:  # it says itself what makes no sense
            continue
