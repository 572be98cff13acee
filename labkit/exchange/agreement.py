"""Ranks that exchange gradients must have the same ones."""

from __future__ import annotations

from typing import Any

from labkit.communicator import Communicator, Mismatch


def agree(communicator: Communicator, signature: list[Any]) -> None:
    """Check that all ranks have the same gradients.

    Raises:
        Mismatch: names the first rank, tensor and shapes that differ.
    """
    told = communicator.allgather(signature, what="the agreement on the gradients")
    for rank, other in enumerate(told):
        if len(other) != len(told[0]):
            raise Mismatch(
                f"rank {rank} has {len(other)} gradients, rank 0 has {len(told[0])}: "
                "every rank must train the same model"
            )
        for (name, shape, dtype), mine in zip(other, told[0], strict=True):
            if (shape, dtype) != mine[1:]:
                raise Mismatch(
                    f"rank {rank} has {dtype}{list(shape)} for {name}, rank 0 has "
                    f"{mine[2]}{list(mine[1])} for {mine[0]}: every rank must train the same model"
                )
