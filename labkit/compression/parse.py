"""Compressors inside compressors: given as objects, as names, or as they stand in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from labkit.common.errors import InvalidInput
from labkit.common.options import lookup
from labkit.compression.base import Compressor


def parse(value: object) -> Compressor:
    """The compressor that is meant: itself, its name, or a mapping of its name and fields.

    Raises:
        InvalidInput: an unknown name, or fields that the compressor does not have.
    """
    from labkit.compression import COMPRESSORS  # which imports the modules that import this one

    if isinstance(value, Compressor):
        return value
    if isinstance(value, str):
        return lookup(COMPRESSORS, value, "compressor")()
    if isinstance(value, Mapping):
        fields = dict(value)
        return lookup(COMPRESSORS, fields.pop("name", None), "compressor")(**fields)
    raise InvalidInput(
        f"{value!r} is no compressor: give one, its name ('TopK'), or a mapping of its name and "
        "fields ({'name': 'TopK', 'ratio': 0.01})"
    )


Nested = Annotated[
    Compressor, BeforeValidator(parse), PlainSerializer(lambda compressor: compressor.to_json())
]
