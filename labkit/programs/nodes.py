"""Objects as nodes of JSON, and back.

A node is a kind and its data. A number, a string or None stands for itself; `[n]` stands for node
n, so that an object with two owners stays one, and objects may hold each other in a ring. No node
names code: a record names a class of `labkit.common.state`, by its fields.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from labkit.common.content import JSON
from labkit.common.errors import LabkitError, short
from labkit.common.state import record_named, record_of
from labkit.compression import Compressor, parse

Node: TypeAlias = list[Any]

_Plain = bool | int | float | str | None
_PLAIN = frozenset({type(None), bool, int, float, str})


class Writer:
    """Makes nodes of objects.

    Args:
        outside: by name, objects of which nodes hold the name alone.

    Attributes:
        nodes: so far.
        arrays: to which nodes refer by number.
    """

    def __init__(self, outside: Mapping[str, object]) -> None:
        self._outside = {id(thing): name for name, thing in outside.items()}
        self._numbers: dict[int, int] = {}
        self._things: list[object] = []  # as long as their ids count
        self.nodes: list[Node | None] = []
        self.arrays: list[np.ndarray] = []

    def value(self, thing: Any) -> JSON:
        """The object itself, or the number of its node.

        Raises:
            LabkitError: it is no data.
        """
        if type(thing) in _PLAIN:
            plain: JSON = thing
            return plain
        if id(thing) not in self._numbers:
            self._add(thing)
        return [self._numbers[id(thing)]]

    def _add(self, thing: Any) -> None:
        self._things.append(thing)
        if isinstance(thing, tuple):
            node = self._node(thing)  # its parts come first: a reader makes a tuple at once
            self._numbers[id(thing)] = len(self.nodes)
            self.nodes.append(node)
        else:
            number = self._numbers[id(thing)] = len(self.nodes)
            self.nodes.append(None)
            self.nodes[number] = self._node(thing)

    def _node(self, thing: Any) -> Node:
        if id(thing) in self._outside:
            return ["outside", self._outside[id(thing)]]
        if (entry := record_of(type(thing))) is not None:
            values = entry.values(thing)
            return ["record", [entry.kind.__name__, [*values], self._values(values.values())]]
        if type(thing) in (list, set, tuple):
            return [type(thing).__name__, self._values(thing)]
        if type(thing) is dict:
            return ["dict", [self._values(thing), self._values(thing.values())]]
        if type(thing) is deque:
            return ["deque", [thing.maxlen, self._values(thing)]]
        return self._leaf(thing)

    def _values(self, things: Iterable[Any]) -> list[JSON]:
        return [thing if type(thing) in _PLAIN else self.value(thing) for thing in things]

    def _leaf(self, thing: Any) -> Node:
        match thing:
            case np.ndarray():
                return ["array", self._array(thing)]
            case np.generic() if not thing.dtype.hasobject:
                return ["scalar", [thing.dtype.name, thing.tobytes().hex()]]
            case np.dtype():
                return ["dtype", thing.name]
            case np.random.Generator() if isinstance(thing.bit_generator, np.random.PCG64):
                return ["generator", thing.bit_generator.state]
            case Compressor():
                return ["compressor", thing.to_json()]
        kind = type(thing)
        if kind.__module__.startswith("tensorflow.") and hasattr(thing, "numpy"):
            return ["tensor", self._array(np.asarray(thing))]
        raise LabkitError(
            f"a state holds a {kind.__module__}.{kind.__qualname__}, which is no data; allowed: "
            "numbers, strings, containers, arrays and classes that `labkit.common.state.record` "
            "declares"
        )

    def _array(self, array: np.ndarray) -> int:
        if array.dtype.hasobject:
            raise LabkitError("a state holds an array of Python objects; allowed: numbers")
        self.arrays.append(array)
        return len(self.arrays) - 1


class Reader:
    """Makes objects of nodes: those that may hold each other are empty until all are there.

    Args:
        arrays: to which nodes refer by number.
        outside: by name, objects of which nodes hold the name alone.
    """

    def __init__(self, arrays: tuple[np.ndarray, ...], outside: Mapping[str, object]) -> None:
        self._arrays, self._outside = arrays, outside
        self._things: list[Any] = []
        self._fills: list[Callable[[], object]] = []
        self._hashes: list[Callable[[], object]] = []  # after those: a hash needs all fields

    def add(self, kind: str, data: Any) -> None:
        """Make the object of the next node.

        Raises:
            LabkitError: no state has a node of this kind.
        """
        if kind not in _KINDS:
            raise LabkitError(f"a state has a node {short(kind)}; allowed: {', '.join(_KINDS)}")
        self._things.append(_KINDS[kind](self, data))

    def fill(self) -> None:
        """Put into objects what they hold."""
        for fill in (*self._fills, *self._hashes):
            fill()

    def value(self, data: Any) -> Any:
        """What stands for itself, or the object of a node."""
        if type(data) in _PLAIN:
            return data
        (number,) = data
        return _at(self._things, number)

    def _values(self, data: Iterable[Any]) -> list[Any]:
        return [entry if type(entry) in _PLAIN else self.value(entry) for entry in data]

    def _list(self, data: list[Any]) -> list[Any]:
        thing: list[Any] = []
        self._fills.append(lambda: thing.extend(self._values(data)))
        return thing

    def _tuple(self, data: list[Any]) -> tuple[Any, ...]:
        return tuple(self._values(data))

    def _set(self, data: list[Any]) -> set[Any]:
        thing: set[Any] = set()
        self._hashes.append(lambda: thing.update(map(_key, self._values(data))))
        return thing

    def _dict(self, data: list[Any]) -> dict[Any, Any]:
        thing: dict[Any, Any] = {}
        keys, values = data

        def fill() -> None:
            pairs = zip(map(_key, self._values(keys)), self._values(values), strict=True)
            thing.update(pairs)

        self._hashes.append(fill)
        return thing

    def _deque(self, data: list[Any]) -> deque[Any]:
        most, values = data
        thing: deque[Any] = deque(maxlen=most)
        self._fills.append(lambda: thing.extend(self._values(values)))
        return thing

    def _record(self, data: list[Any]) -> Any:
        name, names, values = data
        entry, pairs = record_named(name), dict(zip(names, values, strict=True))
        entry.check(pairs)
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
            raise LabkitError("a state names a type of Python objects; allowed: those of numbers")
        return dtype

    def _generator(self, state: dict[str, Any]) -> np.random.Generator:
        bits = np.random.PCG64()
        bits.state = state
        return np.random.Generator(bits)

    def _compressor(self, fields: dict[str, JSON]) -> Compressor:
        return parse({**fields})


def _key(thing: Any) -> Any:
    """A key that has a hash at once; that of tuples in tuples may take forever."""
    parts = thing if isinstance(thing, tuple) else (thing,)
    for part in parts:
        if not isinstance(part, np.generic | _Plain) and type(part).__hash__ is not object.__hash__:
            raise LabkitError(
                f"a state has a key of type {type(part).__name__}; allowed: numbers, strings, "
                "tuples of these, and records that are the same only as themselves"
            )
    return thing


def _at(things: Any, number: int) -> Any:
    if number < 0:  # Python would count it from the end
        raise IndexError(f"node {number}")
    return things[number]


_KINDS: dict[str, Callable[[Reader, Any], Any]] = {
    "list": Reader._list,
    "tuple": Reader._tuple,
    "set": Reader._set,
    "dict": Reader._dict,
    "deque": Reader._deque,
    "record": Reader._record,
    "outside": Reader._outsider,
    "array": Reader._array,
    "tensor": Reader._tensor,
    "scalar": Reader._scalar,
    "dtype": Reader._dtype,
    "generator": Reader._generator,
    "compressor": Reader._compressor,
}
