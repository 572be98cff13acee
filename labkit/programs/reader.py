"""A decoder for nodes that `labkit.programs.writer` encodes; decoding executes no code."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError, short
from labkit.common.state import record_named
from labkit.compression import Compressor, parse
from labkit.programs.writer import PLAIN

MOST_ALIKE = 32  # maximum number of keys with equal hash; a few keys have equal hashes by chance


class ObjectReader:
    """A decoder of nodes; it fills containers last, so that objects may refer to each other.

    Args:
        arrays: The arrays to which nodes refer by index.
        outside: Existing objects, to which nodes refer by name, because the nodes do not encode
            them.
    """

    def __init__(self, arrays: tuple[np.ndarray, ...], outside: Mapping[str, object]) -> None:
        self._arrays, self._outside = arrays, outside
        self._things: list[Any] = []
        self._fills: list[Callable[[], object]] = []
        # Sets and dicts are filled last, because the hash of a key may depend on all fields of the
        # key.
        self._hashes: list[Callable[[], object]] = []

    def add(self, kind: str, data: Any) -> None:
        """Create the object that the next node encodes; a container remains empty until `fill`.

        Raises:
            LabkitError: If the node has an unknown kind.
        """
        if kind not in _KINDS:
            raise LabkitError(f"a state has a node {short(kind)}; allowed: {', '.join(_KINDS)}")
        self._things.append(_KINDS[kind](self, data))

    def fill(self) -> None:
        """Fill all created containers and records with their contents."""
        for fill in (*self._fills, *self._hashes):
            fill()

    def value(self, data: Any) -> Any:
        """Return plain data unchanged; if `data` is a node's number, return the node's object."""
        if type(data) in PLAIN:
            return data
        (number,) = data
        return _at(self._things, number)

    def _values(self, data: Iterable[Any]) -> list[Any]:
        return [entry if type(entry) in PLAIN else self.value(entry) for entry in data]

    def _list(self, data: list[Any]) -> list[Any]:
        thing: list[Any] = []
        self._fills.append(lambda: thing.extend(self._values(data)))
        return thing

    def _tuple(self, data: list[Any]) -> tuple[Any, ...]:
        return tuple(self._values(data))

    def _set(self, data: list[Any]) -> set[Any]:
        thing: set[Any] = set()

        def fill() -> None:
            members = self._values(data)
            _refuse_slow(members)
            thing.update(members)

        self._hashes.append(fill)
        return thing

    def _dict(self, data: list[Any]) -> dict[Any, Any]:
        thing: dict[Any, Any] = {}
        keys, values = data

        def fill() -> None:
            names = self._values(keys)
            _refuse_slow(names)
            thing.update(zip(names, self._values(values), strict=True))

        self._hashes.append(fill)
        return thing

    def _deque(self, data: list[Any]) -> deque[Any]:
        most, values = data
        thing: deque[Any] = deque(maxlen=most)
        self._fills.append(lambda: thing.extend(self._values(values)))
        return thing

    def _record(self, data: list[Any]) -> Any:
        name, names, values = data
        # Names are converted to strings, because nobody can construct strings with equal hashes.
        entry, pairs = record_named(name), dict(zip(map(str, names), values, strict=True))
        entry.validate_names(pairs)
        if entry.is_tuple:
            return entry.tuple_of({name: self.value(value) for name, value in pairs.items()})
        thing = entry.blank()

        def fill() -> None:
            vars(thing).update(zip(pairs, self._values(pairs.values()), strict=True))

        self._fills.append(fill)
        return thing

    def _outsider(self, name: str) -> object:
        return self._outside[name]

    def _array(self, number: int) -> np.ndarray:
        array: np.ndarray = _at(self._arrays, number)
        return array

    def _tensor(self, number: int) -> Any:
        import tensorflow as tf

        return tf.constant(self._array(number))

    def _scalar(self, data: list[str]) -> Any:
        name, value = data
        return np.frombuffer(bytes.fromhex(value), self._dtype(name))[0]

    def _dtype(self, name: str) -> np.dtype[Any]:
        import ml_dtypes  # noqa: F401  # teaches NumPy bfloat16

        dtype = np.dtype(str(name))
        if dtype.hasobject:
            raise LabkitError("a state names a dtype of Python objects; allowed: numeric dtypes")
        return dtype

    def _generator(self, state: Any) -> np.random.Generator:
        bits = np.random.PCG64()
        bits.state = state
        return np.random.Generator(bits)

    def _compressor(self, fields: dict[str, JSON]) -> Compressor:
        return parse({**fields})


def _refuse_slow(keys: Sequence[Any]) -> None:
    """Raise an error if keys are slow to hash (nested tuples), or if too many have equal hashes."""
    for key in keys:
        if type(key) in PLAIN:
            continue
        for part in key if isinstance(key, tuple) else (key,):
            kind: Any = type(part)
            is_plain = kind in PLAIN or isinstance(part, np.generic)
            if not is_plain and kind.__hash__ is not object.__hash__:
                raise LabkitError(
                    f"a state has a key of type {kind.__name__}; allowed: numbers, strings, "
                    "tuples of these, and records that are compared by identity"
                )
    # Lookups are slow if many keys have the same hash; such keys are easy to construct from numbers
    # and tuples.
    largest_collision = max(Counter(map(hash, keys)).values(), default=0)
    if largest_collision > MOST_ALIKE:
        raise LabkitError(
            f"a state has {largest_collision:,} keys with the same hash; allowed: {MOST_ALIKE}"
        )


def _at(sequence: Any, number: int) -> Any:
    if number < 0:  # Python would count a negative index from the list's end
        raise IndexError(f"node {number}")
    return sequence[number]


_KINDS: dict[str, Callable[[ObjectReader, Any], Any]] = {
    "list": ObjectReader._list,
    "tuple": ObjectReader._tuple,
    "set": ObjectReader._set,
    "dict": ObjectReader._dict,
    "deque": ObjectReader._deque,
    "record": ObjectReader._record,
    "outside": ObjectReader._outsider,
    "array": ObjectReader._array,
    "tensor": ObjectReader._tensor,
    "scalar": ObjectReader._scalar,
    "dtype": ObjectReader._dtype,
    "generator": ObjectReader._generator,
    "compressor": ObjectReader._compressor,
}
