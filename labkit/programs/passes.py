"""Passes of a replica member: its computations between two exchanges of messages, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.programs.placement import ServerPieces


@dataclass(frozen=True)
class Pass:
    """A part of a replica member's computation, which runs forward, and later backward.

        forward     gets ──► compute ──► gives
        backward    gives ──► compute ──► gets      with the gradients of the same values

    Attributes:
        gets: Numbers of the replica members whose outputs the pass reads.
        gives: Numbers of the replica members whose next pass reads the outputs of this pass.
        share: Fraction of the replica's total computation that belongs to this pass.
        goes_back: Whether the pass also runs backward, because its own weights, or those of earlier
            passes, need a gradient.
        returns: Whether weights of earlier passes need a gradient. If weights of earlier passes
            need a gradient, the backward pass sends gradients of the pass's inputs to the members
            in `gets`.
    """

    gets: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()
    share: float = 0.0
    goes_back: bool = True
    returns: bool = True


def staged(parts: Sequence[ServerPieces]) -> list[list[Pass]]:
    """Return the passes of each pipeline stage: a single one, which runs forward and backward.

    Args:
        parts: For each stage, the ranges of the flat weights that it has. A stage's fraction of the
            computation is estimated by its fraction of the weights.
    """
    last, size = len(parts) - 1, sum(part.size for part in parts)
    return [
        [
            Pass(
                gets=(stage - 1,) if stage else (),
                gives=(stage + 1,) if stage < last else (),
                share=part.size / size,
            )
        ]
        for stage, part in enumerate(parts)
    ]
