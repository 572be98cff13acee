"""Suggestions for error messages: the allowed names that are nearest to an unknown name."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Literal, ParamSpec, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from labkit.common.errors import InvalidInput, short
from labkit.common.renamed import name_today

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MOST = 3  # maximum number of suggested names
LISTED = 20  # maximum number of allowed names that a message lists beside a suggestion


class UnknownArgument(InvalidInput, TypeError):
    """Raised for a keyword argument that the called function does not accept."""


def hint(name: object, allowed: Iterable[str]) -> str:
    """Return a hint such as ` (did you mean 'epochs'?)`, or "" if no allowed name is similar."""
    near = [repr(match) for match in nearest(name, allowed)]
    if not near:
        return ""
    return f" (did you mean {' or '.join(filter(None, [', '.join(near[:-1]), near[-1]]))}?)"


def nearest(name: object, allowed: Iterable[str]) -> list[str]:
    """Return the allowed names that the user probably means, the likeliest first.

    If `name` is a former name, its current name is returned. If `name` is not a former name, the
    function returns an allowed name with the same letters in any order, or with the initials
    `name`. If neither letters nor initials match, the function returns the allowed name with the
    closest spelling. If no spelling is close, the function returns up to three allowed names that
    contain `name`.

    >>> nearest("lr", ["epochs", "learning_rate"])
    ['learning_rate']
    """
    if today := name_today(name, [*allowed]):
        return [today]
    typed = _letters(name) if isinstance(name, str) else ""
    known: dict[str, str] = {}
    for candidate in allowed if typed else ():
        known.setdefault(_letters(candidate), candidate)
    moved = sorted(typed)  # difflib computes too low a similarity for transposed letters
    for same in (
        [candidate for letters, candidate in known.items() if letters == typed],
        [candidate for candidate in known.values() if _initials(candidate) == typed],
        [candidate for letters, candidate in known.items() if sorted(letters) == moved],
        [known[letters] for letters in difflib.get_close_matches(typed, known, n=1)],
    ):
        if same:
            return same[:1]
    inside = [letters for letters in known if len(typed) > 2 and typed in letters]
    inside.sort(key=lambda letters: (not letters.startswith(typed), len(letters)))
    return [known[letters] for letters in inside[:MOST]]


def listed(name: object, allowed: Collection[str], word: str = "allowed") -> str:
    """Return a text with the nearest and all allowed names: ` (did you mean 'a'?); allowed: a, b`.

    The list of all allowed names is omitted if it is long and a similar name exists.
    """
    near = hint(name, allowed)
    if near and len(allowed) > LISTED:
        return near
    return f"{near}; {word}: {', '.join(allowed) or 'none'}"


def refuse_unknown(field: str, values: Iterable[object], allowed: Iterable[str]) -> None:
    """Raise InvalidInput if a value is not an allowed name; the message names the field."""
    names = list(allowed)
    for value in values:
        if value not in names:
            raise InvalidInput(f"{field}={short(value)} is not known{listed(value, names)}")


def literal_strings(annotation: object) -> list[str]:
    """Return the strings that a type allows, e.g. "a" and "b" for `Literal["a", "b"] | None`."""
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return [word for word in parts if isinstance(word, str)]
    return [word for part in parts for word in literal_strings(part)]


def named_arguments(
    *further: str,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Return a decorator that rejects unknown keyword arguments and suggests the nearest name.

    Args:
        further: Names of further arguments, which the function accepts in its `**options`.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        parameters = inspect.signature(function).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = [parameter.name for parameter in parameters if parameter.kind in kinds]
        allowed = [*(name for name in names if name not in ("self", "cls")), *further]
        called = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            for name in kwargs:
                if name not in allowed:
                    raise UnknownArgument(
                        f"{called} has no argument {name!r}{listed(name, allowed)}"
                    )
            return function(*args, **kwargs)

        return checked

    return decorate


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name).casefold()


def _initials(name: str) -> str:
    words = name.split("_")
    return _letters("".join(word[:1] for word in words)) if len(words) > 1 else ""


Value = TypeVar("Value")
Parsed = TypeVar("Parsed", bound="Options")

# The type is strict: in a notebook's parameters cell, `true` must not count as 1, and "64" must not
# count as 64.
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
