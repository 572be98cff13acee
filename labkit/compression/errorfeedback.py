"""Error feedback: the unsent part of a gradient (residual) is added to the next gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field, field_validator

from labkit.compression.compressor import (
    Compressor,
    Nested,
    PeerMessage,
    Reduced,
    Reduction,
    Request,
    State,
)
from labkit.compression.payload import Payload, Tensor


class ErrorFeedback(Compressor):
    r"""A wrapper that adds the residual, the unsent part of earlier gradients, to each gradient.

    With the residual e, the inner compressor encodes \(c = g + e\), receivers decode \(\hat c\),
    and the new residual is \(e \leftarrow c - \hat c\). No part of a gradient is lost: sent tensor
    + new residual = gradient + old residual.

    Args:
        inner: The compressor that encodes the sum of gradient and residual: an object, its name, or
            a mapping of its name and fields.

    Raises:
        InvalidInput: The inner compressor stores a residual itself, uses a majority vote, or may
            have an error that exceeds its input.

    Source: S. U. Stich, J.-B. Cordonnier, M. Jaggi, Sparsified SGD with Memory, 2018, arXiv
    1809.07599; S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, Error Feedback Fixes SignSGD
    and other Gradient Compression Schemes, 2019, arXiv 1901.09847. Differs from them: the residual
    is in units of the gradient, not of the optimizer's step, so that a changed learning rate also
    applies to the old residual.
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
                f"ErrorFeedback(inner={name}): {name} already adds unsent values to the next "
                f"step; use {name} without ErrorFeedback"
            )
        if inner.votes:
            raise ValueError(
                f"ErrorFeedback(inner={name}): a majority vote is not the mean of the sent "
                f"tensors, so residuals cannot correct its error; use {name} without "
                "ErrorFeedback, or use OneBit"
            )
        if inner.expansive:
            raise ValueError(
                f"ErrorFeedback(inner={inner!r}): the compression error can exceed the gradient, "
                f"so the residual would grow without bound; use {name} without ErrorFeedback, or "
                "a compressor with a smaller error: QSGD(levels=127), RandomK(rescale=False), "
                "OneBit, TopK, …"
            )
        return inner

    @property
    def family(self) -> str:
        """The family of the inner compressor."""
        return self.inner.family

    @property
    def by_layer(self) -> bool:
        """Whether the inner compressor processes each layer's tensor in its own shape."""
        return self.inner.by_layer

    @property
    def rounding(self) -> float:
        """The relative rounding error of the inner compressor's sum in an allreduce."""
        return self.inner.rounding

    def start(self, shape: Sequence[int], rank: int = 0, seed: int = 0, ranks: int = 1) -> State:
        """Return the initial state: a residual of zeros, and the inner compressor's state."""
        import tensorflow as tf

        return tf.zeros(shape), self.inner.start(shape, rank, seed, ranks)

    def reduce(self, tensor: Tensor, state: State) -> Reduction:
        """Compute the mean over ranks of gradient plus residual with the inner compressor."""
        import tensorflow as tf

        residual, inner = state
        corrected = tensor + tf.cast(residual, tensor.dtype)
        # The inner compressor's requests are yielded to the caller of this generator.
        mean, sent, inner = yield from self.inner.reduce(corrected, inner)
        return Reduced(mean, sent, (corrected - tf.cast(sent, tensor.dtype), inner))

    def collectives(
        self, shape: Sequence[int], payload: float
    ) -> tuple[tuple[type[Request], float], ...]:
        """Return the requests that the inner compressor's `reduce` yields."""
        return self.inner.collectives(shape, payload)

    def unsupported_reason(self) -> str:
        """Return why the inner compressor cannot encode for a single receiver; "" if it can."""
        return self.inner.unsupported_reason()

    @property
    def without_memory(self) -> Compressor:
        """The inner compressor, which has no residual."""
        return self.inner

    def compress(self, tensor: Tensor, state: State) -> PeerMessage:
        """Compress the sum of tensor and residual for a single receiver."""
        import tensorflow as tf

        residual, inner = state
        corrected = tensor + tf.cast(residual, tensor.dtype)
        payload, sent, inner = self.inner.compress(corrected, inner)
        return PeerMessage(payload, sent, (corrected - sent, inner))

    def decompress(self, payload: Payload) -> Tensor:
        """Decode a payload from a single sender with the inner compressor."""
        return self.inner.decompress(payload)

    def residual(self, state: State) -> Tensor:
        """Return the residual, in the tensor's shape."""
        return state[0]
