"""TensorFlow operations that exchange gradients and return the mean gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from labkit.exchange.bucket_layout import BucketLayout
from labkit.exchange.comm_thread import CommThread
from labkit.exchange.gradient import from_tensors, tensors_of

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True)
class Operations:
    """The TensorFlow operations in a training step that exchange one set of gradients.

    Attributes:
        layout: The layout of these gradients in parcels (a parcel is a bucket or a table).
        service: The communication thread, which exchanges buckets and tables during the training
            step.
        begin: A function of (layout, whether the step blocks) that is called first in each step.
        pack: A function of (parcel number, gradients, number of samples) that packs a bucket or a
            table.
        serve: A function of (parcel number) that exchanges a parcel (bucket or table) while the
            training step blocks.
    """

    layout: BucketLayout
    service: CommThread
    begin: Callable[[BucketLayout, bool], None]
    pack: Callable[[int, Sequence[np.ndarray], np.ndarray], None]
    serve: Callable[[int], None]

    def all_at_once(self, gradients: list[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
        """Exchange all gradients in one TensorFlow operation after backpropagation."""
        layout = self.layout
        tensors = [tensors_of(gradient) for gradient in gradients]
        spans = _spans(tensors)

        def exchange(count: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            self.begin(layout, True)
            for number, members in enumerate(layout.parcels):
                self.pack(number, [a for v in members for a in arrays[spans[v]]], count)
            for number in range(len(layout.parcels)):
                self.serve(number)
            return [part for v in range(len(spans)) for part in layout.mean(v)]

        inputs = [tensor for parts in tensors for tensor in parts]
        outputs = _call(exchange, [rows, *inputs], self._types(range(len(spans))))
        pairs = zip(spans, layout.signature, strict=True)
        return [from_tensors(outputs[span], gradient) for span, gradient in pairs]

    def one_by_one(self, gradients: list[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
        """Issue each bucket and table when its gradients are ready; then wait for all means."""
        import tensorflow as tf

        # A waiting operation blocks one of TensorFlow's threads. Therefore all parcels (buckets and
        # tables) must be issued before the first wait.
        with tf.control_dependencies(self.issue(gradients, rows)):
            return self.wait(range(len(gradients)))

    def issue(self, gradients: list[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
        """Return one operation per bucket or table, which passes it to the communication thread."""
        numbers = range(len(self.layout.parcels))
        return [self._issue(number, gradients, rows) for number in numbers]

    def wait(self, variables: Iterable[int]) -> list[tf.Tensor]:
        """Return the mean gradients of these variables, as tensors that wait for their parcels."""
        import tensorflow as tf

        chosen = list(variables)
        # `first` maps each parcel (bucket or table) to the variable that waits for it.
        first: dict[int, int] = {}
        for variable in chosen:
            for number in self.layout.holders(variable):
                first.setdefault(number, variable)
        means: list[tf.Tensor] = []
        before: list[tf.Tensor] = []
        for variable in chosen:
            awaited = [number for number, waiter in first.items() if waiter == variable]

            def fetch(
                numbers: tuple[int, ...] = tuple(awaited), variable: int = variable
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

        members = [gradients[variable] for variable in self.layout.parcels[number]]
        tensors = [tensor for gradient in members for tensor in tensors_of(gradient)]
        return tf.numpy_function(issue, [rows, *tensors], tf.int64)

    def _types(self, variables: Iterable[int]) -> list[str]:
        """Return the output dtypes of an operation that returns the variables' mean gradients."""
        chosen = [self.layout.signature[variable] for variable in variables]
        return [
            kind for gradient in chosen for kind in [gradient.dtype, "int32"][: 1 + gradient.rows]
        ]


def _call(
    function: Callable[..., list[np.ndarray]], inputs: list[tf.Tensor], types: list[str]
) -> list[tf.Tensor]:
    """Call a NumPy function in TensorFlow; return a list even if it has only one output."""
    import tensorflow as tf

    outputs = tf.numpy_function(function, inputs, types)
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def _spans(tensors: Sequence[Sequence[tf.Tensor]]) -> list[slice]:
    """Return, for each gradient, the slice of its tensors in the flat list of all tensors."""
    ends = np.cumsum([len(parts) for parts in tensors]).tolist()
    return [slice(end - len(parts), end) for end, parts in zip(ends, tensors, strict=True)]
