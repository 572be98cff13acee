"""Families of compressors, grouped by the method that reduces the size of a gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from types import MappingProxyType

from labkit.common.errors import InvalidInput
from labkit.compression.compressor import COMPRESSORS, Compressor

FAMILIES = MappingProxyType(
    {
        "quantization": "fewer bits per element",
        "sparsification": "fewer elements",
        "low rank": "matrix factors of low rank",
        "hybrid": "two compressors in sequence",
    }
)


@cache
def samples() -> tuple[Compressor, ...]:
    """Return all compressors with default fields, and all supported combinations with wrappers.

    Required numeric fields have the value 1, because they have no default.
    """
    kinds = COMPRESSORS.values()
    plain = [
        kind(**dict.fromkeys(_required_fields(kind), 1))
        for kind in kinds
        if not _compressor_fields(kind)
    ]
    wrappers = [
        compressor
        for kind in kinds
        if _compressor_fields(kind)
        for compressor in _wrap(kind, plain)
    ]
    return (*plain, *wrappers)


def _required_fields(kind: type[Compressor]) -> list[str]:
    return [name for name, field in kind.model_fields.items() if field.is_required()]


def _compressor_fields(kind: type[Compressor]) -> list[str]:
    """Return the names of required fields whose value is another compressor."""
    return [
        name for name in _required_fields(kind) if kind.model_fields[name].annotation is Compressor
    ]


def _wrap(kind: type[Compressor], plain: Sequence[Compressor]) -> Iterator[Compressor]:
    names = _compressor_fields(kind)
    for compressors in product(plain, repeat=len(names)):
        try:
            yield kind(**dict(zip(names, compressors, strict=True)))
        except InvalidInput:  # the wrapper does not support this inner compressor
            continue
