"""What the optimizer's own `apply` truly receives on a rank, and what gradients were before."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.exchange import Exchange, Layer, Seen
from labkit.exchange.hooks import Hook, Rows, Variables
from labkit.keras import copy_of
from labkit.worker.conservation import TOLERANCE, Found


class Mark(NamedTuple):
    """Checksums of one variable in one step: of the gradient applied, of the weight after it."""

    name: str
    gradient: int
    weight: int = 0


class Applied:
    """Notes of the last step before the weights: of what optimizers are given to apply.

    Args:
        marks: whether to keep checksums of gradients and weights, step by step.
        sums: whether to keep the sum of the gradients of each variable, in float64.

    Attributes:
        marks: of all steps, one behind the other.
        sums: by variable, flat.
    """

    def __init__(self, marks: bool, sums: bool) -> None:
        self._marking, self._summing = marks, sums
        self.marks: list[Mark] = []
        self.sums: dict[str, np.ndarray] = {}

    def watch(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """An optimizer of the same kind and settings whose own `apply` is written down."""
        if not self._marking and not self._summing:
            return optimizer
        kind = type(optimizer)

        def apply(
            own: keras.optimizers.Optimizer,
            grads: Sequence[tf.Tensor | None],
            trainable_variables: Variables = None,
        ) -> tf.Tensor:
            variables = trainable_variables or own._trainable_variables
            pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
            names, scale = [v.path for _, v in pairs], getattr(own, "dynamic_scale", 1.0)
            given = [tf.convert_to_tensor(gradient) for gradient, _ in pairs]
            done = call(lambda by, *values: self.before(names, float(by), values), scale, *given)
            with tf.control_dependencies(in_graph(done)):
                found = kind.apply(own, grads, trainable_variables)
            if self._marking:
                call(lambda *values: self.after(values), *(v.value for _, v in pairs))
            return found

        return copy_of(optimizer, type(kind.__name__, (kind,), {"apply": apply}))

    def before(self, names: Sequence[str], scale: float, gradients: Sequence[np.ndarray]) -> None:
        """Write down what is about to be applied."""
        for name, gradient in zip(names, gradients, strict=True):
            if self._marking:
                self.marks.append(Mark(name, _checksum(gradient)))
            # A scaled loss that overflows is skipped by all: nothing is applied.
            if self._summing and (scale == 1.0 or np.isfinite(gradient).all()):
                flat = gradient.reshape(-1).astype(np.float64) / scale
                self.sums[name] = self.sums.get(name, 0.0) + flat

    def after(self, weights: Sequence[np.ndarray]) -> None:
        """Write down what weights have become."""
        first = len(self.marks) - len(weights)
        for place, weight in enumerate(weights, first):
            self.marks[place] = self.marks[place]._replace(weight=_checksum(weight))


def disagreement(marks: Sequence[Mark], replicas: Communicator) -> str:
    """Where ranks that hold the same weights first differ; "" where they never do (collective)."""
    told: list[list[Mark]] = replicas.allgather([*marks], "what replicas applied")
    if len({len(each) for each in told}) > 1:
        counts = ", ".join(str(len(each)) for each in told)
        return f"ranks have applied different numbers of gradients ({counts})"
    for everyone in zip(*told, strict=True):
        first = everyone[0]
        for rank, other in enumerate(everyone):
            if other[1] != first[1]:
                return f"the gradient of {first[0]} is not the same on ranks 0 and {rank}"
            if other[2] != first[2]:
                return f"{first[0]} is not the same on ranks 0 and {rank} after a step"
    return ""


class Brought(Hook):
    """Notes of the first step: what gradients are when backpropagation has made them.

    Kept beside what the exchange says of its buckets, so that both ends of its way are known.

    Args:
        communicator: the ranks.
        exchange: through which the gradients go.
    """

    name: ClassVar[str] = "dense"

    def __init__(self, communicator: Communicator, exchange: Exchange) -> None:
        self._communicator, self._exchange = communicator, exchange
        self._now: dict[int, tuple[np.ndarray, float]] = {}  # gradient and rows, by number
        # By variable, sums over all steps: gradients as they were brought, as the exchange says
        # that they were handed to it, and the means as it says that they came out.
        self._books: dict[str, dict[str, np.ndarray]] = {"brought": {}, "handed": {}, "mean": {}}
        self._sizes: dict[str, float] = {}  # of the greatest values, over all steps
        self._itemsize = 8

    def apply(
        self,
        inner: Callable[..., tf.Tensor],
        rows: Rows,
        gradients: list[tf.Tensor],
        variables: Variables = None,
    ) -> tf.Tensor:
        """Write each gradient down before it goes on."""
        there = [n for n, gradient in enumerate(gradients) if gradient is not None]
        noted = list(gradients)
        for number, place in enumerate(there):
            noted[place] = self._noted(number, gradients[place], rows)
        return inner(noted, variables)

    def _noted(self, number: int, gradient: tf.Tensor, rows: Rows) -> tf.Tensor:
        def note(value: np.ndarray, count: np.ndarray) -> None:
            self._now[number] = value.reshape(-1).astype(np.float64), float(count)

        count = tf.cast(1 if rows is None else rows, tf.int64)
        done = call(note, tf.convert_to_tensor(gradient), count)
        with tf.control_dependencies(in_graph(done)):
            return tf.nest.map_structure(tf.identity, gradient, expand_composites=True)

    def look(self, bucket: int, layers: Sequence[Layer], seen: Seen) -> None:
        """A watcher of `Exchange`: puts a bucket beside the gradients that it was made of."""
        self._itemsize = seen.given.dtype.itemsize
        slots = sorted(self._exchange.buckets[bucket].slots, key=lambda slot: slot.offset)
        _, rows = self._now.get(slots[0].variable, (None, 0.0))
        # Asked here: watchers are called in one order on all ranks.
        total = float(self._communicator.tally(np.array([rows]), "the rows of a step")[0])
        share = rows * self._communicator.size / total if total else 0.0
        for slot, layer in zip(slots, layers, strict=True):
            elements = slice(slot.start, slot.stop)
            ours = slice(layer.start, layer.stop)
            length = self._exchange.length(slot.variable)
            books = {"handed": seen.given[ours], "mean": seen.mean[ours]}
            if slot.variable in self._now:  # some schedules hand gradients over by themselves
                own = self._now[slot.variable][0][elements]
                books["brought"] = share * own if rows else np.zeros(len(own))
            for book, values in books.items():
                whole = self._books[book].setdefault(layer.name, np.zeros(length))
                whole[elements] += values
            size = _most(seen.given[ours]) + _most(seen.mean[ours])
            self._sizes[layer.name] = self._sizes.get(layer.name, 0.0) + size

    def found(self, applied: Applied) -> Iterator[Found]:
        """Both ends of the exchange: what it took, and what became of what it gave."""
        handed, brought, means = (self._books[book] for book in ("handed", "brought", "mean"))
        if not means:
            yield Found(np.inf, 0.0, "no gradients were compressed on their way to an optimizer")
        for name, mean in means.items():
            allowed = 4 * TOLERANCE[max(self._itemsize, 4)] * max(self._sizes[name], 1e-3)
            if name in brought:
                lost = _most(handed[name] - brought[name])
                yield Found(lost, allowed, f"other than the gradient of {name} was exchanged")
            there = applied.sums.get(name)
            off = np.inf if there is None or len(there) != len(mean) else _most(there - mean)
            yield Found(off, allowed, f"other than the mean gradient of {name} was applied")


def call(function: Callable[..., None], *values: tf.Tensor | float) -> tf.Operation | None:
    """Call a function with these values as arrays, in the training graph or at once."""
    return tf.numpy_function(function, list(values), [], stateful=True)


def in_graph(done: tf.Operation | None) -> list[tf.Operation]:
    """What must come first; at once it has."""
    return [done] if tf.inside_function() else []


def _checksum(values: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(values).data.cast("B"))


def _most(values: np.ndarray) -> float:
    return float(np.abs(values).max(initial=0.0))
