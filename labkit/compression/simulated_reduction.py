"""Simulation of a compressed reduction: one process, without MPI, computes all ranks."""

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
    Tensor,
)
from labkit.compression.sparsification import scatter


def reduce_all(
    compressor: Compressor,
    tensors: Sequence[Tensor],
    states: Sequence[State],
    on_requests: Callable[[Sequence[Request]], None] = lambda requests: None,
) -> list[Reduced]:
    """Reduce each rank's tensor with its state; return the ranks' results in rank order.

    Args:
        compressor: The compressor that all ranks use.
        tensors, states: The gradient and the compressor state of each rank, in rank order.
        on_requests: A function that is called before each collective, with the requests of all
            ranks as its argument.
    """
    reductions = [compressor.reduce(t, s) for t, s in zip(tensors, states, strict=True)]
    answers: list[Any] = [None] * len(reductions)
    while True:
        requests, results = [], []
        for reduction, answer in zip(reductions, answers, strict=True):
            try:
                # The first answer is None, because Python allows only None to be sent to a new
                # generator.
                requests.append(reduction.send(answer))
            except StopIteration as end:
                results.append(end.value)
        if results and requests:
            raise LabkitError(
                f"{compressor!r}: some ranks have ended their compression, but other ranks still "
                "request a collective operation"
            )
        if results:
            return results
        on_requests(requests)
        answers = [reply_to(requests)] * len(reductions)


def reply_to(requests: Sequence[Request]) -> Any:
    """Return the result of one collective, given the requests of all ranks in rank order."""
    first, ranks = requests[0], len(requests)
    if isinstance(first, Gather):
        return [request.payload for request in requests if isinstance(request, Gather)]
    total: Any = None
    for request in requests:
        if isinstance(request, SparseMean):
            # Values are divided before the scatter, because the sparse vector is shorter than the
            # dense vector.
            value = scatter(request.indices, request.values / ranks, request.length)
        elif isinstance(request, Mean):
            value = request.value
        else:
            raise LabkitError(f"ranks yielded {type(first).__name__} and {type(request).__name__}")
        total = value if total is None else total + value
    return total if isinstance(first, SparseMean) else total / ranks
