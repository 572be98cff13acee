"""Layerwise model parallelism: each rank holds some layers, and one rank works at a time."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from labkit.strategies.pipeline import Pipeline


class Layerwise(Pipeline):
    """A model whose layers are divided over ranks; a whole batch passes from rank to rank.

        time ->   F ·  ·  ·  ·  B
                  ·  F ·  ·  B ·
                  ·  ·  F B ·  ·

    While one rank computes, all other ranks wait, so the strategy saves memory but no time.
    Layerwise training is a pipeline with a single micro-batch.

    Args: As for `Pipeline`, including tensor_parallel_size; the schedule and the number of
        micro-batches are fixed.

    Source: Y. Huang et al., GPipe, 2019, arXiv 1811.06965, which calls this strategy naive.
    """

    synchronization: ClassVar[tuple[str, ...]] = ("synchronous",)
    scheduling: ClassVar[tuple[str, ...]] = ("sequential",)

    stages: PositiveInt | None = Field(None, kw_only=False)
    schedule: Literal["layerwise"] = "layerwise"
    microbatches: Literal[1] = 1
