"""Compressors that change or combine other compressors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field, field_validator, model_validator

from labkit.compression.compressor import (
    Compressor,
    Nested,
    Payload,
    PeerMessage,
    Reduced,
    Reduction,
    Request,
    State,
    Tensor,
    compiled,
)

VALUES = "values"


class Chain(Compressor):
    r"""The first compressor selects elements, and the second compressor encodes their values.

    With encoders E and decoders D, the decoded gradient is \(\hat g = D_1(D_2(E_2(E_1(g))))\). The
    second compressor encodes the part "values" of the first compressor's payload. If the pair is
    RandomK with Float16 or BFloat16, an allreduce sums the payloads. With any other pair of
    compressors, the payloads are gathered, and the decoded tensors are averaged.

    Args:
        first: The compressor that selects elements: TopK, Threshold or RandomK. The first
            compressor is an object, a name, or a mapping of name and fields.
        second: The compressor of the selected values: Float16, Int8, QSGD, or any other that
            accepts a flat vector.

    Raises:
        InvalidInput: The pair of compressors is not supported; the message gives the reason.

    Source: F. Sattler, S. Wiedemann, K.-R. Müller, W. Samek, Sparse Binary Compression, 2018, arXiv
    1805.08768. D. Basu, D. Data, C. Karakus, S. Diggavi, Qsparse-local-SGD, 2019, arXiv 1906.02367.
    Difference from the papers: any supported pair of compressors; no local steps.
    """

    paper: ClassVar[str] = "Sattler 2018, arXiv 1805.08768"

    # The methods `encode` and `decode` are not compiled. The length of a payload (compressed
    # gradient) differs between training steps.
    eager: ClassVar[tuple[str, ...]] = ("encode", "decode")

    first: Nested
    second: Nested

    @model_validator(mode="after")
    def _fits(self) -> Chain:
        first, second = type(self.first).__name__, type(self.second).__name__
        pair = f"Chain(first={first}, second={second})"
        if not self.first.sparse:
            raise ValueError(
                f"{pair}: {first} does not select values that a second compressor could encode; "
                "give first=TopK, Threshold or RandomK"
            )
        if reason := _unsupported_reason(self.second):
            raise ValueError(f"{pair}: {second} {reason}; give second=Float16, Int8, QSGD, …")
        return self

    @property
    def family(self) -> str:
        """The family of both compressors if they have the same family; "hybrid" if not."""
        return self.first.family if self.first.family == self.second.family else "hybrid"

    @property
    def linear(self) -> bool:
        """Whether an allreduce may sum the encoded values."""
        return self.first.linear and self.second.linear

    @property
    def expansive(self) -> bool:
        """Whether the error of either compressor can exceed that compressor's input."""
        return self.first.expansive or self.second.expansive

    @property
    def rounding(self) -> float:
        """The relative rounding error of a sum in an allreduce; 0 if payloads are gathered."""
        return self.second.rounding if self.linear else 0.0

    @property
    def unbiased(self) -> bool:
        """Whether the decoded tensor is an unbiased estimate of the encoder's input."""
        return self.first.unbiased and self.second.unbiased

    @property
    def shared(self) -> bool:
        """Whether all ranks select the same elements."""
        return self.first.shared

    def start(self, shape: Sequence[int], rank: int = 0, seed: int = 0, ranks: int = 1) -> State:
        """Return one random key per compressor, int32 (2, 2); ranks may have equal keys."""
        import tensorflow as tf

        pair = (self.first, self.second)
        return tf.stack([nested.start(shape, rank, seed, ranks) for nested in pair])

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Return both payloads as one; the second payload's part names begin with "values"."""
        first = dict(compiled(self.first, "encode")(tensor, key[0]))
        second = self.second.encode(first.pop(VALUES), key[1])
        # The prefix "values." avoids name clashes between the parts of the two payloads.
        outer = {n if n == VALUES else f"{VALUES}.{n}": part for n, part in second.items()}
        return first | outer

    def decode(self, payload: Payload) -> Tensor:
        """Return the tensor (n,) that results from decoding by both compressors."""
        inner = {
            name.removeprefix(f"{VALUES}."): part
            for name, part in payload.items()
            if name.startswith(VALUES)
        }
        first = {name: part for name, part in payload.items() if not name.startswith(VALUES)}
        return self.first.decode({**first, VALUES: self.second.decode(inner)})


def _unsupported_reason(second: Compressor) -> str | None:
    """Return the reason why a compressor cannot encode selected values, or None if it can."""
    if second.sparse or isinstance(second, Chain):
        return "drops elements, but the first compressor already drops elements"
    if second.memory:
        return (
            "adds unsent elements to the next step, but the first compressor selects other "
            "elements in the next step"
        )
    if second.by_layer:
        return "needs complete matrices of layers, but the first compressor selects single elements"
    if second.votes:
        return "counts the votes of all ranks for each element, but ranks select different elements"
    return None


class ErrorFeedback(Compressor):
    r"""A wrapper that adds the residual, the unsent part of earlier gradients, to each gradient.

    With the residual e, the inner compressor encodes the sum \(c = g + e\). Receivers decode the
    compressed sum to the approximation \(\hat c\). The new residual is the compression error: \(e
    \leftarrow c - \hat c\). No part of a gradient is lost: sent tensor + new residual = gradient +
    old residual.

    Args:
        inner: The compressor that encodes the sum of gradient and residual. The inner compressor is
            an object, a name, or a mapping of name and fields.

    Raises:
        InvalidInput: The inner compressor stores a residual itself, or uses a majority vote.
            `InvalidInput` is also raised if the compression error may exceed the input.

    Source: S. U. Stich, J.-B. Cordonnier, M. Jaggi, Sparsified SGD with Memory, 2018, arXiv
    1809.07599. S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, Error Feedback Fixes SignSGD
    and other Gradient Compression Schemes, 2019, arXiv 1901.09847. Difference from the papers: the
    residual has the unit of the gradient, not of the optimizer's step. A new learning rate
    therefore also applies to the old residual.
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
        """Whether the inner compressor needs each layer as a separate tensor in its own shape."""
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
        mean, sent, inner = yield from self.inner.reduce(corrected, inner)
        return Reduced(mean, sent, (corrected - tf.cast(sent, tensor.dtype), inner))

    def collectives(
        self, shape: Sequence[int], payload: float
    ) -> tuple[tuple[type[Request], float], ...]:
        """Return the requests that the inner compressor's `reduce` yields."""
        return self.inner.collectives(shape, payload)

    def unsupported_reason(self) -> str:
        """Return the reason why the inner compressor cannot encode for one receiver, or ""."""
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
