"""Descriptions of gradients, their check on all ranks, and the guard against nonfinite values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypedDict

import numpy as np

from labkit.common.errors import LabkitError
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
    """Return the tensors of a gradient: one tensor, or rows and indices of `IndexedSlices`."""
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
    """Sum repeated rows of `IndexedSlices`, so that each row occurs once; keep other gradients."""
    import tensorflow as tf

    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, place = tf.unique(gradient.indices)
    rows = tf.math.unsorted_segment_sum(gradient.values, place, tf.size(indices))
    return tf.IndexedSlices(rows, indices, gradient.dense_shape)


def weight_by_rows(
    communicator: Communicator, gradients: Sequence[tf.Tensor | None], rows: int | tf.Tensor | None
) -> list[tf.Tensor | None]:
    r"""Scale gradients by \(n b_r / \sum_s b_s\), to weight their mean by the ranks' sample counts.

    Ranks can add the weighted gradients of several batches before an exchange. For each batch,
    ranks exchange only their numbers of samples (rows). If a rank has no samples, its gradients
    become 0, even if they are NaN.

    Args:
        communicator: The Communicator of the n ranks.
        gradients: This rank's gradients: tensors, `IndexedSlices` or None.
        rows: The number \(b_r\) of samples of this rank's gradients, a scalar. If `rows` is None,
            all ranks have the same number of samples.
    """
    import tensorflow as tf

    if communicator.size == 1 or rows is None:
        return list(gradients)

    def share(count: np.ndarray) -> np.float64:
        # The training step blocks during the exchange, so a spinning wait slows down no
        # computation.
        communicator.wait_policy.polite = False
        total = communicator.total(float(count), "the sum of all ranks' sample counts")
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
        Mismatch: An option or the number of gradients differs from that of rank 0. `Mismatch` is
            also raised if the shape, dtype or variable of a gradient differs. The message names the
            first difference.
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
    """Renumber Keras layer names from 0 for each layer type, and omit the number 0.

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


Policy: TypeAlias = Literal["stop", "skip", "clip"]


class BadNumbers(LabkitError):
    """A gradient or a loss is infinite or not a number (NaN)."""


class BadValues(TypedDict):
    """A record of non-finite values in one gradient or loss.

    Attributes:
        step: The number of the training step.
        rank: The rank whose gradient or loss is not finite.
        layer: The layer of the gradient, or "" if the loss has the non-finite values.
        elements: The number of non-finite elements.
    """

    step: int
    rank: int
    layer: str
    elements: int


class Guard:
    """A check of this rank's gradients for non-finite values, which reads each gradient once.

    With the policy "stop", the guard raises an error on this rank. The error on one rank ends the
    training of all ranks. With the policy "skip", all ranks skip the training step. With the policy
    "clip", the guard replaces non-finite values by 0.

    Args:
        policy: The reaction to non-finite values: "stop", "skip" or "clip".
        rank: The number of this rank.
        loss: A function that returns the loss of the current step. The function `loss` returns 0 if
            the loss is not known yet.

    Attributes:
        step: The number of the current training step.
        records: The records of all non-finite values that this guard has found.
    """

    def __init__(self, policy: Policy, rank: int, loss: Callable[[], float] = lambda: 0.0) -> None:
        self.policy, self.rank, self.loss = policy, rank, loss
        self.step = 0
        self.records: list[BadValues] = []

    def check_gradients(
        self,
        paths: Sequence[str],
        arrays: Sequence[np.ndarray],
        rank: int | None = None,
        loss: float | None = None,
    ) -> tuple[list[np.ndarray], bool]:
        """Check gradients; return them, and whether to skip the training step.

        Args:
            paths: Paths of the variables, in the order of backpropagation.
            arrays: The gradient of each variable.
            rank: The rank that computed the gradients; default: this rank.
            loss: The loss whose gradients are checked; default: the loss of the current step.

        Raises:
            BadNumbers: A gradient is not finite, and the policy is "stop".
        """
        results, skips = list(arrays), False
        for number, (path, array) in enumerate(zip(paths, arrays, strict=True)):
            if is_finite(array):
                continue
            good = np.isfinite(array)
            bad = int(good.size - np.count_nonzero(good))
            self.record(layer_of(path), bad, rank, path, loss)
            if self.policy == "clip":
                results[number] = np.where(good, array, array.dtype.type(0))
            skips = skips or self.policy == "skip"
        return results, skips

    def record(
        self,
        layer: str,
        elements: int,
        rank: int | None = None,
        path: str = "",
        loss: float | None = None,
    ) -> None:
        """Record non-finite values of a gradient or of the loss; the policy "stop" raises an error.

        Args:
            layer: The layer of the gradient, or "" if the loss has the non-finite values.
            elements: The number of non-finite elements.
            rank: The rank whose gradient or loss is not finite; default: this rank.
            path: The path of the gradient's variable, for the error message.
            loss: The value of the loss, for the error message; default: the loss of the current
                step.

        Raises:
            BadNumbers: The policy is "stop".
        """
        source = self.rank if rank is None else rank
        self.records.append(BadValues(step=self.step, rank=source, layer=layer, elements=elements))
        if self.policy != "stop":
            return
        what = f"the loss on rank {source} is not finite"
        if layer:
            what = f"the gradient of layer {layer!r} on rank {source} is not finite ({path})"
            if not np.isfinite(self.loss() if loss is None else loss):
                what += ", and the loss is not finite, either"
        raise BadNumbers(
            f"step {self.step}: {what}; lower the learning rate, clip gradients (clipnorm), or "
            "skip steps with non-finite values: on_nonfinite='skip'"
        )


def is_finite(array: np.ndarray) -> bool:
    """Return whether all elements are finite; only if squares overflow, read the array twice."""
    flat = array.reshape(-1)
    return bool(np.isfinite(np.dot(flat, flat)) or np.isfinite(flat).all())


def layer_of(path: str) -> str:
    """Return the name of the layer that contains a variable, from the variable's path."""
    parents = path.split("/")[:-1]
    return parents[-1] if parents else path
