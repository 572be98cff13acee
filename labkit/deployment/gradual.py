"""The Keras callback that prunes during training, and keeps at zero what is pruned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras

from labkit.common.errors import InvalidInput
from labkit.deployment.magnitude import Scope, kernels, set_to_zero, smallest

if TYPE_CHECKING:
    import tensorflow as tf


class GradualPruning(keras.callbacks.Callback):
    r"""Prune more and more of a model while it trains, and set masked weights back to zero.

    Before step \(t\) of \(t_0, t_0 + \Delta t, \dots, t_0 + n \Delta t\) the share of zeros is
    \(s_t = s_f + (s_i - s_f) \left(1 - \frac{t - t_0}{n \Delta t}\right)^3\): fast while many
    weights do not matter, slow in the end. Between, and afterwards, the mask stays. With
    `steps=0` it holds the final sparsity from `begin` on.

    Args:
        final: \(s_f\), above 0 and below 1.
        steps: \(n \Delta t\), from the first pruning to the last, in training steps.
        every: \(\Delta t\), training steps between prunings; divides `steps`.
        initial: \(s_i\), from 0 on, at most `final`.
        begin: \(t_0\), the step (counted from 0) before which the first pruning happens.
        scope: "layer" or "global", as `Prune` has it.

    Attributes:
        reached: the share asked for at each pruning, (step, sparsity).

    Raises: InvalidInput, for values that do not fit together.

    Source: Zhu, Gupta, "To prune, or not to prune: exploring the efficacy of pruning for model
    compression", 2017, arXiv 1710.01878. Differs from it: weights are masked after the step, not in
    the forward pass, so that no layer need be wrapped; and `scope="global"` is ours.
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
                "begin from 0, every from 1, steps a multiple of every"
            )
        self.final, self.initial, self.scope = final, initial, scope
        self.steps, self.every, self.begin = steps, every, begin
        self.reached: list[tuple[int, float]] = []

    def sparsity(self, step: int) -> float:
        """The share of zeros in a step, from `begin` on."""
        left = 1 - min(1.0, (step - self.begin) / self.steps) if self.steps else 0.0
        return self.final + (self.initial - self.final) * left**3

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Find the kernels; nothing is masked yet."""
        self._step = 0
        self._kernels = kernels(self.model)
        self._masks: list[tf.Tensor] = []

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Prune where it is time."""
        since = self._step - self.begin
        if 0 <= since <= self.steps and since % self.every == 0:
            share = self.sparsity(self._step)
            gone = smallest(self._kernels, share, self.scope)
            set_to_zero(self._kernels, gone)
            # Tensors, once a pruning: they are used after every step.
            self._masks = [keras.ops.convert_to_tensor(mask) for mask in gone]
            self.reached.append((self._step, share))
        # Counted here: Keras begins anew in each epoch.
        self._step += 1

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Take back what the step did to masked weights."""
        if self._masks:
            for kernel, gone in zip(self._kernels, self._masks, strict=True):
                kernel.assign(keras.ops.where(gone, keras.ops.zeros_like(kernel), kernel))
