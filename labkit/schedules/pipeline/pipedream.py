"""PipeDream: 1F1B that never drains; each stage changes its weights after each micro-batch."""

from __future__ import annotations

from labkit.schedules.pipeline.one_forward_one_backward import one_forward_one_backward
from labkit.schedules.pipeline.table import Table, pipeline


@pipeline(
    "pipedream",
    bubble=lambda table, *parts: 0.0,
    most=lambda table, rank: table.ranks - rank,
    asynchronous=True,
)
def pipedream(stages: int, microbatches: int) -> Table:
    """A stream of m batches in the order of 1F1B; stage s keeps p - s versions of its weights.

        p = 3, m = 6    F0 F1 F2 ·  ·  B0 F3 B1 F4 B2 F5 B3 ·  B4 ·  B5
                        ·  F0 F1 ·  B0 F2 B1 F3 B2 F4 B3 F5 B4 ·  B5
                        ·  ·  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

    Batch b goes forward and backward through stage s with the same weights, those after
    max(0, b - (p - 1 - s)) updates (`held.versions`): fresh at the last stage, p - 1 updates
    old at the first. Between filling and draining nobody waits: no bubble in the steady state.

    Args: stages: p, one a rank; microbatches: m, each a batch with an update of its own.
    Raises: InvalidInput, for numbers below 1.
    Source: Narayanan et al. 2019, *PipeDream: generalized pipeline parallelism for DNN training*;
    Harlap et al. 2018, arXiv 1806.03377. Differs from it: stages are not replicated, and
    vertical sync (one version for all stages) is left out, as it is in its experiments.
    """
    return one_forward_one_backward(stages, microbatches)
