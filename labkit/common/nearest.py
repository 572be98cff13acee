"""An unknown name: the nearest names that are allowed, and the sentence that offers them."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import Literal, ParamSpec, TypeVar, get_args, get_origin

from labkit.common.errors import InvalidInput, short

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MOST = 3  # names that are offered
LISTED = 20  # names that are listed beside an offer: more would hide it


class UnknownArgument(InvalidInput, TypeError):
    """An argument by a name that the function does not have."""


def hint(name: object, allowed: Iterable[str]) -> str:
    """` (did you mean 'epochs'?)`, or nothing where no name is near."""
    near = [repr(each) for each in nearest(name, allowed)]
    if not near:
        return ""
    return f" (did you mean {' or '.join(filter(None, [', '.join(near[:-1]), near[-1]]))}?)"


def nearest(name: object, allowed: Iterable[str]) -> list[str]:
    """Return the names that are meant, likely ones: the one of the same letters, or initials.

    Else the one that differs by least, else those that contain the name.

    >>> nearest("lr", ["epochs", "learning_rate"])
    ['learning_rate']
    """
    given = _letters(name) if isinstance(name, str) else ""
    known: dict[str, str] = {}
    for each in allowed if given else ():
        known.setdefault(_letters(each), each)
    moved = sorted(given)  # letters that have changed places, of which difflib counts too many
    for same in (
        [each for letters, each in known.items() if letters == given],
        [each for each in known.values() if _initials(each) == given],
        [each for letters, each in known.items() if sorted(letters) == moved],
        [known[letters] for letters in difflib.get_close_matches(given, known, n=1)],
    ):
        if same:
            return same[:1]
    inside = [letters for letters in known if len(given) > 2 and given in letters]
    inside.sort(key=lambda letters: (not letters.startswith(given), len(letters)))
    return [known[letters] for letters in inside[:MOST]]


def listed(name: object, allowed: Collection[str], word: str = "allowed") -> str:
    """The nearest names and all others: ` (did you mean 'a'?); allowed: a, b`.

    A long list is left out where a name is near.
    """
    near = hint(name, allowed)
    if near and len(allowed) > LISTED:
        return near
    return f"{near}; {word}: {', '.join(allowed) or 'none'}"


def refuse_unknown(field: str, values: Iterable[object], allowed: Iterable[str]) -> None:
    """Raise InvalidInput for the first value of a field that is none of the allowed names."""
    names = list(allowed)
    for value in values:
        if value not in names:
            raise InvalidInput(f"{field}={short(value)} is not known{listed(value, names)}")


def words_of(annotation: object) -> list[str]:
    """The words that a value of a type may be, as of `Literal["ring", "tree"] | None`."""
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return [word for word in parts if isinstance(word, str)]
    return [word for part in parts for word in words_of(part)]


def named_arguments(
    *further: str,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Decorate a function: an argument of an unknown name is refused with the nearest known name.

    Args:
        further: names that the function's `**options` take.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        parameters = inspect.signature(function).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = [each.name for each in parameters if each.kind in kinds]
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
