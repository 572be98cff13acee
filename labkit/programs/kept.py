"""What a play keeps, as bytes and arrays: state that can be written down, and taken up again."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from labkit.common.errors import LabkitError

# Beside labkit's own classes, what states are made of.
_ALLOWED = {
    "builtins": {"set", "frozenset", "range", "slice"},
    "collections": {"deque", "defaultdict"},
    "itertools": {"count"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"scalar"},
    "numpy.random._pickle": {"__generator_ctor", "__bit_generator_ctor"},
    "numpy.random._pcg64": {"PCG64"},
    "numpy.random.bit_generator": {"__pyx_unpickle_SeedSequence", "SeedSequence"},
}


@dataclass(frozen=True)
class Kept:
    """Objects at one moment: how they hang together, and their arrays, which nobody writes into.

    Attributes:
        form: the objects, with numbers in the place of arrays.
        arrays: by that number.
        tensors: numbers of those that were TensorFlow's.
    """

    form: bytes
    arrays: tuple[np.ndarray, ...]
    tensors: frozenset[int] = field(default_factory=frozenset)


def keep(thing: Any, outside: Mapping[str, object]) -> Kept:
    """An object as it is now; its arrays are not copied, and those that are one stay one.

    Args:
        thing: the object.
        outside: by name, what it refers to and is not a part of it.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, outside)
    pickler.dump(thing)
    return Kept(file.getvalue(), tuple(pickler.arrays), frozenset(pickler.tensors))


def taken(kept: Kept, outside: Mapping[str, object]) -> Any:
    """The object anew.

    Raises:
        LabkitError: it names what no state is made of; such bytes are not labkit's.
    """
    return _Unpickler(kept, outside).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, outside: Mapping[str, object]) -> None:
        super().__init__(file, protocol=5)
        self._outside = {id(each): name for name, each in outside.items()}
        self._known: dict[int, int] = {}
        self._held: list[object] = []  # as long as their ids count
        self.arrays: list[np.ndarray] = []
        self.tensors: set[int] = set()

    def persistent_id(self, thing: Any) -> tuple[str, Any] | None:
        """Arrays by number, others from outside by name."""
        if id(thing) in self._outside:
            return "outside", self._outside[id(thing)]
        is_tensor = not isinstance(thing, np.ndarray) and _is_tensor(thing)
        if not is_tensor and not isinstance(thing, np.ndarray):
            return None
        if id(thing) not in self._known:
            self._known[id(thing)] = len(self.arrays)
            self._held.append(thing)
            if is_tensor:
                self.tensors.add(len(self.arrays))
            self.arrays.append(np.asarray(thing))
        return "array", self._known[id(thing)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, kept: Kept, outside: Mapping[str, object]) -> None:
        super().__init__(io.BytesIO(kept.form))
        self._kept, self._outside = kept, outside
        self._made: dict[int, Any] = {}

    def persistent_load(self, name: tuple[str, Any]) -> Any:
        """What stands for an array, or for something outside."""
        kind, which = name
        if kind == "outside":
            return self._outside[which]
        if which not in self._made:
            self._made[which] = self._kept.arrays[which]
            if which in self._kept.tensors:
                import tensorflow as tf

                self._made[which] = tf.constant(self._made[which])
        return self._made[which]

    def find_class(self, module: str, name: str) -> Any:
        """Classes of labkit's, and the few that states are made of."""
        if module.startswith("labkit.") and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type):
                return found
        elif name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise LabkitError(f"a kept state names {module}.{name}, which no state is made of")


def _is_tensor(thing: Any) -> bool:
    return type(thing).__module__.startswith("tensorflow.") and hasattr(thing, "numpy")
