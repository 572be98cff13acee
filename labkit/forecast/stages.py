"""What models in stages take: the table that ranks carry out, with the seconds of their layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Protocol

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.forecast.calibration import LayerCost, Source, StepCost
from labkit.forecast.neighbours import Group, by_link, typical
from labkit.forecast.query import Query, StepForecast, trust
from labkit.forecast.slices import Cost, of_slices
from labkit.network import Slowdown
from labkit.schedules.pipeline import Table
from labkit.schedules.pipeline.partition import by_hand, cheapest
from labkit.schedules.pipeline.stage_memory import in_flight, stashed
from labkit.simulate import PipelineSimulation, simulate_pipeline

AHEAD = 8  # iterations of a schedule that goes on, behind as many as there are ranks


class Lanes(Protocol):
    """What is asked of a strategy with stages; see `labkit.strategies.staged.Staged`."""

    @property
    def partition(self) -> str | tuple[int, ...]:
        """How blocks are divided."""

    @property
    def slices(self) -> int:
        """Ranks that share a stage."""

    def ranks(self, workers: int) -> int:
        """Of one lane."""

    def depth(self, workers: int) -> int:
        """Stages of one replica."""

    def replicas(self, workers: int) -> int:
        """Models that share a batch."""

    def rows(self, batch_size: int, workers: int) -> int:
        """Of the largest batch that goes through a stage at a time."""

    def table(self, ranks: int, iterations: int = 1) -> Table:
        """The schedule of one replica."""


def of_stages(
    asked: Query, strategy: Lanes, recompute: bool = False, goes_on: bool = False
) -> StepForecast:
    """What a step takes.

    Args:
        asked: what is asked.
        strategy: how the model is cut, and its table.
        recompute: stages go forward twice.
        goes_on: from step to step, without waiting for its end.
    """
    workers, slices = asked.workers, strategy.slices
    ranks, replicas = strategy.ranks(workers), strategy.replicas(workers)
    table = strategy.table(ranks, ranks + AHEAD if goes_on else 1)
    stages = _cut(asked, strategy)
    rows = strategy.rows(asked.experiment.batch_size, workers)
    step = asked.step(rows)
    # Stretches of time have all rows, and each a part of the work.
    part = 1 / table.microbatches if table.recurrent else 1.0
    costs = [_cost(asked, stage, step, rows, slices) for stage in stages]
    forward = part * np.array([cost.forward + cost.wire / 2 for cost in costs])
    backward = part * np.array([cost.backward + cost.wire / 2 for cost in costs])
    backward += recompute * forward
    nbytes = part * rows * np.array([stage[-1].out for stage in stages], float)
    lane = Group.of(asked, range(0, ranks * slices, slices))
    network = lane.between(float(nbytes[:-1].max(initial=0.0)))
    network = network.model_copy(update={"slow": _slow(asked, ranks, slices)})
    seconds = forward, backward / 2, backward / 2
    found = simulate_pipeline(table, *seconds, network=network, nbytes=nbytes)
    free = simulate_pipeline(
        table, *seconds, network=network.model_copy(update={"latency": 0.0, "bandwidth": 1e18})
    )
    whole, alone = (_steady(each, ranks) if goes_on else each.seconds for each in (found, free))
    share, mean, sent = _update(asked, strategy, stages)
    count = AHEAD + ranks if goes_on else 1
    updates = table.microbatches if table.asynchronous and not goes_on else 1
    busy = float(free.busy.max()) / count
    ahead = float(forward.sum() / (forward.sum() + backward.sum() or 1.0))
    rank = int(free.busy.argmax())
    shared = sum(part * cost.wire for cost in costs[rank::ranks]) * table.microbatches
    shared = min(busy, shared if not goes_on else shared / table.microbatches)
    messages = _messages(table, nbytes / count, ranks, slices, replicas)
    parts = {
        "forward": ahead * (busy - shared),
        "backward": (1 - ahead) * (busy - shared),
        "update": updates * share * step.update.median,
        "other": step.other.median,
        "wire": whole - alone + shared + updates * mean,
        "wait": max(0.0, alone - busy),
    }
    return StepForecast(
        parts=parts,
        rows=asked.experiment.batch_size / replicas,
        spread=typical(asked, step, parts),
        nbytes=by_link(asked, messages),
        memory=_memory(asked, table, stages, rows, recompute),
        sources=(
            asked.computing(rows, "by the shares of layers"),
            Source("order and waiting", f"the table {table.name!r}, simulated with its messages"),
            *trust(asked),
        ),
        more={
            "bubble": 1 - busy / alone if alone else 0.0,
            "sent": sum(each for *_, each in messages) + sent,
        },
    )


def _slow(asked: Query, ranks: int, slices: int) -> dict[int, Slowdown]:
    """Of each place in a lane the slowest of all lanes, which meet in every step.

    Raises: InvalidInput, where one is slow by chance.
    """
    found: dict[int, Slowdown] = {}
    for rank, law in asked.slow.items():
        if law.law != "constant":
            raise InvalidInput(
                f"slow={{{rank}: …}} with law={law.law!r} has no forecast for stages, whose order "
                "one draw does not tell; use law='constant'"
            )
        place = rank // slices % ranks
        known = found.get(place, Slowdown())
        factors = max(known.compute, law.compute), max(known.transfer, law.transfer)
        found[place] = Slowdown(compute=factors[0], transfer=factors[1])
    return found


def _cut(asked: Query, strategy: Lanes) -> list[list[LayerCost]]:
    """The layers of each stage; what has no weights goes with what stands before it."""
    layers, depth = asked.model.layers, strategy.depth(asked.workers)
    blocks: list[list[LayerCost]] = []
    for each in layers:
        if blocks and (not each.weights or not any(layer.weights for layer in blocks[-1])):
            blocks[-1].append(each)
        else:
            blocks.append([each])
    given = strategy.partition
    if not isinstance(given, str) and sum(given) == len(layers):
        blocks = [[each] for each in layers]
    if depth > len(blocks) or (not isinstance(given, str) and sum(given) != len(blocks)):
        raise InvalidInput(
            f"a forecast knows {len(layers)} layers of this model, {len(blocks)} of them with "
            f"weights, but not where blocks of several layers begin; give at most {len(blocks)} "
            "stages, and partition='parameters', 'time' or numbers of layers"
        )
    if not isinstance(given, str):
        edges = by_hand(given, len(blocks))
    else:
        weigh = _seconds if given == "time" else _size
        edges = cheapest([float(sum(map(weigh, block))) for block in blocks], depth)
    return [
        [layer for block in blocks[start:stop] for layer in block]
        for start, stop in pairwise(edges)
    ]


def _size(layer: LayerCost) -> float:
    return sum(map(prod, layer.weights))


def _seconds(layer: LayerCost) -> float:
    return layer.forward + 2 * layer.backward


def _cost(
    asked: Query, layers: Sequence[LayerCost], step: StepCost, rows: float, slices: int
) -> Cost:
    """Of a stage on one micro-batch."""
    if slices > 1:
        return of_slices(Group.of(asked, range(slices)), layers, step, rows)
    return Cost(
        sum(layer.forward for layer in layers) * step.forward.median,
        sum(layer.backward for layer in layers) * step.backward.median,
        *(0.0, 0.0),
    )


def _steady(found: PipelineSimulation, ranks: int) -> float:
    """Seconds of an iteration when all are under way: between the ends of the last ones."""
    last = (found.table.stage == found.table.stages - 1) & found.table.computes
    ends = np.sort(found.stop[last & (found.table.action == "forward")])
    return float(ends[-1] - ends[ranks - 1]) / (len(ends) - ranks)


def _update(
    asked: Query, strategy: Lanes, stages: Sequence[Sequence[LayerCost]]
) -> tuple[float, float, float]:
    """The share of all weights on the fullest rank, seconds of their mean, and bytes sent."""
    workers, ranks = asked.workers, strategy.ranks(asked.workers)
    held = [sum(map(_size, stage)) for stage in stages]
    most = max(sum(held[rank::ranks]) for rank in range(ranks)) / strategy.slices
    a_replica = ranks * strategy.slices
    group = Group.of(asked, range(0, workers, a_replica))
    mean = group.total(asked.dtype.itemsize * most)
    sent = mean.sent * sum(held) / most if most else 0.0
    return most / max(1.0, sum(held)), mean.seconds.median, sent


def _messages(
    table: Table, nbytes: np.ndarray, ranks: int, slices: int, replicas: int
) -> list[tuple[int, int, float]]:
    """All that stages send each other in a step."""
    found = []
    for _, stage, action, _, peer in table.rows():
        if action == "send":
            ends = stage % ranks, peer % ranks
            for rank in range(replicas * slices):
                first = rank // slices * ranks * slices + rank % slices
                one, other = (first + end * slices for end in ends)
                found.append((one, other, float(nbytes[min(stage, peer)])))
    return found


def _memory(
    asked: Query,
    table: Table,
    stages: Sequence[Sequence[LayerCost]],
    rows: float,
    recompute: bool,
) -> dict[str, float]:
    """Of the fullest rank, whose activations are those of micro-batches under way."""
    held, whole = in_flight(table), asked.memory(rows)
    size = max(1.0, sum(_size(each) for stage in stages for each in stage))
    out = max(1.0, sum(each.out for stage in stages for each in stage))
    kept = stashed(table)
    found = []
    for rank in range(table.ranks):
        own = [each for stage in stages[rank :: table.ranks] for each in stage]
        share = sum(map(_size, own)) / size
        acts = held[rank] * sum(each.out for each in own) / out * whole["activations"]
        memory = {n: share * whole[n] for n in ("weights", "gradients", "optimizer")}
        memory["activations"] = acts / (len(own) if recompute else 1)
        memory["versions"] = (int(kept[rank :: table.ranks].max()) - 1) * memory["weights"]
        found.append(memory)
    return max(found, key=lambda each: sum(each.values()))
