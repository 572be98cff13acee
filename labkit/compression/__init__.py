"""Gradient compressors: published methods that reduce the bytes sent, one file per method."""

from labkit.compression.bfloat16 import BFloat16
from labkit.compression.chain import Chain
from labkit.compression.compressor import (
    COMPRESSORS,
    Compressor,
    Gather,
    Mean,
    Nested,
    Reduced,
    Reduction,
    Request,
    SparseMean,
    State,
    parse,
)
from labkit.compression.dgc import DGC
from labkit.compression.errorfeedback import ErrorFeedback
from labkit.compression.families import FAMILIES, samples
from labkit.compression.float16 import Float16
from labkit.compression.int8 import Int8
from labkit.compression.onebit import OneBit
from labkit.compression.payload import Payload, Tensor, from_bytes, nbytes, to_bytes
from labkit.compression.point_to_point import Decoder, Encoder
from labkit.compression.powersgd import PowerSGD
from labkit.compression.qsgd import QSGD
from labkit.compression.randomk import RandomK
from labkit.compression.sign_sgd import SignSGD
from labkit.compression.simulated_reduction import reduce_all
from labkit.compression.terngrad import TernGrad
from labkit.compression.threshold import Threshold
from labkit.compression.topk import TopK

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
