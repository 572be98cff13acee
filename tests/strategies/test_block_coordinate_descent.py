"""Test scheduled blocks: optima of a lasso and of a factorization, layers, and bytes sent."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from sample_programs import FAST, Numbers
from sklearn.linear_model import Lasso

import labkit as lk
from labkit.common.errors import InvalidInput
from labkit.datasets.synthetic import factorization_optimum, ratings
from labkit.network import ComputeTime
from labkit.programs import EventLog, Gradient, Roles
from labkit.programs.actions import TimingModel
from labkit.programs.virtual_runtime import VirtualRuntime
from labkit.strategies.block_coordinate_descent import BlockCoordinateDescent

ROWS, COLUMNS, ALPHA = 90, 30, 0.1


def correlated(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return unit-variance columns in groups of five, and a target made from three of them."""
    random = np.random.default_rng(seed)
    shared = np.repeat(random.standard_normal((ROWS, COLUMNS // 5)), 5, axis=1)
    x = np.sqrt(0.5) * shared + np.sqrt(0.5) * random.standard_normal((ROWS, COLUMNS))
    x = (x - x.mean(0)) / x.std(0)
    y = x[:, [2, 11, 27]] @ [3.0, -2.0, 1.0] + 0.3 * random.standard_normal(ROWS)
    return x, (y - y.mean())[:, None]


def linear() -> Any:
    import keras

    zeros = {"use_bias": False, "kernel_initializer": "zeros"}
    return keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Dense(1, **zeros)])


def lasso(strategy: BlockCoordinateDescent, rounds: int, **fields: Any) -> lk.Experiment:
    asked: dict[str, Any] = {"virtual": {"compute_time": 0.01}} | fields
    return lk.Experiment(
        model=linear,
        dataset=correlated(),
        loss="mse",
        metrics=["mae"],
        optimizer="sgd",
        learning_rate=0.5,
        batch_size=ROWS,
        epochs=rounds,
        workers=3,
        precision="float64",
        strategy=strategy,
        **asked,
    )


class Squares(Numbers):
    """The mean squared error of a worker's rows, with steps at a rate of 0.5."""

    x, y = correlated()
    parts = np.array_split(np.arange(ROWS), [20, 55])  # all workers have different numbers of rows

    def gradient(self, worker: int, weights: np.ndarray) -> Gradient:
        x, y = self.x[self.parts[worker]], self.y[self.parts[worker], 0]
        step = self.steps.get(worker, 0)
        self.steps[worker] = step + 1
        rest = x @ weights - y
        return Gradient(2 / len(x) * x.T @ rest, len(x), float(np.mean(rest**2)), step)

    def curved(self, worker: int, weights: np.ndarray, ends: Any) -> Gradient:
        x = self.x[self.parts[worker]]
        blocks = np.eye(COLUMNS).reshape(COLUMNS, COLUMNS)
        along = np.add.reduceat(blocks, list(ends[:-1]), axis=0)
        return Gradient((2 / len(x) * along @ x.T @ x).reshape(-1), len(x), 0.0, 0)

    def update(self, holder: int, gradient: np.ndarray, rate: float = 1.0) -> np.ndarray:
        self.held[holder] = self.held[holder] - 0.5 * rate * gradient
        return self.held[holder]


USERS, ITEMS, FACTORS, L2 = 20, 15, 2, 0.002


class Rated(Numbers):
    """The squared errors of a factorized matrix, of which each worker knows some entries."""

    x, y = ratings(USERS, ITEMS, FACTORS)
    parts = np.array_split(np.random.default_rng(0).permutation(len(x)), [30, 80])
    rate = 8.0

    def __init__(self) -> None:
        super().__init__()
        # Matrices of each worker: which entries it knows, and their values.
        self.known, self.values = np.zeros((2, 3, USERS, ITEMS))
        for worker, part in enumerate(self.parts):
            user, item = self.x[part].astype(int).T
            self.known[worker, user, item] = 1 / len(part)
            self.values[worker, user, item] = self.y[part, 0]

    def gradient(self, worker: int, weights: np.ndarray) -> Gradient:
        step = self.steps.get(worker, 0)
        self.steps[worker] = step + 1
        u, v = self.thin(weights)
        rest = u @ v.T - self.values[worker]
        loss = float((self.known[worker] * rest**2).sum() + L2 * weights @ weights)
        slope = self.both(self.known[worker] * rest, u, v) + 2 * L2 * weights
        return Gradient(slope, len(self.parts[worker]), loss, step)

    def curved(self, worker: int, weights: np.ndarray, ends: Any) -> Gradient:
        u, v = self.thin(weights)
        known, rest = self.known[worker], u @ v.T - self.values[worker]
        found = []
        for start, stop in pairwise(ends):
            along = np.zeros_like(weights)
            along[start:stop] = 1
            du, dv = self.thin(along)
            bent = self.both(known * (du @ v.T + u @ dv.T), u, v)
            found.append(bent + self.both(known * rest, du, dv) + 2 * L2 * along)
        return Gradient(np.concatenate(found), len(self.parts[worker]), 0.0, 0)

    def update(self, holder: int, gradient: np.ndarray, rate: float = 1.0) -> np.ndarray:
        self.held[holder] = self.held[holder] - self.rate * rate * gradient
        return self.held[holder]

    @staticmethod
    def thin(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        u, v = weights[: USERS * FACTORS], weights[USERS * FACTORS :]
        return u.reshape(USERS, FACTORS), v.reshape(ITEMS, FACTORS)

    @staticmethod
    def both(rest: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
        return 2 * np.concatenate([(rest @ v).reshape(-1), (rest.T @ u).reshape(-1)])


def rounds(
    strategy: BlockCoordinateDescent, count: int, scenes: Numbers | None = None
) -> tuple[Numbers, VirtualRuntime]:
    """Run a number of rounds with three workers."""
    weights = np.zeros(COLUMNS)
    if isinstance(scenes, Rated):
        weights = np.random.default_rng(1).uniform(-0.5, 0.5, (USERS + ITEMS) * FACTORS)
    scenes = scenes or Squares()
    roles = Roles(3, [], count, 1, weights, [0, 1, 2], 0, layers=[10, 20], rate=0.5)
    scenes.held = dict.fromkeys(range(3), weights)
    diary = EventLog(scenes, count, writers=range(3))
    programs = {number: strategy.program(roles, number) for number in range(3)}
    laws = TimingModel(ComputeTime(0.1), {}, 3)
    world = VirtualRuntime(programs, [0, 1, 2], scenes, diary, laws, FAST)
    world.play()
    return scenes, world


SELECTS = ("priority", "round_robin", "random")


def solution() -> np.ndarray:
    x, y = correlated()
    solver = Lasso(alpha=ALPHA, fit_intercept=False, tol=1e-14, max_iter=100_000)
    found: np.ndarray = solver.fit(x, y[:, 0]).coef_
    return found


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize("select", SELECTS)
def test_the_lasso_reaches_the_optimum_of_coordinate_descent(select: Any) -> None:
    strategy = BlockCoordinateDescent(
        select, block=1, blocks_per_round=4, dependency=0.4, l1=2 * ALPHA
    )
    scenes, _ = rounds(strategy, 400)
    np.testing.assert_allclose(scenes.held[0], solution(), rtol=0, atol=1e-6)
    assert 3 <= np.count_nonzero(scenes.held[0]) < COLUMNS
    for other in (1, 2):
        assert scenes.held[other].tobytes() == scenes.held[0].tobytes()


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize("select", SELECTS)
def test_a_factorization_ends_where_alternating_least_squares_does(select: Any) -> None:
    """Test blocks of one user or item each; the dependency check finds who rated what."""
    strategy = BlockCoordinateDescent(select, block=FACTORS, blocks_per_round=8, dependency=1e-9)
    scenes, _ = rounds(strategy, 700, Rated())
    losses = [scenes.gradient(worker, scenes.held[0]) for worker in range(3)]
    loss = np.average([each.loss for each in losses], weights=[each.rows for each in losses])
    wanted = factorization_optimum(Rated.x, Rated.y, FACTORS, L2)
    assert loss == pytest.approx(wanted, rel=1e-6)


def test_blocks_that_depend_on_each_other_and_change_together_go_too_far() -> None:
    """Test that a joint round of nearly equal columns overshoots."""

    def away(dependency: float | None) -> float:
        strategy = BlockCoordinateDescent(
            "random", block=1, blocks_per_round=20, dependency=dependency
        )
        return float(np.abs(rounds(strategy, 60)[0].held[0]).max())

    assert away(0.3) < 10
    assert away(None) > 1e3


def test_what_is_said_are_the_blocks_alone() -> None:
    """Test the bytes of two ring rounds, with 8 bytes per weight."""
    strategy = BlockCoordinateDescent("round_robin", block=5, blocks_per_round=2, dependency=None)
    scenes, _ = rounds(strategy, 3)
    # In a ring of three, each worker sends two thirds of the buffer twice.
    assert {row["payload_bytes"] for row in scenes.rows} == {10 * 8}
    sent = sum(row["wire_bytes"] for row in scenes.rows)
    assert sent == pytest.approx(3 * 3 * 4 / 3 * 10 * 8, rel=0.01)  # rounded to whole weights


def test_more_couplings_than_fit_into_memory_are_refused() -> None:
    strategy = BlockCoordinateDescent(block=1, blocks_per_round=2)
    roles = Roles(1, [], 1, 1, np.zeros(20_000), [0], 0, layers=[20_000], rate=0.5)
    with pytest.raises(InvalidInput, match=r"20,000 blocks .* give larger blocks, or dep"):
        next(strategy.program(roles, 0))


def test_a_block_may_be_a_layer() -> None:
    scenes, _ = rounds(BlockCoordinateDescent("round_robin", dependency=None), 1)
    assert np.count_nonzero(scenes.held[0][:10]) == 10
    assert not scenes.held[0][10:].any()


@pytest.mark.slow
def test_on_ranks_it_does_what_it_does_on_the_virtual_clock(cluster: lk.Cluster) -> None:
    strategy = BlockCoordinateDescent(block=1, blocks_per_round=4, dependency=0.4, l1=2 * ALPHA)
    virtual, wall = (
        cluster.run(lasso(strategy, 12, **clock), show=False)
        for clock in ({}, {"clock": "wall", "virtual": None})
    )
    found = [run.model().get_weights()[0] for run in (virtual, wall)]
    np.testing.assert_allclose(*found, rtol=0, atol=1e-12)
    # The history has the whole objective at the weights before each step.
    _, y = correlated()
    first = wall.history[wall.history.step == 0]
    assert np.average(first.loss, weights=first.samples) == pytest.approx(np.mean(y**2))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optimizer": "adam"}, "optimizer='adam' .* use optimizer='sgd' without options"),
        ({"optimizer_options": {"momentum": 0.9}}, "use optimizer='sgd' without options"),
        ({"input_mode": "scatter"}, "use input_mode='shard'"),
    ],
)
def test_what_would_move_other_blocks_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        lk.Experiment(
            **{"dataset": "digits", "workers": 2, "optimizer": "sgd"} | fields,
            strategy=BlockCoordinateDescent(),
        )
