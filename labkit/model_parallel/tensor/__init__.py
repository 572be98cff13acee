"""Vertical slices of a model: layers of which each rank has some units."""

from labkit.model_parallel.tensor.attention import Heads
from labkit.model_parallel.tensor.graph import refuse_whole
from labkit.model_parallel.tensor.linear import Column, Row
from labkit.model_parallel.tensor.link import Link, uncounted
from labkit.model_parallel.tensor.normalization import Channels
from labkit.model_parallel.tensor.sliced import Sliced
from labkit.model_parallel.tensor.vocabulary import Words, cross_entropy

__all__ = [
    "Channels",
    "Column",
    "Heads",
    "Link",
    "Row",
    "Sliced",
    "Words",
    "cross_entropy",
    "refuse_whole",
    "uncounted",
]
