"""How a compressor is called in labels, tables and sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.compression import COMPRESSORS

DENSE = "no compression"


def called(compressor: Any) -> str:
    """A compressor's record as a notebook would write it: `ErrorFeedback(TopK(ratio=0.01))`.

    Numbers are always said; words and switches, only where they are not the default.
    """
    if compressor is None:
        return DENSE
    if isinstance(compressor, list):
        return ", ".join(called(each) for each in compressor)
    if not isinstance(compressor, Mapping):
        return str(compressor)
    name = str(compressor.get("name", ""))
    inside = ", ".join(
        called(each) if isinstance(each, Mapping | list) else f"{field}={each}"
        for field, each in compressor.items()
        if field != "name" and each is not None and not _goes_without_saying(name, field, each)
    )
    return f"{name}({inside})" if inside else name


def _goes_without_saying(name: str, field: str, value: Any) -> bool:
    if name not in COMPRESSORS or not isinstance(value, str | bool):
        return False
    known = COMPRESSORS[name].model_fields.get(field)
    return known is not None and known.default == value
