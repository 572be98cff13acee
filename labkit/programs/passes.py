"""What a member of a cut replica computes between messages, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.programs.placement import Parts


@dataclass(frozen=True)
class Pass:
    """One computation of a member, forward and then back; the members are those of its replica.

        forward     gets ──► compute ──► gives
        back       gives ──► compute ──► gets       with the gradients of the same values

    Attributes:
        gets: members whose values it reads.
        gives: members that read of its own, in their next pass.
        share: of the replica's work.
        goes_back: whether weights, its own or those before it, wait for a gradient.
        returns: whether some of them are before it, so that gradients go to whom it got values of.
    """

    gets: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()
    share: float = 0.0
    goes_back: bool = True
    returns: bool = True


def staged(parts: Sequence[Parts]) -> list[list[Pass]]:
    """The passes of stages, one each: a batch goes through all of them, and back.

    Args:
        parts: what each has of the weights, by which its time is counted.
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
