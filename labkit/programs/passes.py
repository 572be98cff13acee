"""The passes of a replica member: its computations between two exchanges of messages, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.programs.placement import ServerPieces


@dataclass(frozen=True)
class Pass:
    """One computation of a replica member, first forward and later backward.

        forward     gets ──► compute ──► gives
        backward    gives ──► compute ──► gets      with the gradients of the same values

    Attributes:
        gets: Members of the replica whose outputs the pass reads.
        gives: Members whose next pass reads the outputs of this pass.
        share: Fraction of the replica's computation that this pass takes.
        goes_back: Whether weights of this pass, or of earlier passes, need a gradient.
        returns: Whether weights of earlier passes need a gradient; if so, the gradients of the
            inputs are sent back to the members in `gets`.
    """

    gets: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()
    share: float = 0.0
    goes_back: bool = True
    returns: bool = True


def staged(parts: Sequence[ServerPieces]) -> list[list[Pass]]:
    """Return one pass per pipeline stage; a batch runs forward and backward through all stages.

    Args:
        parts: Weights of each stage; a stage's fraction of the time is its fraction of the weights.
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
