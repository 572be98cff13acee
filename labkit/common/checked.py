"""Base of the objects that users fill in: frozen, strict, and refusing in one sentence."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from labkit.common.errors import InvalidInput


class Checked(BaseModel):
    """A frozen record whose constructor raises `InvalidInput`: what was given, what is allowed."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __init__(self, *given: Any, **fields: Any) -> None:
        if given:
            names = ", ".join(f"{name}=…" for name in type(self).model_fields)
            raise InvalidInput(
                f"{type(self).__name__}({_short(given[0])}) does not say which field is meant: "
                f"give fields by name, {type(self).__name__}({names})"
            )
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InvalidInput(_sentence(type(self), error)) from None


def _sentence(kind: type[BaseModel], error: ValidationError) -> str:
    errors = error.errors()
    first = errors[0]
    if first["type"] == "value_error":  # raised by labkit: already a sentence
        return first["msg"].removeprefix("Value error, ")
    field = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        fields = ", ".join(kind.model_fields) or "no fields"
        return f"{kind.__name__} has no {field!r}; it has: {fields}"
    if first["type"] == "missing":
        return f"{kind.__name__} needs {field!r}: give {field}=…"
    # Of a field that may be of several kinds, each kind tells what it wants.
    rules = dict.fromkeys(e["msg"] for e in errors if e["loc"][0] == first["loc"][0])
    allowed = " or ".join(rule[0].lower() + rule[1:] for rule in rules)
    place = field + "".join(f"[{part}]" for part in first["loc"][1:] if isinstance(part, int))
    return f"{place}={_short(first['input'])} is impossible: {allowed}"


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:80]}…"
