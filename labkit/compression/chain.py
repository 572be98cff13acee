"""Few elements, and these in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import model_validator

from labkit.compression.compressor import Compressor, Nested, State, compiled
from labkit.compression.payload import Payload, Tensor

VALUES = "values"


class Chain(Compressor):
    r"""The first compressor chooses elements, the second one encodes their values.

    \(\hat g = D_1(D_2(E_2(E_1(g))))\), where the second pair works on the part "values" of the
    first one's payload. Random elements in half precision are summed on the way; all else is
    gathered, and what is decoded is averaged.

    Args:
        first: TopK, Threshold or RandomK; the compressor, its name, or a mapping with its fields.
        second: what works on any vector: Float16, Int8, QSGD, …

    Raises:
        InvalidInput: a pair that makes no sense, with the reason.

    Source: F. Sattler, S. Wiedemann, K.-R. Müller, W. Samek, Sparse Binary Compression, 2018,
    arXiv 1805.08768; D. Basu, D. Data, C. Karakus, S. Diggavi, Qsparse-local-SGD, 2019, arXiv
    1906.02367. Differs from them: any pair; no local steps.
    """

    paper: ClassVar[str] = "Sattler 2018, arXiv 1805.08768"

    # A payload's length differs from step to step.
    eager: ClassVar[tuple[str, ...]] = ("encode", "decode")

    first: Nested
    second: Nested

    @model_validator(mode="after")
    def _fits(self) -> Chain:
        first, second = type(self.first).__name__, type(self.second).__name__
        pair = f"Chain(first={first}, second={second})"
        if not self.first.sparse:
            raise ValueError(
                f"{pair}: {first} leaves no values that another could encode; first: TopK, "
                "Threshold or RandomK"
            )
        if reason := _unfit(self.second):
            raise ValueError(f"{pair}: {second} {reason}; second: Float16, Int8, QSGD, …")
        return self

    @property
    def family(self) -> str:
        """That of both where they are of one, else it is of two."""
        return self.first.family if self.first.family == self.second.family else "hybrid"

    @property
    def linear(self) -> bool:
        """Values may be summed on the way."""
        return self.first.linear and self.second.linear

    @property
    def expansive(self) -> bool:
        """What either loses may be larger than what it was given."""
        return self.first.expansive or self.second.expansive

    @property
    def rounding(self) -> float:
        """Relative error of a sum on the way, if it is summed there."""
        return self.second.rounding if self.linear else 0.0

    @property
    def unbiased(self) -> bool:
        """The expectation of what is decoded is what was encoded."""
        return self.first.unbiased and self.second.unbiased

    @property
    def shared(self) -> bool:
        """The same elements are chosen on all ranks."""
        return self.first.shared

    def start(self, shape: Sequence[int], rank: int = 0, seed: int = 0, ranks: int = 1) -> State:
        """The keys of both, int32 (2, 2): one may be that of all ranks, the other a rank's own."""
        import tensorflow as tf

        pair = (self.first, self.second)
        return tf.stack([nested.start(shape, rank, seed, ranks) for nested in pair])

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """The first one's parts but "values"; the second one's, "values.…" unless "values"."""
        first = dict(compiled(self.first, "encode")(tensor, key[0]))
        second = self.second.encode(first.pop(VALUES), key[1])
        # Parts of the second stand below "values", or they could have the name of one of the first.
        outer = {n if n == VALUES else f"{VALUES}.{n}": part for n, part in second.items()}
        return first | outer

    def decode(self, payload: Payload) -> Tensor:
        """What both say together, (n,)."""
        inner = {
            name.removeprefix(f"{VALUES}."): part
            for name, part in payload.items()
            if name.startswith(VALUES)
        }
        first = {name: part for name, part in payload.items() if not name.startswith(VALUES)}
        return self.first.decode({**first, VALUES: self.second.decode(inner)})


def _unfit(second: Compressor) -> str | None:
    """Why values cannot go through this compressor, or None."""
    if second.sparse or isinstance(second, Chain):
        return "drops elements, which the first one has already done"
    if second.memory:
        return "keeps what it did not send, but at the next step other elements are chosen"
    if second.by_layer:
        return "works on a layer's matrix, of which few elements are left"
    if second.votes:
        return "counts votes, but ranks choose different elements"
    return None
