"""Vertical slices of a model: layers of which each rank has some units."""

from labkit.slices.attention import Heads
from labkit.slices.graph import refuse_whole
from labkit.slices.linear import Column, Row
from labkit.slices.link import Link, uncounted
from labkit.slices.normalization import Channels
from labkit.slices.sliced import Sliced
from labkit.slices.vocabulary import Words, cross_entropy

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
