"""State as data: the classes that a checkpoint may name, and what odd data raises."""

from __future__ import annotations

import errno
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cached_property
from tokenize import TokenError
from typing import Any, TypeVar
from zipfile import BadZipFile

from labkit.common.errors import LabkitError, short

T = TypeVar("T")
# What damaged or forged data raises where code takes it for a state.
_ODD = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RecursionError),
    *(TypeError, ValueError),
    # Of what np.load, zipfile and the literals in headers of arrays are read by.
    *(BadZipFile, NotImplementedError, SyntaxError, TokenError, struct.error, zlib.error),
)


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Raise LabkitError, whatever damaged or forged data raises in this block.

    Args:
        what: is decoded.
    """
    try:
        yield
    except LabkitError:
        raise
    except (*_ODD, OSError) as error:
        # An offset that no file has is damage; a disk that fails, or a missing file, is not.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise LabkitError(
            f"{what} is damaged or forged ({short(error)}); resume another checkpoint, or begin "
            "anew"
        ) from error


class Record:
    """A class whose instances are state, by the names of its fields.

    Args:
        kind: the class.
        names: of all fields.

    Attributes:
        is_tuple: an instance takes all fields at once, as a tuple does.
    """

    def __init__(self, kind: type, names: tuple[str, ...]) -> None:
        self.kind, self.names = kind, names
        self.is_tuple = issubclass(kind, tuple)
        self._lazy = {n for n in names if isinstance(getattr(kind, n, None), cached_property)}

    def values(self, instance: Any) -> dict[str, Any]:
        """The fields of an instance."""
        if self.is_tuple:
            return dict(zip(self.names, instance, strict=True))
        namespace = vars(instance)
        return {name: namespace[name] for name in self.names if name in namespace}

    def blank(self) -> Any:
        """An instance without fields; neither `__init__` nor `__setstate__` runs."""
        return object.__new__(self.kind)

    def tuple_of(self, values: Mapping[str, Any]) -> Any:
        """The named tuple of these fields; its `__new__` does not run."""
        return tuple.__new__(self.kind, [values[name] for name in self.names])

    def check(self, names: Mapping[str, Any]) -> None:
        """Refuse names that are not those of the fields.

        Raises:
            LabkitError: it says which are missing or unknown.
        """
        wanted = set(self.names)
        if odd := (wanted - self._lazy - set(names)) | (set(names) - wanted):
            raise LabkitError(
                f"a record {self.kind.__name__} of a state has the fields "
                f"{', '.join(self.names)}; missing or unknown: {', '.join(sorted(odd))}"
            )


_RECORDS: dict[str, Record] = {}


def record(*names: str) -> Callable[[type[T]], type[T]]:
    """Declare that a checkpoint may hold instances of a class.

    Args:
        names: of the fields; none where a dataclass or a named tuple lists them itself.
    """

    def declare(kind: type[T]) -> type[T]:
        if kind.__name__ in _RECORDS:
            raise TypeError(f"two classes of states are called {kind.__name__}: rename one")
        _RECORDS[kind.__name__] = Record(kind, names or _names(kind))
        return kind

    return declare


def record_of(kind: type) -> Record | None:
    """The record of a class; None where the class is no state."""
    candidate = _RECORDS.get(kind.__name__)
    return candidate if candidate is not None and candidate.kind is kind else None


def record_named(name: str) -> Record:
    """The record of this name.

    Raises:
        LabkitError: no class of that name is state.
    """
    if name not in _RECORDS:
        raise LabkitError(
            f"a state names a record {name!r:.80}; allowed: {', '.join(sorted(_RECORDS))}"
        )
    return _RECORDS[name]


def _names(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind)) if is_dataclass(kind) else tuple(kind._fields)
