"""Magnitude pruning: the smallest weights become zero, at once or little by little."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from labkit.common.errors import InvalidInput
from labkit.datasets import Dataset
from labkit.deployment import sparse_file
from labkit.deployment.magnitude import Scope, kernels, set_to_zero, smallest
from labkit.deployment.smaller_models import Compressed, FineTuned, copy_of

if TYPE_CHECKING:
    import keras

RAMP = 0.75  # of the fine-tuning, over which gradual pruning grows; the rest is for recovery
PRUNINGS = 20  # on that way


class Prune(FineTuned):
    r"""Set the kernel weights of smallest magnitude to zero, and keep them there.

    Of \(n\) weights exactly \(\mathrm{round}(s\,n)\) go: of each kernel, or of all kernels
    together. Biases, normalisation and embeddings stay. The model computes as before, for Keras
    has no sparse kernels; what shrinks is its file, see `labkit.deployment.sparse_file`.

    Args:
        sparsity: share of the weights that become zero, above 0 and below 1.
        scope: "layer": the same share of every kernel; "global": the smallest of all kernels.
        schedule: "one_shot": at once, then `epochs` of training what is left; "gradual": during
            the first 3/4 of those epochs, by the cubic of `labkit.deployment.gradual`.
        epochs: of training along; 0 or more, with "gradual" 1 or more.

    Source: Han, Pool, Tran, Dally, "Learning both weights and connections for efficient neural
    networks", 2015, arXiv 1506.02626; gradual: Zhu, Gupta, "To prune, or not to prune", 2017, arXiv
    1710.01878. Differs from them: a trained model is pruned, in 20 prunings; masked weights are
    set back to zero after every step, instead of being masked in the forward pass.
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
                "schedule='gradual' with epochs=0 is impossible: it prunes during training; "
                "give epochs from 1 on, or schedule='one_shot'"
            )
        return self

    @property
    def label(self) -> str:
        """`prune 90%, global, gradual + 5 epochs`"""
        way = ", gradual" if self.schedule == "gradual" else ""
        return f"prune {100 * self.sparsity:.4g}%, {self.scope}{way}{self._trained}"

    def apply(self, model: keras.Model, data: Dataset) -> Compressed:
        """Return the pruned copy; raises InvalidInput where the model has no kernels."""
        pruned = copy_of(model)
        weights = kernels(pruned)
        if not weights:
            raise InvalidInput("this model has no kernels to prune; allowed: layers with kernels")
        if self.epochs:
            from labkit.deployment.gradual import GradualPruning

            ramp, every = self._ramp(len(data.x_train)) if self.schedule == "gradual" else (0, 1)
            keep = GradualPruning(self.sparsity, steps=ramp, every=every, scope=self.scope)
            pruned = self.fine_tune(pruned, data, [keep])
            weights = kernels(pruned)
        else:
            set_to_zero(weights, smallest(weights, self.sparsity, self.scope))
        zeros = sum(int(np.sum(weight.numpy() == 0)) for weight in weights)
        share = zeros / sum(weight.numpy().size for weight in weights)
        return Compressed(pruned, f"{share:.1%} of the kernel weights are zero")

    def _ramp(self, rows: int) -> tuple[int, int]:
        """Training steps from the first pruning to the last, and between two."""
        last = int(RAMP * (self.epochs * math.ceil(rows / self.batch_size) - 1))
        every = max(1, last // PRUNINGS)
        # A multiple, so that the last pruning reaches the whole sparsity.
        return last // every * every, every

    def write(self, model: keras.Model, path: Path) -> None:
        """Write what is not zero."""
        sparse_file.write_sparse(model, path)

    def read(self, path: Path) -> keras.Model:
        """Open a sparse file."""
        return sparse_file.read_sparse(path)
