"""Tensor parallelism: each rank stores and computes some of the units of each divided layer."""

from labkit.model_parallel.tensor.slice_link import Link
from labkit.model_parallel.tensor.sliceable import require_divisible
from labkit.model_parallel.tensor.sliced import Sliced
from labkit.model_parallel.tensor.vocabulary import cross_entropy

__all__ = ["Link", "Sliced", "cross_entropy", "require_divisible"]
