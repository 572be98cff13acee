"""Magnitude pruning: the weights of smallest magnitude become zero, at once or gradually."""

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
from labkit.deployment.smaller_models import CompressedModel, FineTuned, uncompiled_copy

if TYPE_CHECKING:
    import keras


RAMP = 0.75  # Gradual pruning increases sparsity during the fraction `RAMP` of fine-tuning.
PRUNINGS = 20  # Gradual pruning consists of about `PRUNINGS` prunings.


class Prune(FineTuned):
    r"""Set the kernel weights of smallest magnitude to zero, and keep them at zero.

    For the sparsity \(s\), exactly \(\mathrm{round}(s\,n)\) of \(n\) weights become zero. The \(n\)
    weights are those of each kernel, or of all kernels together. Biases, normalisation and
    embeddings are not pruned. Inference is not faster, because Keras does not compute with sparse
    matrices. The pruned model's file is smaller, see `labkit.deployment.sparse_file`.

    Args:
        sparsity: Fraction of the kernel weights that become zero, above 0 and below 1; default:
            0.9.
        scope: "layer" prunes the same fraction of every kernel. The default "global" prunes the
            smallest weights of all kernels together.
        schedule: "one_shot" prunes once, before the remaining weights are trained. "gradual" prunes
            about 20 times during the first 3/4 of the epochs, see `labkit.deployment.prune`.
            The default schedule is "one_shot".
        epochs: Number of epochs of fine-tuning; "gradual" needs at least 1; default: 0.

    Source: Han, Pool, Tran, Dally, "Learning both weights and connections for efficient neural
    networks", 2015, arXiv 1506.02626. Gradual: Zhu, Gupta, "To prune, or not to prune", 2017, arXiv
    1710.01878. Difference from the papers: labkit prunes only models that are already trained.
    Pruned weights are set to zero after every training step, instead of being masked in the forward
    pass.
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
            from labkit.deployment.gradual import GradualPruning

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
        # Pruning takes place only at regular intervals. The number of steps is therefore rounded
        # down to a multiple of the interval.
        return last // every * every, every

    def write(self, model: keras.Model, path: Path) -> None:
        """Write the model's nonzero weights to a sparse file."""
        sparse_file.write_sparse(model, path)

    def read(self, path: Path) -> keras.Model:
        """Return the model in a sparse file that `write` has written."""
        return sparse_file.read_sparse(path)
