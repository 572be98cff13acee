"""Types of fields that hold quantities with units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo

from labkit.common.quantities import parse_bytes, parse_rate, parse_seconds


def _field(parse: Callable[[object, str], float]) -> BeforeValidator:
    """Return a validator that parses texts with a unit; pydantic itself validates numbers."""

    def parsed(value: object, info: ValidationInfo) -> object:
        text = isinstance(value, str | bool)
        return parse(value, info.field_name or "value") if text else value

    return BeforeValidator(parsed)


Seconds = Annotated[float, _field(parse_seconds), Field(ge=0, allow_inf_nan=False)]


PositiveSeconds = Annotated[float, _field(parse_seconds), Field(gt=0, allow_inf_nan=False)]


Bytes = Annotated[int, _field(parse_bytes), Field(gt=0)]


BytesPerSecond = Annotated[float, _field(parse_rate), Field(gt=0, allow_inf_nan=False)]
