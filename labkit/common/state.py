"""Registry of the classes whose instances may be stored in a checkpoint as plain data."""

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
# `_ODD` lists the exceptions that damaged or forged data can raise while a training state is
# decoded.
_ODD = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RecursionError),
    *(TypeError, ValueError),
    # BadZipFile and the exceptions after it come from np.load, zipfile and the parser of array
    # headers.
    *(BadZipFile, NotImplementedError, SyntaxError, TokenError, struct.error, zlib.error),
)


@contextmanager
def decoding(label: str) -> Iterator[None]:
    """Raise a LabkitError if damaged or forged data cause an exception inside the `with` block.

    Args:
        label: Name of the decoded data, with which the error message begins.
    """
    try:
        yield
    except LabkitError:
        raise
    except (*_ODD, OSError) as error:
        # An invalid offset in the data causes the error EINVAL. The disk causes all other errors of
        # the type OSError.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise LabkitError(
            f"{label} is damaged or was changed ({short(error)}); resume from another "
            "checkpoint, or start without resume"
        ) from error


class StateRecord:
    """A class whose instances may be stored in a checkpoint, with the names of its fields.

    Args:
        kind: The class whose instances are stored.
        names: Names of all fields of the class.

    Attributes:
        is_tuple: Whether the class is a named tuple, whose fields must be set all at once.
    """

    def __init__(self, kind: type, names: tuple[str, ...]) -> None:
        self.kind, self.names = kind, names
        self.is_tuple = issubclass(kind, tuple)
        self._lazy = {n for n in names if isinstance(getattr(kind, n, None), cached_property)}

    def values(self, instance: Any) -> dict[str, Any]:
        """Return the fields of an instance as a dictionary of values by field name."""
        if self.is_tuple:
            return dict(zip(self.names, instance, strict=True))
        namespace = vars(instance)
        return {name: namespace[name] for name in self.names if name in namespace}

    def blank(self) -> Any:
        """Return an instance without fields; neither `__init__` nor `__setstate__` runs."""
        return object.__new__(self.kind)

    def tuple_of(self, values: Mapping[str, Any]) -> Any:
        """Return a named tuple with the given field values, without calling its own `__new__`."""
        return tuple.__new__(self.kind, [values[name] for name in self.names])

    def validate_names(self, names: Mapping[str, Any]) -> None:
        """Raise an error unless `names` are exactly the field names of the class.

        Raises:
            LabkitError: A name is missing or unknown; the message lists all missing and unknown
                names.
        """
        wanted = set(self.names)
        if odd := (wanted - self._lazy - set(names)) | (set(names) - wanted):
            raise LabkitError(
                f"the saved state of {self.kind.__name__} must have the fields "
                f"{', '.join(self.names)}; missing or unknown are {', '.join(sorted(odd))}"
            )


_RECORDS: dict[str, StateRecord] = {}


def record(*names: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that allows instances of the class in checkpoints.

    Args:
        names: Names of the fields. Omit the names for a dataclass or a named tuple, which declares
            its fields itself.
    """

    def declare(kind: type[T]) -> type[T]:
        if kind.__name__ in _RECORDS:
            raise TypeError(
                f"two classes whose state is saved have the name {kind.__name__}: rename one "
                "of them"
            )
        _RECORDS[kind.__name__] = StateRecord(kind, names or _names(kind))
        return kind

    return declare


def record_of(kind: type) -> StateRecord | None:
    """Return the StateRecord of a class, or None if the class is not registered."""
    candidate = _RECORDS.get(kind.__name__)
    return candidate if candidate is not None and candidate.kind is kind else None


def record_named(name: str) -> StateRecord:
    """Return the StateRecord of the registered class with the given name.

    Raises:
        LabkitError: No class with the given name is registered.
    """
    if name not in _RECORDS:
        raise LabkitError(
            f"the saved state contains the unknown class {name!r:.80}; allowed: "
            f"{', '.join(sorted(_RECORDS))}"
        )
    return _RECORDS[name]


def _names(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind)) if is_dataclass(kind) else tuple(kind._fields)
