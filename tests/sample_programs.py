"""Simulated programs without a model: gradients are formulas, and links have known times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from labkit.network import ComputeTime, Network, Slowdown, relative_compute_times
from labkit.programs import EventLog, Gradient, Roles, placed, staged
from labkit.programs.actions import Passed, Place, TimingModel, Vector
from labkit.programs.virtual_runtime import VirtualRuntime
from labkit.strategies.replicas import Replicas
from labkit.strategies.servers import Servers

SIZE = 1_000  # number of weights, of 8 bytes each
PASSED = 10  # values that pass between the stages of a replica
FAST = Network(latency=1e-3, bandwidth=1e6)  # 8 ms for a vector of weights, plus 1 ms of latency


@dataclass
class Numbers:
    """Gradients that depend on the worker and its weights; an update subtracts a tenth of them."""

    held: dict[int, Vector] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    rows: list[dict[str, float]] = field(default_factory=list)
    epochs: list[tuple[int, int]] = field(default_factory=list)
    # For each worker and stage: the current step and its weights.
    under_way: dict[tuple[int, int], tuple[int, Vector]] = field(default_factory=dict)
    kept: dict[int, list[float]] = field(default_factory=dict)
    stages: int = 1
    forgot: list[int] = field(default_factory=list)

    def gradient(self, worker: int, weights: Vector) -> Gradient:
        step = self.steps.get(worker, 0)
        self.steps[worker] = step + 1
        return Gradient(0.01 * weights + (worker + 1), self.batch(worker), 0.5 / (step + 1), step)

    def predictions(self, number: int, worker: int, step: int, weights: Vector) -> Vector:
        """Return predictions that depend on the predicting worker, the batch and the weights."""
        return (number + 1) * weights[:PASSED] + 10.0 * worker + step

    def distilled(self, worker: int, weights: Vector, soft: Vector, share: float) -> Gradient:
        """Return the gradient, pulled towards soft targets."""
        found = self.gradient(worker, weights)
        drawn = np.resize(soft, weights.size)
        return replace(found, values=found.values + share * (0.01 * weights - drawn))

    def batch(self, worker: int) -> int:
        """Return the number of rows in a worker's batches."""
        return 2

    def curved(self, worker: int, weights: Vector, ends: Sequence[int]) -> Gradient:
        """Return curvatures in which no block depends on another."""
        rows = [np.zeros_like(weights) for _ in ends[1:]]
        for row, (start, stop) in zip(rows, pairwise(ends), strict=True):
            row[start:stop] = 1.0
        return Gradient(np.concatenate(rows), 2, 0.0, 0)

    def forward(self, place: Place, weights: Vector, values: tuple[Vector, ...]) -> Passed:
        """Pass on the number of stages up to and including this one."""
        worker, stage, *_ = place
        assert [value.tolist() for value in values] == [[stage] * PASSED] * (stage > 0)
        step = self.under_way.get((worker, stage), (-1, weights))[0] + 1
        self.under_way[worker, stage] = step, weights
        last = self.stages == stage + 1
        return Passed((np.full(PASSED, 1.0 + stage),) * (not last), step)

    def backward(self, place: Place, values: tuple[Vector, ...]) -> Gradient:
        """Return the gradient at the weights that the forward pass used."""
        worker, stage, *_ = place
        assert [value.tolist() for value in values] == [[-2.0 - stage] * PASSED] * len(values)
        step, weights = self.under_way[worker, stage]
        told = (0, np.nan) if values else (self.batch(worker), 0.5 / (step + 1))
        before = (np.full(PASSED, -1.0 - stage),) * (stage > 0)
        return Gradient(0.01 * weights + (worker + 1), *told, step, before=before)

    def update(self, holder: int, gradient: Vector, rate: float = 1.0) -> Vector:
        self.held[holder] = self.held[holder] - 0.1 * rate * gradient
        return self.held[holder]

    def states(self, worker: int) -> Vector:
        return np.array([10.0 * worker + self.steps.get(worker, 0)])

    def adopt(self, worker: int, weights: Vector, states: Vector | None) -> Vector:
        self.held[worker] = weights
        if states is not None:
            self.kept.setdefault(worker, []).append(float(states[0]))
        return weights

    def forget(self, worker: int) -> None:
        self.forgot.append(worker)

    def step(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def snapshot(self, epoch: int, holder: int, weights: Vector, now: float) -> None:
        self.epochs.append((epoch, holder))

    def stops(self) -> bool:
        return False


def begun(
    strategy: Servers | Replicas,
    workers: int,
    network: Network | None = FAST,
    steps: int = 10,
    epochs: int = 1,
    compute: ComputeTime | None = None,
    slow: Mapping[int, Slowdown] | None = None,
    script: Any = None,
    lost: Mapping[int, float] | None = None,
    scenes: Numbers | None = None,
    **laws: Any,
) -> tuple[VirtualRuntime, Numbers, EventLog, Roles]:
    """Return a virtual runtime that has not run yet."""
    parts = strategy.parts([(SIZE,)] * 4)
    hosts = strategy.hosts(workers)
    depth: Any = strategy.replica_cut
    stages = placed([(SIZE,)] * 4, depth, "round_robin") if depth > 1 else []
    slower = relative_compute_times(slow or {}, workers)
    given = workers, parts, steps, epochs, np.zeros(4 * SIZE), hosts
    roles = Roles(*given, cut=stages, passes=staged(stages), slower=slower)
    if scenes is None:
        scenes = Numbers(stages=depth)
        for server in roles.servers:
            scenes.held[server] = roles.part(server).take(roles.weights)
        if not roles.servers:
            scenes.held = dict.fromkeys(range(len(hosts)), roles.weights)
    members = [roles.members(worker) for worker in range(workers)]
    diary = EventLog(scenes, steps, writers=[number for member in members for number in member])
    programs = {number: strategy.program(roles, number) for number in range(len(hosts))}
    laws = {"seed": 3} | laws
    times = TimingModel(compute or ComputeTime(0.1), slow or {}, **laws)
    gone = {tuple(members[worker]): moment for worker, moment in (lost or {}).items()}
    more: Any = {"script": script, "lost": gone, "servers": roles.servers}
    world = VirtualRuntime(programs, hosts, scenes, diary, times, network, **more)
    return world, scenes, diary, roles


def play(
    strategy: Servers | Replicas, workers: int, *given: Any, **named: Any
) -> tuple[VirtualRuntime, Numbers, EventLog]:
    """Return a virtual runtime after its run, with its numbers and events."""
    world, scenes, diary, _ = begun(strategy, workers, *given, **named)
    world.play()
    return world, scenes, diary
