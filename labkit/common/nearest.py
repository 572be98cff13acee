"""Suggestions for error messages: the allowed names that are nearest to an unknown name."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar, get_args, get_origin

from labkit.common.errors import InvalidInput, short
from labkit.common.renamed import name_today

if TYPE_CHECKING:
    pass


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MOST = 3  # A message suggests at most three names (MOST).
LISTED = 20  # Beside a suggestion, a message lists at most 20 allowed names (LISTED).


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
    function compares letters and initials. An allowed name matches if it has the same letters in
    any order. An allowed name with the initials `name` also matches. If neither letters nor
    initials match, the function returns the allowed name with the closest spelling. If no spelling
    is close, the function returns up to three allowed names that contain `name`.

    >>> nearest("lr", ["epochs", "learning_rate"])
    ['learning_rate']
    """
    if today := name_today(name, [*allowed]):
        return [today]
    typed = _letters(name) if isinstance(name, str) else ""
    known: dict[str, str] = {}
    for candidate in allowed if typed else ():
        known.setdefault(_letters(candidate), candidate)
    # difflib computes too low a similarity for transposed letters, so `nearest` also compares the
    # sorted letters.
    moved = sorted(typed)
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
