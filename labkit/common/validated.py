"""Base of the objects that users fill in: frozen, strict, and refusing in one sentence."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from labkit.common.errors import InvalidInput, short


class Checked(BaseModel):
    """A frozen record whose constructor raises `InvalidInput`: what was given, what is allowed.

    Fields are given by name; the one that is declared with `Field(kw_only=False)`, the most telling
    one, may stand first without it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False
    )

    def __init__(self, *given: Any, **fields: Any) -> None:
        try:
            super().__init__(**_named(type(self), given, fields))
        # Without pydantic's own text, which tells of types and links to its website.
        except ValidationError as error:
            raise InvalidInput(_sentence(type(self), error)) from None


def by_position(kind: type[BaseModel]) -> str | None:
    """The field that may be given without its name; None where there is none."""
    return next((name for name, f in kind.model_fields.items() if f.kw_only is False), None)


def _named(kind: type[BaseModel], given: tuple[Any, ...], fields: dict[str, Any]) -> dict[str, Any]:
    """The fields by name, with the one that was given by its position."""
    if not given:
        return fields
    name, called = by_position(kind), kind.__name__
    if name is None:
        names = ", ".join(f"{name}=…" for name in kind.model_fields)
        raise InvalidInput(
            f"{called}({short(given[0])}) does not say which field is meant: "
            f"give fields by name, {called}({names})"
        )
    if len(given) > 1:
        others = ", ".join(f"{other}=…" for other in kind.model_fields if other != name)
        raise InvalidInput(
            f"{called}({', '.join(map(short, given))}): only {name} may be given without its "
            f"name; give the others by name{f', {called}(…, {others})' if others else ''}"
        )
    if name in fields:
        raise InvalidInput(
            f"{called}({short(given[0])}, {name}={short(fields[name])}) gives {name} twice"
        )
    return {name: given[0]} | fields


def _sentence(kind: type[BaseModel], error: ValidationError) -> str:
    errors = error.errors()
    first = errors[0]
    if first["type"] == "value_error":  # raised by labkit: already a sentence
        return first["msg"].removeprefix("Value error, ")
    if not first["loc"]:  # a name that no field can have, such as half a character
        return f"{kind.__name__} cannot have {short(first['input'])}: {first['msg']}"
    field = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        fields = ", ".join(kind.model_fields) or "no fields"
        return f"{kind.__name__} has no {short(field)}; it has: {fields}"
    if first["type"] == "missing":
        return f"{kind.__name__} needs {field!r}: give {field}=…"
    # Of a field that may be of several kinds, each kind tells what it wants.
    rules = dict.fromkeys(e["msg"] for e in errors if e["loc"][0] == first["loc"][0])
    allowed = " or ".join(rule[0].lower() + rule[1:] for rule in rules)
    place = field + "".join(f"[{part}]" for part in first["loc"][1:] if isinstance(part, int))
    return f"{place}={short(first['input'])} is impossible: {allowed}"
