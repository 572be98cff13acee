"""What a gradient is to the exchange, and the agreement that all ranks have the same ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from labkit.communicator import Communicator, Mismatch

if TYPE_CHECKING:
    import tensorflow as tf


class Gradient(NamedTuple):
    """A gradient before it has values.

    Attributes:
        name: of its variable.
        shape, dtype: of the whole.
        rows: it travels as those of its rows that some rank has, of a table such as an embedding.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rows: bool = False

    @property
    def told(self) -> str:
        """It, in an error."""
        return f"{'rows of ' if self.rows else ''}{self.dtype}{list(self.shape)} for {self.name}"


Signature: TypeAlias = list[Gradient]


def signature_of(gradients: Sequence[tf.Tensor], names: Sequence[str]) -> Signature:
    """What these are: tensors, `IndexedSlices`, or the variables that they are of."""
    import tensorflow as tf

    def shape(of: tf.Tensor) -> tuple[int, ...]:
        if isinstance(of, tf.IndexedSlices):
            return tuple(int(length) for length in tf.get_static_value(of.dense_shape))
        return tuple(of.shape.as_list())

    return [
        Gradient(name, shape(g), g.dtype.name, isinstance(g, tf.IndexedSlices))
        for name, g in zip(names, gradients, strict=True)
    ]


def tensors_of(gradient: tf.Tensor | tf.IndexedSlices) -> list[tf.Tensor]:
    """What an operation is given of it: itself; of slices, their rows and whose they are."""
    import tensorflow as tf

    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices]
    return [gradient]


def from_tensors(tensors: Sequence[tf.Tensor], like: Gradient) -> tf.Tensor | tf.IndexedSlices:
    """A mean gradient of what an operation has returned, in the shapes that those lose."""
    import tensorflow as tf

    if not like.rows:
        return tf.reshape(tensors[0], like.shape)
    values, indices = tensors
    values.set_shape((None, *like.shape[1:]))
    indices.set_shape((None,))
    return tf.IndexedSlices(values, indices, tf.constant(like.shape, tf.int64))


def added_up(gradient: tf.Tensor | tf.IndexedSlices | None) -> tf.Tensor | tf.IndexedSlices | None:
    """Slices with each row once, as those of a mean are; anything else as it is."""
    import tensorflow as tf

    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, place = tf.unique(gradient.indices)
    rows = tf.math.unsorted_segment_sum(gradient.values, place, tf.size(indices))
    return tf.IndexedSlices(rows, indices, gradient.dense_shape)


def weighed(
    communicator: Communicator, gradients: Sequence[tf.Tensor | None], rows: int | tf.Tensor | None
) -> list[tf.Tensor | None]:
    r"""Gradients times \(n b_r / \sum_s b_s\): the plain mean of n ranks' is that by rows.

    So gradients of several batches can be added up on each rank, and travel once. Only the number
    of rows does so in each; what has none counts 0, even what is not a number.

    Args:
        communicator: the n ranks.
        gradients: tensors, `IndexedSlices` or None.
        rows: scalar, the number \(b_r\) of samples behind this rank's gradients; None: as many on
            every rank.
    """
    import tensorflow as tf

    if communicator.size == 1 or rows is None:
        return list(gradients)

    def share(count: np.ndarray) -> np.float64:
        communicator.patience.polite = False  # the step stands still
        total = communicator.total(float(count), "the rows of a batch")
        return np.float64(communicator.size * float(count) / total if total else 0.0)

    found = tf.ensure_shape(tf.numpy_function(share, [tf.cast(rows, tf.int64)], tf.float64), ())

    def times(gradient: tf.Tensor | tf.IndexedSlices | None) -> tf.Tensor | None:
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(times(gradient.values), gradient.indices, gradient.dense_shape)
        if gradient is None:
            return None
        return tf.math.multiply_no_nan(gradient, tf.cast(found, gradient.dtype))

    return [times(gradient) for gradient in gradients]


def agree(
    communicator: Communicator, signature: Signature, options: Mapping[str, str] | None = None
) -> None:
    """Check that all ranks have the same gradients, to be exchanged in the same way.

    Args:
        communicator: the ranks.
        signature: this rank's gradients.
        options: of the exchange, by name.

    Raises:
        Mismatch: names the first rank and what differs: an option; how many there are; a shape or
            dtype; whose gradient it is.
    """
    told = communicator.allgather((options or {}, signature), "the agreement on the gradients")
    for rank, other in enumerate(told):
        if other != told[0]:
            _compare(rank, *other, *told[0])


def _compare(
    rank: int,
    options: Mapping[str, str],
    signature: Signature,
    first_options: Mapping[str, str],
    first: Signature,
) -> None:
    for name, option in options.items():
        if option != first_options[name]:
            raise Mismatch(
                f"rank {rank} exchanges with {name}={option}, rank 0 with "
                f"{name}={first_options[name]}: give every rank the same"
            )
    if len(signature) != len(first):
        raise Mismatch(
            f"rank {rank} has {len(signature)} gradients, rank 0 has {len(first)}: "
            "every rank must train the same model"
        )
    own = zip(signature, counted([gradient.name for gradient in signature]), strict=True)
    others = zip(first, counted([gradient.name for gradient in first]), strict=True)
    for (mine, place), (theirs, their_place) in zip(own, others, strict=True):
        if mine[1:] != theirs[1:] or place != their_place:
            raise Mismatch(
                f"rank {rank} has {mine.told}, rank 0 has {theirs.told}: "
                "every rank must train the same model"
            )


def counted(names: Sequence[str]) -> list[str]:
    """Names as they would be in a process that has made no other layers before.

        sequential_3/dense_7/kernel  sequential_3/dense_9/kernel
        -> sequential/dense/kernel   sequential/dense 1/kernel

    Keras counts the names of layers on, and ranks may have made more of them.
    """
    parts = [[_split(part) for part in name.split("/")] for name in names]
    counts: dict[str, set[int]] = {}
    for base, count in (part for name in parts for part in name):
        counts.setdefault(base, set()).add(count)
    places = {base: {c: n for n, c in enumerate(sorted(known))} for base, known in counts.items()}

    def place(base: str, count: int) -> str:
        number = places[base][count]
        return f"{base} {number}" if number else base

    return ["/".join(place(*part) for part in name) for name in parts]


def _split(part: str) -> tuple[str, int]:
    """A layer's name and the count behind it: -1 where there is none."""
    found = re.fullmatch(r"(.+)_(\d+)", part)
    return (found[1], int(found[2])) if found else (part, -1)


def dtypes_of(gradients: Sequence[tf.Tensor]) -> list[np.dtype[np.generic]]:
    """As NumPy has them."""
    return [np.dtype(gradient.dtype.as_numpy_dtype) for gradient in gradients]
