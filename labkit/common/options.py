"""Options by name: what a user may set on a model or a data set, checked before a rank starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from labkit.common.errors import InvalidInput, short

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON

Value = TypeVar("Value")
Parsed = TypeVar("Parsed", bound="Options")

# Strict: `true` in a parameters cell must not count as 1, nor "64" as 64.
Count = Annotated[int, Field(strict=True, ge=1)]


class Options(BaseModel):
    """Base of all options; a field's description says what is allowed and ends up in the error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def lookup(family: Mapping[str, Value], name: JSON, what: str) -> Value:
    """Return `family[name]`.

    Raises InvalidInput that lists the family and suggests the nearest name.
    """
    if isinstance(name, str) and name in family:
        return family[name]
    raise InvalidInput(
        f"unknown {what} {short(name)}{_suggestion(name, family)}; "
        f"allowed: {', '.join(sorted(family))}"
    )


def parse(options: type[Parsed], owner: str, given: Mapping[str, object]) -> Parsed:
    """Return `given` as checked options; `owner` ("model 'mlp'") opens the message of an error.

    Raises InvalidInput for an unknown option or an impossible value, naming what is allowed.
    """
    try:
        return options.model_validate(dict(given))
    except ValidationError as error:
        # One error at a time: the next may go with it.
        first = error.errors()[0]
    option = str(first["loc"][0])
    fields = options.model_fields
    if option in fields:
        raise InvalidInput(
            f"{owner}: {option}={short(given.get(option, fields[option].default))} is impossible; "
            f"allowed: {fields[option].description}"
        )
    raise InvalidInput(
        f"{owner} has no option {short(option)}{_suggestion(option, fields)}; "
        f"allowed: {', '.join(fields) or 'none'}"
    )


def _suggestion(name: JSON, allowed: Iterable[str]) -> str:
    nearest = get_close_matches(str(name), list(allowed), n=1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""
