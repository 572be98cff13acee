"""Magnitude pruning: the weights of smallest magnitude become zero, at once or gradually."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import keras
import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from labkit.common.errors import InvalidInput
from labkit.datasets import Dataset
from labkit.deployment import sparse_file
from labkit.deployment.smaller_models import CompressedModel, FineTuned, uncompiled_copy

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


Scope = Literal["layer", "global"]


def kernels(model: keras.Model) -> list[keras.Variable]:
    """Return the trainable kernels of a model, including recurrent and depthwise kernels."""
    return [weight for weight in model.trainable_variables if weight.name.endswith("kernel")]


def smallest(
    weights: Sequence[keras.Variable], sparsity: float, scope: Scope
) -> list[NDArray[np.bool_]]:
    """Return masks that select the round(sparsity * n) smallest of n weights by magnitude.

    Args:
        weights: Variables to select from, of any shapes.
        sparsity: Fraction of the weights to select, from 0 to 1.
        scope: "layer" selects the fraction `sparsity` of each variable; "global" selects this
            fraction of the weights of all variables together.
    """
    magnitudes = [np.abs(weight.numpy()).astype(np.float64).ravel() for weight in weights]
    if scope == "global":
        chosen = _smallest(np.concatenate(magnitudes), sparsity)
        boundaries = np.cumsum([len(part) for part in magnitudes])
        parts = np.split(chosen, boundaries[:-1])
    else:
        parts = [_smallest(part, sparsity) for part in magnitudes]
    return [part.reshape(weight.shape) for part, weight in zip(parts, weights, strict=True)]


def set_to_zero(weights: Sequence[keras.Variable], masks: Sequence[NDArray[np.bool_]]) -> None:
    """Set masked weights to +0.0, because a sparse file would store -0.0 as a nonzero value."""
    for weight, pruned in zip(weights, masks, strict=True):
        values = weight.numpy()
        weight.assign(np.where(pruned, np.zeros((), values.dtype), values))


def _smallest(magnitudes: NDArray[np.float64], sparsity: float) -> NDArray[np.bool_]:
    count = round(sparsity * len(magnitudes))
    chosen = np.zeros(len(magnitudes), bool)
    # Among weights of equal magnitude, the first ones are selected.
    chosen[np.argsort(magnitudes, kind="stable")[:count]] = True
    return chosen


RAMP = 0.75  # fraction of fine-tuning during which gradual pruning increases sparsity
PRUNINGS = 20  # approximate number of prunings in gradual pruning


class Prune(FineTuned):
    r"""Set the kernel weights of smallest magnitude to zero, and keep them at zero.

    For the sparsity \(s\), exactly \(\mathrm{round}(s\,n)\) of \(n\) weights become zero. The \(n\)
    weights are those of each kernel, or of all kernels together. Biases, normalisation and
    embeddings are not pruned. Inference is not faster, because Keras does not compute with sparse
    matrices. The pruned model's file is smaller, see `labkit.deployment.sparse_file`.

    Args:
        sparsity: Fraction of the kernel weights that become zero, above 0 and below 1; default:
            0.9.
        scope: "layer" prunes the same fraction of every kernel; "global" prunes the smallest
            weights of all kernels together; default: "global".
        schedule: "one_shot" prunes once, before the remaining weights are trained. "gradual" prunes
            about 20 times during the first 3/4 of the epochs, see `labkit.deployment.prune`.
            The default schedule is "one_shot".
        epochs: Number of epochs of fine-tuning; "gradual" needs at least 1; default: 0.

    Source: Han, Pool, Tran, Dally, "Learning both weights and connections for efficient neural
    networks", 2015, arXiv 1506.02626. Gradual: Zhu, Gupta, "To prune, or not to prune", 2017, arXiv
    1710.01878. Difference from the papers: a trained model is pruned, and the gradual schedule
    prunes about 20 times. Pruned weights are set to zero after every training step, instead of
    being masked in the forward pass.
    """

    family: ClassVar[str] = "prune"
    suffix: ClassVar[str] = ".sparse"
    sparsity: float = Field(default=0.9, gt=0, lt=1)
    scope: Scope = "global"
    schedule: Literal["one_shot", "gradual"] = "one_shot"

    @model_validator(mode="after")
    def _trains(self) -> Prune:
        if self.schedule == "gradual" and not self.epochs:
            raise InvalidInput(
                "schedule='gradual' with epochs=0 is impossible, because gradual pruning needs "
                "training steps; give epochs of at least 1, or schedule='one_shot'"
            )
        return self

    @property
    def label(self) -> str:
        """Label of the method, such as `prune 90%, global, gradual + 5 epochs`."""
        schedule_text = ", gradual" if self.schedule == "gradual" else ""
        return f"prune {100 * self.sparsity:.4g}%, {self.scope}{schedule_text}{self._trained}"

    def apply(self, model: keras.Model, data: Dataset) -> CompressedModel:
        """Return a pruned copy of the model.

        Raises:
            InvalidInput: The model has no kernels to prune.
        """
        pruned = uncompiled_copy(model)
        weights = kernels(pruned)
        if not weights:
            raise InvalidInput(
                "this model has no kernels to prune; give a model that has layers with kernels"
            )
        if self.epochs:
            ramp, every = self._ramp(len(data.x_train)) if self.schedule == "gradual" else (0, 1)
            callback = GradualPruning(self.sparsity, steps=ramp, every=every, scope=self.scope)
            pruned = self.fine_tune(pruned, data, [callback])
            weights = kernels(pruned)
        else:
            set_to_zero(weights, smallest(weights, self.sparsity, self.scope))
        zeros = sum(int(np.sum(weight.numpy() == 0)) for weight in weights)
        share = zeros / sum(weight.numpy().size for weight in weights)
        return CompressedModel(pruned, f"{share:.1%} of the kernel weights are zero")

    def _ramp(self, rows: int) -> tuple[int, int]:
        """Return the numbers of steps from the first pruning to the last, and between prunings."""
        last = int(RAMP * (self.epochs * math.ceil(rows / self.batch_size) - 1))
        every = max(1, last // PRUNINGS)
        # The number of steps up to the last pruning must be a multiple of the interval, so that the
        # last pruning takes place.
        return last // every * every, every

    def write(self, model: keras.Model, path: Path) -> None:
        """Write the model's nonzero weights to a sparse file."""
        sparse_file.write_sparse(model, path)

    def read(self, path: Path) -> keras.Model:
        """Return the model in a sparse file that `write` has written."""
        return sparse_file.read_sparse(path)


class GradualPruning(keras.callbacks.Callback):
    r"""Increase a model's sparsity (fraction of zero weights) during training.

    Before step \(t\) of \(t_0, t_0 + \Delta t, \dots, t_0 + n \Delta t\), the fraction of zeros
    becomes \(s_t = s_f + (s_i - s_f) \left(1 - \frac{t - t_0}{n \Delta t}\right)^3\). The initial
    sparsity is \(s_i\), and the final sparsity is \(s_f\). Sparsity grows fast at first, while many
    weights are unimportant, and slowly at the end. The mask of pruned weights stays constant
    between two prunings and after the last pruning. After every step, masked weights are set back
    to zero. With `steps=0`, weights are pruned once, to the final sparsity, before step `begin`.

    Args:
        final: Final sparsity \(s_f\), above 0 and below 1.
        steps: Training steps \(n \Delta t\) from the first pruning to the last; default: 0.
        every: Training steps \(\Delta t\) between prunings, a divisor of `steps`; default: 1.
        initial: Initial sparsity \(s_i\), from 0 to `final`; default: 0.
        begin: Number \(t_0\) of the training step that follows the first pruning, counted from 0;
            default: 0.
        scope: "layer" prunes the same fraction of every kernel; "global" prunes the smallest
            weights of all kernels together; default: "global".

    Attributes:
        reached: The pairs (step, requested sparsity) of all prunings so far.

    Raises:
        InvalidInput: A value is out of range, or `steps` is not a multiple of `every`.

    Source: Zhu, Gupta, "To prune, or not to prune: exploring the efficacy of pruning for model
    compression", 2017, arXiv 1710.01878. Difference from the paper: weights are set to zero after
    each step and not masked in the forward pass, so that layers need no wrapper. Zhu and Gupta do
    not describe `scope="global"`.
    """

    def __init__(
        self,
        final: float,
        steps: int = 0,
        every: int = 1,
        initial: float = 0.0,
        begin: int = 0,
        scope: Scope = "global",
    ) -> None:
        super().__init__()
        if not 0 <= initial <= final < 1 or final == 0:
            raise InvalidInput(
                f"initial={initial!r}, final={final!r} is impossible; "
                "allowed: 0 <= initial <= final, 0 < final < 1"
            )
        if begin < 0 or every < 1 or steps < 0 or steps % every:
            raise InvalidInput(
                f"begin={begin!r}, steps={steps!r}, every={every!r} is impossible; allowed: "
                "begin of at least 0, every of at least 1, steps a multiple of every"
            )
        self.final, self.initial, self.scope = final, initial, scope
        self.steps, self.every, self.begin = steps, every, begin
        self.reached: list[tuple[int, float]] = []

    def sparsity(self, step: int) -> float:
        """Return the scheduled fraction of zeros at a training step, `begin` or later."""
        remaining = 1 - min(1.0, (step - self.begin) / self.steps) if self.steps else 0.0
        return self.final + (self.initial - self.final) * remaining**3

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Collect the model's kernels; before the first pruning, no weight is masked."""
        self._step = 0
        self._kernels = kernels(self.model)
        self._masks: list[tf.Tensor] = []

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Prune the kernels if a pruning is scheduled before the training step that begins."""
        steps_since_begin = self._step - self.begin
        if 0 <= steps_since_begin <= self.steps and steps_since_begin % self.every == 0:
            share = self.sparsity(self._step)
            pruned = smallest(self._kernels, share, self.scope)
            set_to_zero(self._kernels, pruned)
            # Masks are converted to tensors once per pruning, because every training step uses
            # them.
            self._masks = [keras.ops.convert_to_tensor(mask) for mask in pruned]
            self.reached.append((self._step, share))
        # The callback counts steps itself, because Keras restarts `batch` at 0 in each epoch.
        self._step += 1

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Set masked weights back to zero after the optimizer's update."""
        if self._masks:
            for kernel, pruned in zip(self._kernels, self._masks, strict=True):
                kernel.assign(keras.ops.where(pruned, keras.ops.zeros_like(kernel), kernel))
