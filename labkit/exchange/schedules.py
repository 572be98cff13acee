"""The exchange schedules, which decide when buckets are exchanged, and their sources."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A rule that decides when the buckets of a training step are exchanged.

    All schedules compute the exact mean of the gradients; only the times of exchange differ.

    Attributes:
        name: The name of the schedule, as in `AllReduce(schedule=…)`.
        explanation: The description of the schedule and its source, in the form of a docstring.
        after: Whether the exchange begins after backpropagation and blocks the training step.
        turns: Whether ranks take turns in using the links that they share.
        into_next: Whether the exchange overlaps with the next step, which needs `PriorityTraining`.
    """

    name: str
    explanation: str
    after: bool = False
    turns: bool = False
    into_next: bool = False


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule(
            "sequential",
            """Exchange all buckets after backpropagation.

    Source: J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz, Revisiting Distributed Synchronous
    SGD, 2016, arXiv 1604.00981. Differs from it: ranks use no server and no backup workers.
    """,
            after=True,
        ),
        Schedule(
            "overlap",
            """Exchange each bucket when its gradients are ready, during backpropagation.

    If the ranks of a host compute on all its cores, a core that moves a bucket cannot compute.
    labkit then exchanges buckets after backpropagation, and the record notes that the step blocks.

    Source: H. Zhang et al., Poseidon, 2017, arXiv 1706.03292 (wait-free backpropagation); buckets:
    S. Li et al., PyTorch Distributed, 2020, arXiv 2006.15704.
    """,
        ),
        Schedule(
            "priority",
            """Exchange front layers first, so that the next step starts during the exchange.

    Large gradients are split into several buckets; each layer is updated before its next use.

    Source: A. Jayarajan et al., Priority-based Parameter Propagation, 2019, arXiv 1905.03960;
    Y. Peng et al., A Generic Communication Scheduler for Distributed DNN Training Acceleration,
    SOSP 2019. Differs from them: the order of buckets is fixed from measured times and the same on
    all ranks, not decided while buckets wait.
    """,
            into_next=True,
        ),
        Schedule(
            "staggered",
            """Exchange after backpropagation; ranks use a shared link one after another.

    Source: folklore; a shared link carries one message at a time without loss of bandwidth.
    """,
            after=True,
            turns=True,
        ),
    )
}
