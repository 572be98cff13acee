"""Forecasts of pipeline parallelism: the schedule is simulated with the measured layer times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Protocol

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.forecast.calibration import LayerCost, Provenance, StepCost
from labkit.forecast.neighbours import Group, link_bytes, typical_interval
from labkit.forecast.query import Query, StepForecast, network_error_sources
from labkit.forecast.slices import SliceCost, slice_cost
from labkit.network import Slowdown
from labkit.schedules.pipeline import ScheduleTable
from labkit.schedules.pipeline_stages import (
    balance_costs,
    explicit_partition,
    in_flight,
    stored_versions,
)
from labkit.simulate import PipelineSimulation, simulate_pipeline

# A schedule without flushes is simulated for one iteration per rank, and for this number of further
# iterations.
AHEAD = 8


class StagedStrategy(Protocol):
    """A strategy that divides the model into stages; see `labkit.strategies.staged.Staged`."""

    @property
    def partition(self) -> str | tuple[int, ...]:
        """The rule that divides the model's blocks into stages, or the block count per stage."""

    @property
    def tensor_parallel_size(self) -> int:
        """The number of ranks that compute one stage together (tensor parallelism)."""

    def ranks(self, workers: int) -> int:
        """Return the number of ranks of one pipeline, without tensor parallelism."""

    def depth(self, workers: int) -> int:
        """Return the number of stages of one replica."""

    def replicas(self, workers: int) -> int:
        """Return the number of replicas among which a batch is divided."""

    def rows(self, batch_size: int, workers: int) -> int:
        """Return the number of samples in the largest micro-batch."""

    def table(self, ranks: int, iterations: int = 1) -> ScheduleTable:
        """Return the pipeline schedule of one replica."""


def of_stages(
    query: Query, strategy: StagedStrategy, recompute: bool = False, goes_on: bool = False
) -> StepForecast:
    """Return the step forecast of a strategy with stages.

    Args:
        query: Query with the experiment and the calibration.
        strategy: Strategy that defines the stages and the schedule.
        recompute: Whether stages repeat the forward pass before the backward pass, instead of
            storing activations.
        goes_on: Whether the pipeline continues from step to step without a flush.
    """
    workers, slices = query.workers, strategy.tensor_parallel_size
    ranks, replicas = strategy.ranks(workers), strategy.replicas(workers)
    table = strategy.table(ranks, ranks + AHEAD if goes_on else 1)
    stages = _cut(query, strategy)
    rows = strategy.rows(query.experiment.batch_size, workers)
    step = query.step(rows)
    # A recurrent model may divide its sequence into sections. Each section contains all samples of
    # the batch. Each section needs only a fraction of the work.
    part = 1 / table.microbatches if table.recurrent else 1.0
    costs = [_cost(query, stage, step, rows, slices) for stage in stages]
    forward = part * np.array([cost.forward + cost.wire / 2 for cost in costs])
    backward = part * np.array([cost.backward + cost.wire / 2 for cost in costs])
    backward += recompute * forward
    nbytes = part * rows * np.array([stage[-1].out for stage in stages], float)
    lane = Group.of(query, range(0, ranks * slices, slices))
    network = lane.between(float(nbytes[:-1].max(initial=0.0)))
    network = network.model_copy(update={"stragglers": _slow(query, ranks, slices)})
    seconds = forward, backward / 2, backward / 2
    simulation = simulate_pipeline(table, *seconds, network=network, nbytes=nbytes)
    free_simulation = simulate_pipeline(
        table, *seconds, network=network.model_copy(update={"latency": 0.0, "bandwidth": 1e18})
    )
    total, compute_seconds = (
        _steady(result, ranks) if goes_on else result.seconds
        for result in (simulation, free_simulation)
    )
    share, mean, sent = _update(query, strategy, stages)
    count = AHEAD + ranks if goes_on else 1
    updates = table.microbatches if table.asynchronous and not goes_on else 1
    busy = float(free_simulation.busy.max()) / count
    forward_share = float(forward.sum() / (forward.sum() + backward.sum() or 1.0))
    rank = int(free_simulation.busy.argmax())
    shared = sum(part * cost.wire for cost in costs[rank::ranks]) * table.microbatches
    shared = min(busy, shared if not goes_on else shared / table.microbatches)
    messages = _messages(table, nbytes / count, ranks, slices, replicas)
    parts = {
        "forward": forward_share * (busy - shared),
        "backward": (1 - forward_share) * (busy - shared),
        "update": updates * share * step.update.median,
        "other": step.other.median,
        "wire": total - compute_seconds + shared + updates * mean,
        "wait": max(0.0, compute_seconds - busy),
    }
    return StepForecast(
        parts=parts,
        rows=query.experiment.batch_size / replicas,
        spread=typical_interval(query, step, parts),
        nbytes=link_bytes(query, messages),
        memory=_memory(query, table, stages, rows, recompute),
        sources=(
            query.compute_source(rows, "divided among stages by the layers' shares"),
            Provenance(
                "order and waiting", f"the schedule {table.name!r}, simulated with its messages"
            ),
            *network_error_sources(query),
        ),
        more={
            "bubble": 1 - busy / compute_seconds if compute_seconds else 0.0,
            "sent": sum(result for *_, result in messages) + sent,
        },
    )


def _slow(query: Query, ranks: int, slices: int) -> dict[int, Slowdown]:
    """Return the largest slowdown of each rank over all replicas.

    Raises:
        InvalidInput: A slowdown is random.
    """
    slowdowns: dict[int, Slowdown] = {}
    for rank, slowdown in query.slowdowns.items():
        if slowdown.distribution != "constant":
            raise InvalidInput(
                f"stragglers={{{rank}: …}} with distribution={slowdown.distribution!r} has no "
                "forecast for stages, because "
                "random delays may change the order of computations; use distribution='constant'"
            )
        place = rank // slices % ranks
        previous = slowdowns.get(place, Slowdown())
        factors = max(previous.compute, slowdown.compute), max(previous.transfer, slowdown.transfer)
        slowdowns[place] = Slowdown(compute=factors[0], transfer=factors[1])
    return slowdowns


def _cut(query: Query, strategy: StagedStrategy) -> list[list[LayerCost]]:
    """Return the layers of each stage; a layer without weights joins the layer before it."""
    layers, depth = query.model.layers, strategy.depth(query.workers)
    blocks: list[list[LayerCost]] = []
    for layer in layers:
        if blocks and (not layer.weights or not any(layer.weights for layer in blocks[-1])):
            blocks[-1].append(layer)
        else:
            blocks.append([layer])
    partition = strategy.partition
    if not isinstance(partition, str) and sum(partition) == len(layers):
        blocks = [[layer] for layer in layers]
    if depth > len(blocks) or (not isinstance(partition, str) and sum(partition) != len(blocks)):
        raise InvalidInput(
            f"a forecast divides this model between its {len(blocks)} layers with weights (of "
            f"{len(layers)} layers); give at most {len(blocks)} stages, and "
            "partition='parameters', 'time', or numbers of layers whose sum is "
            f"{len(blocks)} or {len(layers)}"
        )
    if not isinstance(partition, str):
        edges = explicit_partition(partition, len(blocks))
    else:
        weigh = _seconds if partition == "time" else _size
        edges = balance_costs([float(sum(map(weigh, block))) for block in blocks], depth)
    return [
        [layer for block in blocks[start:stop] for layer in block]
        for start, stop in pairwise(edges)
    ]


def _size(layer: LayerCost) -> float:
    return sum(map(prod, layer.weights))


def _seconds(layer: LayerCost) -> float:
    return layer.forward + 2 * layer.backward


def _cost(
    query: Query, layers: Sequence[LayerCost], step: StepCost, rows: float, slices: int
) -> SliceCost:
    """Return the cost of a stage's forward and backward pass for one micro-batch."""
    if slices > 1:
        return slice_cost(Group.of(query, range(slices)), layers, step, rows)
    return SliceCost(
        sum(layer.forward for layer in layers) * step.forward.median,
        sum(layer.backward for layer in layers) * step.backward.median,
        *(0.0, 0.0),
    )


def _steady(simulation: PipelineSimulation, ranks: int) -> float:
    """Return the mean seconds of an iteration, without the first iterations (one per rank)."""
    is_last = (simulation.table.stage == simulation.table.stages - 1) & simulation.table.computes
    ends = np.sort(simulation.stop[is_last & (simulation.table.action == "forward")])
    return float(ends[-1] - ends[ranks - 1]) / (len(ends) - ranks)


def _update(
    query: Query, strategy: StagedStrategy, stages: Sequence[Sequence[LayerCost]]
) -> tuple[float, float, float]:
    """Return weight share, time and bytes of the allreduce that averages over all replicas.

    Returns: The maximum fraction of all weights on one rank, and the allreduce's cost. The cost is
        the seconds of the allreduce and the total bytes sent.
    """
    workers, ranks = query.workers, strategy.ranks(query.workers)
    stage_sizes = [sum(map(_size, stage)) for stage in stages]
    largest = (
        max(sum(stage_sizes[rank::ranks]) for rank in range(ranks)) / strategy.tensor_parallel_size
    )
    a_replica = ranks * strategy.tensor_parallel_size
    group = Group.of(query, range(0, workers, a_replica))
    mean = group.total(query.dtype.itemsize * largest)
    sent = mean.sent * sum(stage_sizes) / largest if largest else 0.0
    return largest / max(1.0, sum(stage_sizes)), mean.seconds.median, sent


def _messages(
    table: ScheduleTable, nbytes: np.ndarray, ranks: int, slices: int, replicas: int
) -> list[tuple[int, int, float]]:
    """Return all messages between stages in a step, as (sender, receiver, bytes)."""
    messages = []
    for _, stage, action, _, peer in table.rows():
        if action == "send":
            ends = stage % ranks, peer % ranks
            for rank in range(replicas * slices):
                first = rank // slices * ranks * slices + rank % slices
                sender, receiver = (first + end * slices for end in ends)
                messages.append((sender, receiver, float(nbytes[min(stage, peer)])))
    return messages


def _memory(
    query: Query,
    table: ScheduleTable,
    stages: Sequence[Sequence[LayerCost]],
    rows: float,
    recompute: bool,
) -> dict[str, float]:
    """Return the bytes per memory category on the fullest rank, with its batches in flight."""
    batches_in_flight, memory_of_model = in_flight(table), query.memory(rows)
    size = max(1.0, sum(_size(layer) for stage in stages for layer in stage))
    out = max(1.0, sum(layer.out for stage in stages for layer in stage))
    stashed_versions = stored_versions(table)
    memories = []
    for rank in range(table.ranks):
        layers = [layer for stage in stages[rank :: table.ranks] for layer in stage]
        share = sum(map(_size, layers)) / size
        acts = (
            batches_in_flight[rank]
            * sum(layer.out for layer in layers)
            / out
            * memory_of_model["activations"]
        )
        memory = {n: share * memory_of_model[n] for n in ("weights", "gradients", "optimizer")}
        memory["activations"] = acts / (len(layers) if recompute else 1)
        memory["versions"] = (int(stashed_versions[rank :: table.ranks].max()) - 1) * memory[
            "weights"
        ]
        memories.append(memory)
    return max(memories, key=lambda layer: sum(layer.values()))
