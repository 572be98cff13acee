"""The passes of a replica member: its computations between exchanges of messages, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.programs.placement import ServerPieces


@dataclass(frozen=True)
class Pass:
    """A part of a member's computation, which runs first forward and later backward.

        forward     gets ──► compute ──► gives
        backward    gives ──► compute ──► gets      with the gradients of the same values

    Attributes:
        gets: Numbers of the replica members whose outputs the pass reads.
        gives: Numbers of the replica members whose next pass reads the outputs of this pass.
        share: Fraction of the replica's total computation that belongs to this pass.
        goes_back: Whether the pass runs backward, because its weights, or weights of earlier
            passes, need a gradient.
        returns: Whether weights of earlier passes need a gradient. If so, the backward pass sends
            the gradients of the inputs to the members in `gets`.
    """

    gets: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()
    share: float = 0.0
    goes_back: bool = True
    returns: bool = True


def staged(parts: Sequence[ServerPieces]) -> list[list[Pass]]:
    """Return the passes of each pipeline stage: one per stage, which runs forward and backward.

    Args:
        parts: Weights of each stage. The fraction of weights that a stage has is used as its
            fraction of the computation.
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
