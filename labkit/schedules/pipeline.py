"""Pipeline schedules as functions that map numbers of stages and micro-batches to a table."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from labkit.common.errors import InvalidInput
from labkit.common.rows import cut
from labkit.schedules.pipeline_table import (
    Action,
    PipelineSchedule,
    ScheduleTable,
    Work,
    as_table,
    filling,
    lay_out,
    pipeline,
)
from labkit.schedules.round import Integers


@pipeline("gpipe", filling, lambda table, rank: table.microbatches)
def gpipe(stages: int, microbatches: int) -> ScheduleTable:
    """All forwards, then all backwards: each stage stores the activations of all m micro-batches.

        p = 3, m = 4    F0 F1 F2 F3 ·  ·  ·  ·  B3 B2 B1 B0
                        ·  F0 F1 F2 F3 ·  ·  B3 B2 B1 B0
                        ·  ·  F0 F1 F2 F3 B3 B2 B1 B0

    With p stages and m micro-batches, the bubble's share is (p - 1)/(m + p - 1).

    Args:
        stages: Number p of stages, one per rank.
        microbatches: Number m of micro-batches.

    Raises:
        InvalidInput: If a number is below 1.

    Source: Huang et al. 2019, *GPipe: efficient training of giant neural networks using pipeline
    parallelism*, arXiv 1811.06965. Difference from the paper: the schedule has no entries for
    recomputation, but a stage may recompute activations in its backward pass.
    """

    def order(stage: int) -> Iterator[Work]:
        for microbatch in range(microbatches):
            yield "forward", stage, microbatch
        for microbatch in reversed(range(microbatches)):
            yield "backward", stage, microbatch

    return lay_out("gpipe", order, stages, microbatches)


@pipeline("wavefront", filling, lambda table, rank: table.microbatches, recurrent=True)
def wavefront(layers: int, steps: int) -> ScheduleTable:
    """Layer l processes time step t while layer l + 1 processes time step t - 1.

        3 layers, 4 steps    F0 F1 F2 F3 ·  ·  ·  ·  B3 B2 B1 B0
                             ·  F0 F1 F2 F3 ·  ·  B3 B2 B1 B0
                             ·  ·  F0 F1 F2 F3 B3 B2 B1 B0

    Layer l at step t needs layer l - 1 at step t. Layer l also needs its own state at step t - 1.
    All pairs of layer and time step on a diagonal are independent. The ranks compute the pairs of a
    diagonal at the same time. The wavefront schedule has the same table as `gpipe`. Backpropagation
    through time runs from the last step to the first, which excludes orders such as 1F1B.

    Args:
        layers: Number of stages; each rank computes one stage.
        steps: Number of time steps, or number of segments if each segment contains several time
            steps.

    Raises:
        InvalidInput: If a number is below 1.

    Source: Appleyard, Kocisky and Blunsom 2016, *Optimizing performance of recurrent neural
    networks on GPUs*, arXiv 1604.01946. Difference from the paper: layers run on ranks, whereas the
    paper runs them in GPU streams.
    """
    return gpipe(layers, steps)


def time_segments(steps: int, count: int) -> list[int]:
    """Return the edges of `count` segments of a sequence; segment lengths differ by at most one.

    time_segments(8, 3) = [0, 2, 5, 8]

    Raises:
        InvalidInput: If there are more segments than time steps.
    """
    if count > steps:
        raise InvalidInput(
            f"microbatches={count} exceeds the {steps} time steps, but each segment needs at "
            f"least one; allowed: 1 to {steps}"
        )
    return cut(steps, [1.0] * count)


@pipeline("1f1b", filling, lambda table, rank: table.ranks - rank)
def one_forward_one_backward(stages: int, microbatches: int) -> ScheduleTable:
    """Alternate forward and backward passes; stage s stores at most p - s micro-batches.

        p = 3, m = 4    F0 F1 F2 ·  ·  B0 F3 B1 ·  B2 ·  B3
                        ·  F0 F1 ·  B0 F2 B1 F3 B2 ·  B3
                        ·  ·  F0 B0 F1 B1 F2 B2 F3 B3

    The idle time (bubble) equals that of `gpipe`, but less memory is needed.

    Args:
        stages: Number p of stages, one per rank.
        microbatches: Number m of micro-batches.

    Raises:
        InvalidInput: If a number is below 1.

    Source: Narayanan et al. 2021, *Memory-efficient pipeline-parallel DNN training* (PipeDream-
    Flush), arXiv 2006.09503.
    """

    def order(stage: int) -> Iterator[Work]:
        ahead = min(stages - stage, microbatches)
        for microbatch in range(ahead):
            yield "forward", stage, microbatch
        for microbatch in range(microbatches):
            yield "backward", stage, microbatch
            if microbatch + ahead < microbatches:
                yield "forward", stage, microbatch + ahead

    return lay_out("1f1b", order, stages, microbatches)


@pipeline(
    "pipedream",
    bubble=lambda table, *parts: 0.0,
    most=lambda table, rank: table.ranks - rank,
    asynchronous=True,
)
def pipedream(stages: int, microbatches: int) -> ScheduleTable:
    """Process m batches in 1F1B order; stage s stores at most p - s versions of its weights.

        p = 3, m = 6    F0 F1 F2 ·  ·  B0 F3 B1 F4 B2 F5 B3 ·  B4 ·  B5
                        ·  F0 F1 ·  B0 F2 B1 F3 B2 F4 B3 F5 B4 ·  B5
                        ·  ·  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

    Batch b runs forward and backward through stage s with the same version of the weights. The
    number of updates in the weights depends on batch b and stage s. With p stages, the number of
    updates is max(0, b - (p - 1 - s)) (`stage_memory.versions`). The last stage uses the newest
    weights. The first of p stages uses weights that are p - 1 updates old. No rank waits between
    the filling and the draining of the pipeline. The steady state of the pipeline therefore has no
    bubble.

    Args:
        stages: Number p of stages, one per rank.
        microbatches: Number m of micro-batches; an update follows each micro-batch.

    Raises:
        InvalidInput: If a number is below 1.

    Source: Narayanan et al. 2019, *PipeDream: generalized pipeline parallelism for DNN training*;
    Harlap et al. 2018, arXiv 1806.03377. Difference from the paper: stages are not replicated, and
    vertical sync (one version for all stages) is omitted, as in the paper's experiments.
    """
    return one_forward_one_backward(stages, microbatches)


def _bubble(table: ScheduleTable, forward: float, backward: float, weight: float) -> float:
    # With fewer micro-batches than ranks, each rank also waits between its model chunks.
    gaps = (table.chunks - 1) * max(0, table.ranks - table.microbatches)
    seconds = filling(table, forward, backward, weight) + gaps * (forward + backward + weight)
    return seconds / table.chunks


def _most_in_flight(table: ScheduleTable, rank: Integers) -> Integers:
    # Each stored activation belongs to one model chunk, which has 1/v of a rank's layers for v
    # chunks.
    group_size = table.microbatches // _groups(table.ranks, table.microbatches)
    return (table.chunks - 1) * group_size + 2 * (table.ranks - 1 - rank) + 1


@pipeline("interleaved", _bubble, _most_in_flight, chunked=True)
def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> ScheduleTable:
    """1F1B with v stages per rank: rank r has the stages r, r + p, … as chunks a, b, …

        p = 2, m = 2, v = 2    F0a F1a F0b F1b ·   B0b ·   B1b B0a B1a
                               ·   F0a F1a F0b B0b F1b B1b B0a B1a

    Micro-batches move in max(1, floor(m/p)) groups of equal size. A group passes through all chunks
    before the next group starts. A stage has 1/v of a rank's layers. A tick takes 1/v of the time
    of a tick in `one_forward_one_backward`. The bubble is (p - 1)/(v m) of the compute time, v
    times smaller than without chunks. With fewer micro-batches than ranks (m < p), the bubble is
    (p - 1 + (v - 1)(p - m))/(v m). The schedule sends v times as many messages. If groups have p
    micro-batches, rank 0 needs (p - 1)/(p v) more memory.

    Args:
        ranks: Number p of ranks.
        microbatches: Number m of micro-batches, a multiple of max(1, floor(m/p)).
        chunks: Number v of stages per rank.

    Raises:
        InvalidInput: If a number is below 1, or if the micro-batches do not form equal groups.

    Source: Narayanan et al. 2021, *Efficient large-scale language model training on GPU clusters
    using Megatron-LM*, arXiv 2104.04473. Difference from the paper: unlike the paper, this schedule
    allows group sizes other than p. PyTorch's `ScheduleInterleaved1F1B` defines the order of
    computations for group sizes other than p.
    """
    groups = _groups(ranks, microbatches)
    if microbatches % groups:
        below, above = (
            next(m for m in count(microbatches, step) if m % _groups(ranks, m) == 0)
            for step in (-1, 1)
        )
        raise InvalidInput(
            f"schedule='interleaved' needs equal groups of {ranks} micro-batches (the number of "
            f"ranks) or more, but {microbatches} make {groups} unequal groups; give {below} or "
            f"{above} micro-batches"
        )
    group_size = microbatches // groups
    # Each rank executes `total` forward passes and as many backward passes.
    total = microbatches * chunks

    def work(number: int, rank: int, backward: bool) -> Work:
        group, place = divmod(number, group_size * chunks)
        chunk, member = divmod(place, group_size)
        microbatch = group * group_size + member
        if backward:
            return "backward", (chunks - 1 - chunk) * ranks + rank, microbatch
        return "forward", chunk * ranks + rank, microbatch

    def order(rank: int) -> Iterator[Work]:
        # A micro-batch needs two ticks for each later rank of the pipeline: one forward and one
        # backward.
        ahead = min((chunks - 1) * group_size + 2 * (ranks - 1 - rank) + 1, total)
        for number in range(ahead):
            yield work(number, rank, backward=False)
        for number in range(total):
            yield work(number, rank, backward=True)
            if number + ahead < total:
                yield work(number + ahead, rank, backward=False)

    return lay_out("interleaved", order, ranks, microbatches, chunks)


def _groups(ranks: int, microbatches: int) -> int:
    """Return the number of micro-batch groups, which must divide the number of micro-batches."""
    return max(1, microbatches // max(1, ranks))


def _h1_bubble(
    table: ScheduleTable, forward: float, backward: float, weight: float
) -> float | None:
    if table.microbatches < table.ranks or weight > forward:
        return None
    return (table.ranks - 1) * (forward + backward - weight)


@pipeline("zero_bubble", _h1_bubble, lambda table, rank: table.ranks)
def zero_bubble(stages: int, microbatches: int) -> ScheduleTable:
    """ZB-H1: 1F1B with delayed weight gradients; every stage stores at most p micro-batches.

        p = 3, m = 4    F0 F1 F2 ·  ·  B0 W0 F3 B1 W1 B2 W2 B3 W3
                        ·  F0 F1 ·  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
                        ·  ·  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    ZB-H1 needs at most as much memory for activations as the first stage of 1F1B needs. B is the
    input gradient, W the weight gradient. In formulas, F, B and W are times in s. With at least p
    micro-batches, the bubble is (p - 1)(F + B - W). For F = B = W, the bubble of ZB-H1 is a third
    of the bubble of `one_forward_one_backward`.

    Args:
        stages: Number p of stages, one per rank.
        microbatches: Number m of micro-batches.

    Raises:
        InvalidInput: If a number is below 1.

    Source: Qi et al. 2024, *Zero bubble pipeline parallelism*, arXiv 2401.10241.
    Difference from the paper: only the paper's hand-made schedules are implemented, not its
    automatic search with measured times.
    """

    def order(stage: int) -> Iterator[Work]:
        return _order(stage, microbatches, ahead=stages - stage, late=stage)

    return lay_out("zero_bubble", order, stages, microbatches)


def _h2_bubble(
    table: ScheduleTable, forward: float, backward: float, weight: float
) -> float | None:
    if table.microbatches < 2 * table.ranks - 1 or weight > min(forward, backward):
        return None
    return (table.ranks - 1) * (forward + backward - 2 * weight)


@pipeline("zero_bubble_h2", _h2_bubble, lambda table, rank: 2 * table.ranks - 1)
def zero_bubble_h2(stages: int, microbatches: int) -> ScheduleTable:
    """ZB-H2: more forwards at the start, so no rank waits; each stage stores 2p - 1 micro-batches.

        p = 3, m = 5    F0 F1 F2 F3 F4 B0 W0 B1 W1 B2 W2 B3 W3 B4 W4
                        ·  F0 F1 F2 B0 F3 B1 F4 B2 W0 B3 W1 B4 W2 W3 W4
                        ·  ·  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 W1 W2 W3 W4

    The bubble is the idle time between a rank's first and last table row. With at least 2p - 1
    micro-batches, the bubble is (p - 1)(F + B - 2W). Ranks start and end at different times. Each
    rank must update its weights without waiting for other ranks. A wait would leave a rank idle
    before the next batch.

    Args, raises and source: as `zero_bubble`.
    Difference from the paper: the paper undoes an optimizer step if a later check of the gradients
    fails; all ranks of labkit complete the check before the optimizer step.
    """

    def order(stage: int) -> Iterator[Work]:
        return _order(stage, microbatches, ahead=2 * (stages - stage) - 1, late=2 * stage)

    return lay_out("zero_bubble_h2", order, stages, microbatches)


def _order(stage: int, microbatches: int, ahead: int, late: int) -> Iterator[Work]:
    """Yield `ahead` forward passes first; delay each weight gradient by `late` micro-batches."""
    ahead = min(ahead, microbatches)
    for microbatch in range(ahead):
        yield "forward", stage, microbatch
    for microbatch in range(microbatches):
        yield "backward_input", stage, microbatch
        # Weight gradients are delayed, so that they fill ticks in which the stage would be idle.
        if microbatch >= late:
            yield "backward_weight", stage, microbatch - late
        if microbatch + ahead < microbatches:
            yield "forward", stage, microbatch + ahead
    for microbatch in range(max(microbatches - late, 0), microbatches):
        yield "backward_weight", stage, microbatch


@pipeline(
    "layerwise",
    bubble=lambda table, *parts: filling(table, *parts) * table.microbatches,
    most=lambda table, rank: 1,
    scheduling="sequential",
)
def layerwise(stages: int, microbatches: int = 1) -> ScheduleTable:
    """Each micro-batch runs forward and backward through all stages before the next one starts.

        p = 3, m = 2    F0 ·  ·  ·  ·  B0 F1 ·  ·  ·  ·  B1
                        ·  F0 ·  ·  B0 ·  ·  F1 ·  ·  B1
                        ·  ·  F0 B0 ·  ·  ·  ·  F1 B1

    Each rank works 1/p of the time, so the only gain from p ranks is their memory. With m = 1
    micro-batch, all other pipeline schedules equal the schedule `layerwise`.

    Args:
        stages: Number p of stages, one per rank.
        microbatches: Number m of micro-batches.

    Raises:
        InvalidInput: If a number is below 1.

    Source: the baseline of Huang et al. 2019, arXiv 1811.06965 (its figure 2b).
    """

    def order(stage: int) -> Iterator[Work]:
        for microbatch in range(microbatches):
            yield "forward", stage, microbatch
            yield "backward", stage, microbatch

    return lay_out("layerwise", order, stages, microbatches)


PIPELINE: dict[str, PipelineSchedule[...]] = {
    "layerwise": layerwise,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "zero_bubble_h2": zero_bubble_h2,
    "pipedream": pipedream,
    "wavefront": wavefront,
}

__all__ = [
    "PIPELINE",
    "PipelineSchedule",
    "ScheduleTable",
    "gpipe",
    "interleaved",
    "layerwise",
    "one_forward_one_backward",
    "pipedream",
    "wavefront",
    "zero_bubble",
    "zero_bubble_h2",
]


def delayed(modules: int, iterations: int) -> ScheduleTable:
    """Schedule in which backward passes use older batches than forward passes.

        K = 3, 4 iterations    F0 ·  F1 ·  F2 B0 F3 B1
                               ·  F0 ·  F1 B0 F2 B1 F3 B2
                               ·  ·  F0 B0 F1 B1 F2 B2 F3 B3

    In iteration t, module k of K runs backward with batch t - (K - 1 - k). The module number k
    starts at 0. The table numbers each batch by its iteration. A message that would arrive after
    the last iteration is omitted. Some modules therefore run no backward pass for the last batches.

    Args:
        modules: Number K of modules, one per rank.
        iterations: Number of iterations.

    Raises:
        InvalidInput: If a number is below 1.

    Source: Huo et al. 2018, arXiv 1804.10574.
    """
    if min(modules, iterations) < 1:
        raise InvalidInput(
            f"{modules} modules and {iterations} iterations are too few; give one or more of each"
        )
    rows = [
        (2 * iteration + module + place, phase, module, action, number, peer)
        for iteration in range(iterations)
        for module in range(modules)
        for place, phase, action, number, peer in _iteration(modules, iterations, iteration, module)
    ]
    return as_table("delayed gradients", rows, modules, iterations)


def _iteration(
    modules: int, iterations: int, iteration: int, module: int
) -> list[tuple[int, int, Action, int, int]]:
    """Return (tick offset, phase in the tick, action, batch, peer) for each action of a module."""
    backward_batch = iteration - (modules - 1 - module)
    first, last = module == 0, module == modules - 1
    rows: list[tuple[int, int, Action, int, int]] = [(0, 1, "forward", iteration, -1)]
    if not first:
        rows.insert(0, (0, 0, "receive", iteration, module - 1))
    if not last:
        rows.append((0, 2, "send", iteration, module + 1))
    if backward_batch < 0:
        return rows
    if not last:
        rows.append((1, 0, "receive", backward_batch, module + 1))
    rows.append((1, 1, "backward", backward_batch, -1))
    if not first and iteration + 1 < iterations:
        rows.append((1, 2, "send", backward_batch, module - 1))
    return rows
