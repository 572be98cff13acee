"""The exchange as operations of the training graph: gradients go in, means come out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from labkit.exchange.comm_thread import Service
from labkit.exchange.gradient import from_tensors, tensors_of
from labkit.exchange.layout import Layout

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True)
class Operations:
    """What a training step holds of the exchange of one set of gradients.

    Attributes:
        layout: of these gradients.
        service: serves parcels while the step goes on.
        begin: called first in each step, with the layout and whether the step stands still.
        pack: takes a parcel's number, its gradients and the rows behind them.
        serve: exchanges a parcel, while the step stands still.
    """

    layout: Layout
    service: Service
    begin: Callable[[Layout, bool], None]
    pack: Callable[[int, Sequence[np.ndarray], np.ndarray], None]
    serve: Callable[[int], None]

    def all_at_once(self, gradients: list[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
        """One operation after backpropagation: pack, sum, hand out."""
        layout = self.layout
        tensors = [tensors_of(gradient) for gradient in gradients]
        spans = _spans(tensors)

        def exchange(count: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            self.begin(layout, True)
            for number, held in enumerate(layout.parcels):
                self.pack(number, [a for v in held for a in arrays[spans[v]]], count)
            for number in range(len(layout.parcels)):
                self.serve(number)
            return [part for v in range(len(spans)) for part in layout.mean(v)]

        given = [tensor for own in tensors for tensor in own]
        found = _call(exchange, [rows, *given], self._types(range(len(spans))))
        pairs = zip(spans, layout.signature, strict=True)
        return [from_tensors(found[span], each) for span, each in pairs]

    def one_by_one(self, gradients: list[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
        """An issue operation for each parcel, run when its gradients are there; then the waits."""
        import tensorflow as tf

        # Waits stand still in a thread of TensorFlow's: none before the last issue.
        with tf.control_dependencies(self.issue(gradients, rows)):
            return self.wait(range(len(gradients)))

    def issue(self, gradients: list[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
        """Operations that hand each parcel to the communication thread; their tokens."""
        numbers = range(len(self.layout.parcels))
        return [self._issue(number, gradients, rows) for number in numbers]

    def wait(self, variables: Iterable[int]) -> list[tf.Tensor]:
        """The means of these variables, as soon as the last of their parcels is there."""
        import tensorflow as tf

        chosen = list(variables)
        first: dict[int, int] = {}  # each parcel is waited for once, by the first variable in it
        for variable in chosen:
            for number in self.layout.holders(variable):
                first.setdefault(number, variable)
        means: list[tf.Tensor] = []
        before: list[tf.Tensor] = []
        for variable in chosen:
            own = [number for number, waiter in first.items() if waiter == variable]

            def fetch(
                numbers: tuple[int, ...] = tuple(own), variable: int = variable
            ) -> list[np.ndarray]:
                for number in numbers:
                    self.service.wait(number)
                return self.layout.mean(variable)

            with tf.control_dependencies(before):
                before = _call(fetch, [], self._types([variable]))
            means.append(from_tensors(before, self.layout.signature[variable]))
        return means

    def _issue(self, number: int, gradients: list[tf.Tensor], rows: tf.Tensor) -> tf.Tensor:
        import tensorflow as tf

        def issue(count: np.ndarray, *arrays: np.ndarray) -> np.int64:
            self.begin(self.layout, False)
            self.pack(number, arrays, count)
            self.service.issue(number)
            return np.int64(number)

        held = [gradients[variable] for variable in self.layout.parcels[number]]
        own = [tensor for gradient in held for tensor in tensors_of(gradient)]
        return tf.numpy_function(issue, [rows, *own], tf.int64)

    def _types(self, variables: Iterable[int]) -> list[str]:
        """Of what an operation returns as the means of these."""
        chosen = [self.layout.signature[variable] for variable in variables]
        return [
            kind for gradient in chosen for kind in [gradient.dtype, "int32"][: 1 + gradient.rows]
        ]


def _call(
    function: Callable[..., list[np.ndarray]], given: list[tf.Tensor], types: list[str]
) -> list[tf.Tensor]:
    """What the operation returns: outside a graph, TensorFlow makes of one tensor no list."""
    import tensorflow as tf

    found = tf.numpy_function(function, given, types)
    return list(found) if isinstance(found, list | tuple) else [found]


def _spans(tensors: Sequence[Sequence[tf.Tensor]]) -> list[slice]:
    """Where each gradient's own are, one behind the other."""
    ends = np.cumsum([len(own) for own in tensors]).tolist()
    return [slice(end - len(own), end) for end, own in zip(ends, tensors, strict=True)]
