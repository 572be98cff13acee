"""When buckets travel: the schedules of the exchange, each exact, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """When the buckets of a step travel.

    Attributes:
        name: as `AllReduce(schedule=…)` has it.
        explained: what it does, and where it comes from.
        after: begins when backpropagation has ended: the step stands still, all goes at once.
        turns: ranks take turns at links that they share.
        into_next: reaches into the next step, so that it has a training step of its own.
    """

    name: str
    explained: str
    after: bool = False
    turns: bool = False
    into_next: bool = False


SCHEDULES = {
    each.name: each
    for each in (
        Schedule(
            "sequential",
            """All buckets after backpropagation.

    Source: J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz, Revisiting Distributed Synchronous
    SGD, 2016, arXiv 1604.00981. Differs from it: no server, and no backup workers.
    """,
            after=True,
        ),
        Schedule(
            "overlap",
            """Each bucket as soon as its gradients are there, while backpropagation goes on.

    Where ranks of one host compute on all of its cores, a core that moved a bucket meanwhile would
    not compute: there buckets wait for the end, and the record says that the step stands still.

    Source: H. Zhang et al., Poseidon, 2017, arXiv 1706.03292 (wait-free backpropagation); buckets:
    S. Li et al., PyTorch Distributed, 2020, arXiv 2006.15704.
    """,
        ),
        Schedule(
            "priority",
            """Front layers first: the next step starts while the rest is under way.

    Large gradients are cut; each layer is updated right before it is used again.

    Source: A. Jayarajan et al., Priority-based Parameter Propagation, 2019, arXiv 1905.03960;
    Y. Peng et al., A Generic Communication Scheduler for Distributed DNN Training Acceleration,
    SOSP 2019. Differs from them: the order is fixed from measured times, the same on all ranks,
    not decided while buckets wait.
    """,
            into_next=True,
        ),
        Schedule(
            "staggered",
            """As sequential, and ranks take turns at links that they share.

    Source: folklore; a shared line carries one message at a time without loss of bandwidth.
    """,
            after=True,
            turns=True,
        ),
    )
}
