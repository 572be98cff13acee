"""Checks of options: each has a value that is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from labkit.common.errors import InvalidInput, short
from labkit.common.nearest import hint, listed, literal_strings

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON


Value = TypeVar("Value")


Parsed = TypeVar("Parsed", bound="Options")


# The strict type `Count` rejects `true` and "64" in a notebook's parameters cell.
Count = Annotated[int, Field(strict=True, ge=1)]


class Options(BaseModel):
    """Base class of all options; an error message about a field contains its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def lookup(family: Mapping[str, Value], name: JSON, kind: str) -> Value:
    """Return `family[name]`, or raise an error with suggestions.

    Args:
        family: All allowed values, by name.
        name: The name to look up in `family`.
        kind: Noun for the value in the error message, such as "model".

    Raises:
        InvalidInput: The name is unknown; the message lists the allowed names and suggests the
            nearest name.
    """
    if isinstance(name, str) and name in family:
        return family[name]
    raise InvalidInput(f"unknown {kind} {short(name)}{listed(name, sorted(family))}")


def parse(options: type[Parsed], owner: str, values: Mapping[str, object]) -> Parsed:
    """Return option values as a validated pydantic model.

    Args:
        options: Class of the model, whose fields are the option names.
        owner: First words of an error message, such as "model 'mlp'".
        values: Option values by option name.

    Raises:
        InvalidInput: An option is unknown or its value is invalid; the message lists what is
            allowed.
    """
    try:
        return options.model_validate(dict(values))
    except ValidationError as error:
        # Only the first error is reported, because it may have caused all other errors.
        first = error.errors()[0]
    option = str(first["loc"][0])
    fields = options.model_fields
    if option in fields:
        value = values.get(option, fields[option].default)
        near = hint(value, literal_strings(fields[option].annotation))
        raise InvalidInput(
            f"{owner}: {option}={short(value)} is impossible{near}; "
            f"allowed: {fields[option].description}"
        )
    raise InvalidInput(f"{owner} has no option {short(option)}{listed(option, fields)}")
