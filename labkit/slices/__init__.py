"""Vertical slices of a model: layers of which each rank has some units."""

from labkit.slices.linear import Column, Row
from labkit.slices.link import Link
from labkit.slices.sliced import Sliced
from labkit.slices.vocabulary import Words, cross_entropy

__all__ = ["Column", "Link", "Row", "Sliced", "Words", "cross_entropy"]
