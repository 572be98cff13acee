"""Compression of trained models for deployment: methods, and a comparison of their results."""

from __future__ import annotations

from labkit.deployment.low_rank import LowRank
from labkit.deployment.method_comparison import compare, refuse_alike
from labkit.deployment.prune import Prune
from labkit.deployment.quantize import Quantize
from labkit.deployment.smaller_models import CompressedModel, CompressionMethod
from labkit.deployment.sparse_file import read_sparse, write_sparse

METHODS: dict[str, type[CompressionMethod]] = {
    kind.__name__: kind for kind in (Quantize, Prune, LowRank)
}

__all__ = [
    "METHODS",
    "CompressedModel",
    "CompressionMethod",
    "LowRank",
    "Prune",
    "Quantize",
    "compare",
    "read_sparse",
    "refuse_alike",
    "write_sparse",
]
