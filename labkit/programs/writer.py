"""Encoding of Python objects as nodes of JSON, which `labkit.programs.reader` decodes.

Each node consists of the kind of an object and the object's data. Numbers, strings and None are not
nodes; they are written as they are. The JSON `[n]` refers to node n, so that objects may be shared
and references may form cycles. Nodes contain no code: a record's node contains the fields and the
class name from `labkit.common.state`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError
from labkit.common.state import record_of
from labkit.compression import Compressor

Node: TypeAlias = list[Any]

PLAIN = frozenset({type(None), bool, int, float, str})  # types of values written without a node


class ObjectWriter:
    """An encoder of Python objects as nodes of JSON.

    Args:
        outside: Existing objects, to which nodes refer by name, because the nodes do not encode
            them.

    Attributes:
        nodes: The nodes of all objects that have been encoded.
        arrays: The arrays to which nodes refer by index.
    """

    def __init__(self, outside: Mapping[str, object]) -> None:
        self._outside = {id(thing): name for name, thing in outside.items()}
        self._numbers: dict[int, int] = {}
        self._things: list[object] = []  # keeps the objects alive, so that their ids stay unique
        self.nodes: list[Node | None] = []
        self.arrays: list[np.ndarray] = []

    def value(self, item: Any) -> JSON:
        """Return a plain value unchanged, or a reference to the node of an object.

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
            # A tuple cannot be changed after its creation, so the nodes of its items must precede
            # its own node.
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
