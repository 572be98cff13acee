"""The state of programs, encoded as text and arrays so that it can be stored and restored.

`ObjectWriter` encodes Python objects as nodes of JSON, which `ObjectReader` decodes.

Each node consists of the kind of an object and the object's data. Numbers, strings and None are
written without a node. The JSON `[n]` refers to node n. Through references, several nodes can share
an object or form a cycle. Nodes contain no code. The node of a record contains its fields and its
class name, which `labkit.common.state` registers.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError, short
from labkit.common.state import decoding, record, record_named, record_of
from labkit.compression import Compressor, parse

Node: TypeAlias = list[Any]

# The types in PLAIN are saved directly as JSON values, without a node that describes them.
PLAIN = frozenset({type(None), bool, int, float, str})


class ObjectWriter:
    """An encoder of Python objects as nodes of JSON.

    Args:
        outside: Mapping from names to existing objects. A node stores only the object's name.

    Attributes:
        nodes: The nodes of all objects that have been encoded.
        arrays: The arrays to which nodes refer by index.
    """

    def __init__(self, outside: Mapping[str, object]) -> None:
        self._outside = {id(thing): name for name, thing in outside.items()}
        self._numbers: dict[int, int] = {}
        # The list `_things` keeps all encoded objects alive, so that their ids stay unique.
        self._things: list[object] = []
        self.nodes: list[Node | None] = []
        self.arrays: list[np.ndarray] = []

    def value(self, item: Any) -> JSON:
        """Return a value for JSON; an object becomes the reference `[n]` to node number n.

        A plain value, such as a number or a text, stays unchanged.

        Raises:
            LabkitError: If the object cannot be stored, for example a function.
        """
        if type(item) in PLAIN:
            plain: JSON = item
            return plain
        if id(item) not in self._numbers:
            self._add(item)
        return [self._numbers[id(item)]]

    def _add(self, thing: Any) -> None:
        self._things.append(thing)
        if isinstance(thing, tuple):
            # A tuple cannot be changed after its creation. The nodes of a tuple's items must
            # therefore precede the tuple's node.
            node = self._node(thing)
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
        return [thing if type(thing) in PLAIN else self.value(thing) for thing in things]

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
            f"a state holds a {kind.__module__}.{kind.__qualname__}, which is not data; allowed: "
            "numbers, strings, containers, arrays and classes that `labkit.common.state.record` "
            "declares"
        )

    def _array(self, array: np.ndarray) -> int:
        if array.dtype.hasobject:
            raise LabkitError("a state holds an array of Python objects; allowed: numbers")
        self.arrays.append(array)
        return len(self.arrays) - 1


# A saved state has at most MOST_ALIKE keys with equal hash. A few keys have equal hashes by chance.
MOST_ALIKE = 32


class ObjectReader:
    """A decoder of nodes, which fills containers last, because objects may refer to each other.

    Args:
        arrays: The arrays to which nodes refer by index.
        outside: Mapping from names to existing objects. A node stores only the object's name.
    """

    def __init__(self, arrays: tuple[np.ndarray, ...], outside: Mapping[str, object]) -> None:
        self._arrays, self._outside = arrays, outside
        self._things: list[Any] = []
        self._fills: list[Callable[[], object]] = []
        # Sets and dicts are filled last. The hash of a key may depend on all fields of the key.
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
        """Restore the contents of all objects."""
        for fill in (*self._fills, *self._hashes):
            fill()

    def value(self, data: Any) -> Any:
        """Return plain data unchanged; for a JSON reference `[n]`, return the object of node n."""
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
        # Field names are converted to strings, because an attacker cannot construct many strings
        # with equal hashes.
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
    # Lookups are slow if many keys have the same hash. Numbers and tuples with equal hashes are
    # easy to construct.
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


SCHEMA = 1
# The constant LIMIT is the maximum number of characters in the JSON text of a saved state. Each
# training step of a worker adds about 500 characters to a state. A state reaches the limit after
# about half a million steps. JSON of empty lists needs 25 bytes of memory per character. A
# malicious text of maximum length can therefore use 7 GB.
LIMIT = 2**28


@record()
@dataclass(frozen=True)
class ProgramState:
    """A snapshot of objects: their structure as JSON text, and their read-only arrays.

    Attributes:
        form: JSON nodes that encode the objects; each array is replaced by its index in `arrays`.
        arrays: The arrays, to which the nodes refer by index.
    """

    form: str
    arrays: tuple[np.ndarray, ...]


def keep(value: Any, outside: Mapping[str, object]) -> ProgramState:
    """Return the current state of an object without copying its arrays.

    Args:
        value: Object to save.
        outside: Mapping from names to objects, to which the state refers but which it does not
            contain.

    Raises:
        LabkitError: If a part of the object cannot be stored, for example a function.
    """
    writer = ObjectWriter(outside)
    root = writer.value(value)
    form = json.dumps({"schema": SCHEMA, "root": root, "nodes": writer.nodes})
    return ProgramState(form, tuple(writer.arrays))


def restore_object(state: ProgramState, outside: Mapping[str, object]) -> Any:
    """Return a new object, decoded from a saved state.

    Raises:
        LabkitError: If the text is not a valid state, or contains a type that states may not
            contain.
    """
    with decoding("the state in the checkpoint"):
        content = _content(state.form)
        reader = ObjectReader(state.arrays, outside)
        for kind, data in content["nodes"]:
            reader.add(kind, data)
        reader.fill()
        return reader.value(content["root"])


def _content(form: str) -> Any:
    if not form.startswith("{"):
        raise LabkitError(
            f"the state in the checkpoint is not JSON of schema {SCHEMA}, which this labkit reads "
            "(earlier versions wrote pickles, which can run code); start without the checkpoint"
        )
    if len(form) > LIMIT:
        raise LabkitError(
            f"the state in the checkpoint has {len(form):,} characters; allowed: {LIMIT:,}; start "
            "without the checkpoint"
        )
    content = json.loads(form)
    if content["schema"] != SCHEMA:
        raise LabkitError(
            f"the state in the checkpoint has schema {short(content['schema'])}, but this labkit "
            f"reads schema {SCHEMA}; resume with the labkit version that wrote it"
        )
    return content
