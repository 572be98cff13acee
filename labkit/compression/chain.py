"""Chains of two compressors: a sparsifier, then a quantizer of the selected values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import model_validator

from labkit.compression.compressor import Compressor, Nested, State, compiled
from labkit.compression.payload import Payload, Tensor

VALUES = "values"


class Chain(Compressor):
    r"""The first compressor selects elements, and the second compressor encodes their values.

    \(\hat g = D_1(D_2(E_2(E_1(g))))\), where E encodes and D decodes; the second compressor encodes
    the part "values" of the first compressor's payload. If the pair is RandomK with Float16 or
    BFloat16, an allreduce sums the payloads. With any other pair of compressors, the payloads are
    gathered, and the decoded tensors are averaged.

    Args:
        first: The compressor that selects elements: TopK, Threshold or RandomK; an object, its
            name, or a mapping of its name and fields.
        second: The compressor of the selected values: Float16, Int8, QSGD, or any other that
            accepts a flat vector.

    Raises:
        InvalidInput: The pair of compressors is not supported; the message gives the reason.

    Source: F. Sattler, S. Wiedemann, K.-R. Müller, W. Samek, Sparse Binary Compression, 2018, arXiv
    1805.08768; D. Basu, D. Data, C. Karakus, S. Diggavi, Qsparse-local-SGD, 2019, arXiv 1906.02367.
    Differs from them: any supported pair of compressors; no local steps.
    """

    paper: ClassVar[str] = "Sattler 2018, arXiv 1805.08768"

    # `encode` and `decode` are not compiled, because the length of a payload differs between
    # training steps.
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
        """Whether the expectation of the decoded tensor is the encoded tensor."""
        return self.first.unbiased and self.second.unbiased

    @property
    def shared(self) -> bool:
        """Whether all ranks select the same elements."""
        return self.first.shared

    def start(self, shape: Sequence[int], rank: int = 0, seed: int = 0, ranks: int = 1) -> State:
        """Return both compressors' random keys, int32 (2, 2); a key may be equal on all ranks."""
        import tensorflow as tf

        pair = (self.first, self.second)
        return tf.stack([nested.start(shape, rank, seed, ranks) for nested in pair])

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Return both payloads' parts; the second payload's part names begin with "values"."""
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
    """Return why a compressor cannot encode selected values, or None if it can."""
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
