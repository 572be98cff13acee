"""Gradient compressors: published methods that reduce the bytes sent, one module per family."""

from labkit.compression.compressor import (
    COMPRESSORS,
    Compressor,
    Gather,
    Mean,
    Nested,
    Payload,
    Reduced,
    Reduction,
    Request,
    SparseMean,
    State,
    Tensor,
    from_bytes,
    nbytes,
    parse,
    to_bytes,
)
from labkit.compression.dgc import DGC
from labkit.compression.families import FAMILIES, samples
from labkit.compression.point_to_point import Decoder, Encoder
from labkit.compression.powersgd import PowerSGD
from labkit.compression.quantization import QSGD, BFloat16, Float16, Int8, TernGrad
from labkit.compression.signs import OneBit, SignSGD
from labkit.compression.simulated_reduction import reduce_all
from labkit.compression.sparsification import RandomK, Threshold, TopK
from labkit.compression.wrappers import Chain, ErrorFeedback

COMPRESSORS.update(
    (kind.__name__, kind)
    for kind in (
        Float16,
        BFloat16,
        Int8,
        QSGD,
        TernGrad,
        OneBit,
        SignSGD,
        TopK,
        RandomK,
        Threshold,
        DGC,
        PowerSGD,
        ErrorFeedback,
        Chain,
    )
)

__all__ = [
    "COMPRESSORS",
    "DGC",
    "FAMILIES",
    "QSGD",
    "BFloat16",
    "Chain",
    "Compressor",
    "Decoder",
    "Encoder",
    "ErrorFeedback",
    "Float16",
    "Gather",
    "Int8",
    "Mean",
    "Nested",
    "OneBit",
    "Payload",
    "PowerSGD",
    "RandomK",
    "Reduced",
    "Reduction",
    "Request",
    "SignSGD",
    "SparseMean",
    "State",
    "Tensor",
    "TernGrad",
    "Threshold",
    "TopK",
    "from_bytes",
    "nbytes",
    "parse",
    "reduce_all",
    "samples",
    "to_bytes",
]
