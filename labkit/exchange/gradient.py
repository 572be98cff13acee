"""Descriptions of gradients, and the check that all ranks have the same gradients."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from labkit.communicator import Communicator, Mismatch

if TYPE_CHECKING:
    import tensorflow as tf


class GradientSpec(NamedTuple):
    """The description of one variable's gradient.

    Attributes:
        name: The name of the variable.
        shape, dtype: The shape and dtype of the variable.
        rows: Whether ranks send only the changed rows of the gradient, for example for an embedding
            table.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rows: bool = False

    @property
    def description(self) -> str:
        """The description as text, for error messages."""
        return f"{'rows of ' if self.rows else ''}{self.dtype}{list(self.shape)} for {self.name}"


Signature: TypeAlias = list[GradientSpec]


def signature_of(gradients: Sequence[tf.Tensor], names: Sequence[str]) -> Signature:
    """Return the descriptions of gradients, given as tensors, `IndexedSlices`, or variables."""
    import tensorflow as tf

    def shape(of: tf.Tensor) -> tuple[int, ...]:
        if isinstance(of, tf.IndexedSlices):
            return tuple(int(length) for length in tf.get_static_value(of.dense_shape))
        return tuple(of.shape.as_list())

    return [
        GradientSpec(name, shape(g), g.dtype.name, isinstance(g, tf.IndexedSlices))
        for name, g in zip(names, gradients, strict=True)
    ]


def tensors_of(gradient: tf.Tensor | tf.IndexedSlices) -> list[tf.Tensor]:
    """Return the tensors of a gradient as inputs of an operation; for slices, rows and indices."""
    import tensorflow as tf

    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices]
    return [gradient]


def from_tensors(tensors: Sequence[tf.Tensor], like: GradientSpec) -> tf.Tensor | tf.IndexedSlices:
    """Rebuild a mean gradient with its static shape from an operation's output tensors."""
    import tensorflow as tf

    if not like.rows:
        return tf.reshape(tensors[0], like.shape)
    values, indices = tensors
    values.set_shape((None, *like.shape[1:]))
    indices.set_shape((None,))
    return tf.IndexedSlices(values, indices, tf.constant(like.shape, tf.int64))


def sum_repeated_rows(
    gradient: tf.Tensor | tf.IndexedSlices | None,
) -> tf.Tensor | tf.IndexedSlices | None:
    """Sum repeated rows of slices, so that each row occurs once; do not change other gradients."""
    import tensorflow as tf

    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, place = tf.unique(gradient.indices)
    rows = tf.math.unsorted_segment_sum(gradient.values, place, tf.size(indices))
    return tf.IndexedSlices(rows, indices, gradient.dense_shape)


def weight_by_rows(
    communicator: Communicator, gradients: Sequence[tf.Tensor | None], rows: int | tf.Tensor | None
) -> list[tf.Tensor | None]:
    r"""Scale gradients by \(n b_r / \sum_s b_s\), so that their plain mean weights ranks by
    samples.

    Because the gradients are already weighted, ranks can accumulate several batches, and exchange
    only the sums. For each batch, ranks then exchange only their numbers of samples (rows).
    If a rank has no samples, its gradients become 0, even if they are NaN.

    Args:
        communicator: The Communicator of the n ranks.
        gradients: This rank's gradients: tensors, `IndexedSlices` or None.
        rows: The number \(b_r\) of samples of this rank's gradients, a scalar; None: all ranks have
            the same number.
    """
    import tensorflow as tf

    if communicator.size == 1 or rows is None:
        return list(gradients)

    def share(count: np.ndarray) -> np.float64:
        communicator.wait_policy.polite = False  # a spin loop is harmless while the step blocks
        total = communicator.total(float(count), "the sum of the ranks' batch rows")
        return np.float64(communicator.size * float(count) / total if total else 0.0)

    factor = tf.ensure_shape(tf.numpy_function(share, [tf.cast(rows, tf.int64)], tf.float64), ())

    def scaled(gradient: tf.Tensor | tf.IndexedSlices | None) -> tf.Tensor | None:
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(scaled(gradient.values), gradient.indices, gradient.dense_shape)
        if gradient is None:
            return None
        return tf.math.multiply_no_nan(gradient, tf.cast(factor, gradient.dtype))

    return [scaled(gradient) for gradient in gradients]


def validate_agreement(
    communicator: Communicator, signature: Signature, options: Mapping[str, str] | None = None
) -> None:
    """Validate that all ranks have the same gradients and exchange options (collective).

    Args:
        communicator: The Communicator of the ranks.
        signature: The descriptions of this rank's gradients.
        options: The options of this rank's exchange: for each option name, its value as text.

    Raises:
        Mismatch: An option, or the number, shape, dtype or variable of a gradient, differs from
            that of rank 0; the message names the first difference.
    """
    descriptions = communicator.allgather(
        (options or {}, signature), "the comparison of the gradients' shapes on all ranks"
    )
    for rank, other in enumerate(descriptions):
        if other != descriptions[0]:
            _compare(rank, *other, *descriptions[0])


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
                f"rank {rank} exchanges gradients with {name}={option}, but rank 0 with "
                f"{name}={first_options[name]}: give every rank the same value"
            )
    if len(signature) != len(first):
        raise Mismatch(
            f"rank {rank} has {len(signature)} gradients, but rank 0 has {len(first)}: every "
            "rank must train the same model"
        )
    names = zip(signature, renumber_names([gradient.name for gradient in signature]), strict=True)
    first_names = zip(first, renumber_names([gradient.name for gradient in first]), strict=True)
    for (gradient, name), (other, other_name) in zip(names, first_names, strict=True):
        if gradient[1:] != other[1:] or name != other_name:
            raise Mismatch(
                f"rank {rank} has the gradient {gradient.description}, but rank 0 has "
                f"{other.description}: every rank must train the same model"
            )


def renumber_names(names: Sequence[str]) -> list[str]:
    """Renumber the layers in Keras names, as if the process had created only these layers.

        sequential_3/dense_7/kernel  sequential_3/dense_9/kernel
        -> sequential/dense/kernel   sequential/dense 1/kernel

    Keras numbers all layers of a process, and ranks may have created different numbers of layers.
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
    """Split a layer's name into base name and number; the number is -1 if there is none."""
    match = re.fullmatch(r"(.+)_(\d+)", part)
    return (match[1], int(match[2])) if match else (part, -1)


def dtypes_of(gradients: Sequence[tf.Tensor]) -> list[np.dtype[np.generic]]:
    """Return the NumPy dtypes of the gradients."""
    return [np.dtype(gradient.dtype.as_numpy_dtype) for gradient in gradients]
