"""Gradual pruning: a Keras callback that sets more weights to zero after each step."""

from __future__ import annotations

import keras
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.deployment.magnitude import Scope, kernels, set_to_zero, smallest


class GradualPruning(keras.callbacks.Callback):
    r"""Increase a model's sparsity (fraction of zero weights) during training.

    Weights are pruned before the steps \(t_0, t_0 + \Delta t, \dots, t_0 + n \Delta t\). Before
    step \(t\), the fraction of zeros becomes \(s_t = s_f + (s_i - s_f) \left(1 - \frac{t - t_0}{n
    \Delta t}\right)^3\). The initial sparsity is \(s_i\), and the final sparsity is \(s_f\).
    Sparsity grows fast at first, while many weights are unimportant, and slowly at the end. The
    mask of pruned weights stays constant between two prunings and after the last pruning. After
    every step, masked weights are set back to zero. With `steps=0`, weights are pruned once, to the
    final sparsity, before step `begin`.

    Args:
        final: Final sparsity \(s_f\), above 0 and below 1.
        steps: Training steps \(n \Delta t\) from the first pruning to the last; default: 0.
        every: Training steps \(\Delta t\) between prunings, a divisor of `steps`; default: 1.
        initial: Initial sparsity \(s_i\), from 0 to `final`; default: 0.
        begin: Number \(t_0\) of the training step that follows the first pruning, counted from 0;
            default: 0.
        scope: "layer" prunes the same fraction of every kernel. The default "global" prunes the
            smallest weights of all kernels together.

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
