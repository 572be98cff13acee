"""Layers on ranks, one rank active at a time."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from labkit.strategies.pipeline import Pipeline


class Layerwise(Pipeline):
    """A model too large for one rank, cut by layers: the whole batch moves from rank to rank.

        time ->   F ·  ·  ·  ·  B
                  ·  F ·  ·  B ·
                  ·  ·  F B ·  ·

    While one rank computes the others wait: it saves memory, no time. A pipeline with one
    micro-batch, shown as it is.

    Args: as for `Pipeline`, slices of each stage among them; schedule and micro-batches are fixed.

    Source: Y. Huang et al., GPipe, 2019, arXiv 1811.06965, which calls it naive.
    """

    synchronization: ClassVar[tuple[str, ...]] = ("synchronous",)
    scheduling: ClassVar[tuple[str, ...]] = ("sequential",)

    stages: PositiveInt | None = Field(None, kw_only=False)
    schedule: Literal["layerwise"] = "layerwise"
    microbatches: Literal[1] = 1
