"""What a compressor did not send is sent later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field, field_validator

from labkit.compression.compressor import (
    Compressor,
    Nested,
    Reduced,
    Reduction,
    Request,
    State,
    TensorContext,
)
from labkit.compression.payload import Payload, Tensor


class ErrorFeedback(Compressor):
    r"""Adds to each gradient what of the earlier ones has not been sent.

    \(c = g + e\); \(\hat c\) is sent by the inner compressor; \(e \leftarrow c - \hat c\).
    Nothing is lost: sent + residual = gradient + old residual.

    Args:
        inner: the compressor, or its name, or a mapping of its name and fields.

    Raises:
        InvalidInput: the inner one has a memory of its own, or votes, or sends more than there is.

    Source: S. U. Stich, J.-B. Cordonnier, M. Jaggi, Sparsified SGD with Memory, 2018, arXiv
    1809.07599; S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, Error Feedback Fixes SignSGD
    and other Gradient Compression Schemes, 2019, arXiv 1901.09847. Differs from them: the
    residual is in units of the gradient, not of the step: a learning rate that changes applies
    to what was left over before the change, too.
    """

    paper: ClassVar[str] = "Stich 2018, arXiv 1809.07599"
    memory: ClassVar[bool] = True
    conserves: ClassVar[bool] = True

    inner: Nested = Field(kw_only=False)

    @field_validator("inner")
    @classmethod
    def _fits(cls, inner: Compressor) -> Compressor:
        name = type(inner).__name__
        if inner.memory:
            raise ValueError(
                f"ErrorFeedback(inner={name}): {name} already keeps what it did not send; use it "
                "alone"
            )
        if inner.votes:
            raise ValueError(
                f"ErrorFeedback(inner={name}): a vote is not the mean of what ranks sent, so that "
                "there is nothing to conserve; use it alone, or OneBit"
            )
        if inner.expansive:
            raise ValueError(
                f"ErrorFeedback(inner={inner!r}): what it loses in a step may be larger than what "
                "it was given, so that the residual would grow for ever; use it alone, or one that "
                "loses less: QSGD(levels=127), RandomK(rescale=False), OneBit, TopK, …"
            )
        return inner

    @property
    def family(self) -> str:
        """That of the inner one."""
        return self.inner.family

    @property
    def by_layer(self) -> bool:
        """Works on each layer's tensor in its own shape."""
        return self.inner.by_layer

    @property
    def rounding(self) -> float:
        """Relative error of a sum on the way."""
        return self.inner.rounding

    def start(self, shape: Sequence[int], rank: int = 0, seed: int = 0, ranks: int = 1) -> State:
        """A residual of zero and the inner compressor's state."""
        import tensorflow as tf

        return tf.zeros(shape), self.inner.start(shape, rank, seed, ranks)

    def reduce(self, tensor: Tensor, state: State) -> Reduction:
        """The inner compressor's reduction of gradient and residual."""
        import tensorflow as tf

        residual, inner = state
        corrected = tensor + tf.cast(residual, tensor.dtype)
        # The inner one asks for its own collectives; this one never needs to know which.
        mean, sent, inner = yield from self.inner.reduce(corrected, inner)
        return Reduced(mean, sent, (corrected - tf.cast(sent, tensor.dtype), inner))

    def collectives(
        self, shape: Sequence[int], payload: float
    ) -> tuple[tuple[type[Request], float], ...]:
        """What the inner one asks for."""
        return self.inner.collectives(shape, payload)

    def unsupported_reason(self) -> str:
        """As of the inner one."""
        return self.inner.unsupported_reason()

    @property
    def without_memory(self) -> Compressor:
        """The inner one."""
        return self.inner

    def say(self, tensor: Tensor, state: State) -> TensorContext:
        """What the inner compressor says of gradient and residual."""
        import tensorflow as tf

        residual, inner = state
        corrected = tensor + tf.cast(residual, tensor.dtype)
        payload, sent, inner = self.inner.say(corrected, inner)
        return TensorContext(payload, sent, (corrected - sent, inner))

    def understand(self, payload: Payload) -> Tensor:
        """As the inner one does."""
        return self.inner.understand(payload)

    def residual(self, state: State) -> Tensor:
        """What has not been sent yet, in the tensor's shape."""
        return state[0]
