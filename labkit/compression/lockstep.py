"""All ranks of a reduction in one process, without MPI: generators stepped side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from labkit.common.errors import LabkitError
from labkit.compression.compressor import (
    Compressor,
    Gather,
    Mean,
    Reduced,
    Request,
    SparseMean,
    State,
)
from labkit.compression.payload import Tensor
from labkit.compression.selection import scatter


def reduce_all(
    compressor: Compressor,
    tensors: Sequence[Tensor],
    states: Sequence[State],
    asked: Callable[[Sequence[Request]], None] = lambda requests: None,
) -> list[Reduced]:
    """What each rank's reduction returns, when rank r brings `tensors[r]` and `states[r]`.

    Args:
        compressor: of all.
        tensors, states: by rank.
        asked: told of each collective, the requests of all ranks.
    """
    reductions = [compressor.reduce(t, s) for t, s in zip(tensors, states, strict=True)]
    answers: list[Any] = [None] * len(reductions)
    while True:
        requests, ended = [], []
        for reduction, answer in zip(reductions, answers, strict=True):
            try:
                # The first answer is None, as a generator that has not begun wants it.
                requests.append(reduction.send(answer))
            except StopIteration as end:
                ended.append(end.value)
        if ended and requests:
            raise LabkitError(f"{compressor!r}: some ranks ended while others ask for a collective")
        if ended:
            return ended
        asked(requests)
        answers = [reply_to(requests)] * len(reductions)


def reply_to(requests: Sequence[Request]) -> Any:
    """What all ranks receive for the requests that they yielded together, by rank."""
    first, ranks = requests[0], len(requests)
    if isinstance(first, Gather):
        return [request.payload for request in requests if isinstance(request, Gather)]
    total: Any = None
    for request in requests:
        if isinstance(request, SparseMean):
            # Divided while they are few, as ranks do it.
            value = scatter(request.indices, request.values / ranks, request.length)
        elif isinstance(request, Mean):
            value = request.value
        else:
            raise LabkitError(f"ranks yielded {type(first).__name__} and {type(request).__name__}")
        total = value if total is None else total + value
    return total if isinstance(first, SparseMean) else total / ranks
