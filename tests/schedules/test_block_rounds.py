"""Test the blocks that a round changes: independent of each other, and all changed in the end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Lasso

from labkit.datasets.synthetic import correlated_columns
from labkit.schedules.blocks import BlockRounds, Select, couplings

SELECTS: tuple[Select, ...] = ("priority", "round_robin", "random")


@settings(max_examples=300)
@given(st.data())
def test_no_two_blocks_of_a_round_depend_on_each_other(data: st.DataObject) -> None:
    """Test random graphs: rounds are as full as their order allows, and every block is chosen."""
    count = data.draw(st.integers(1, 12))
    seed = data.draw(st.integers(0, 2**16))
    density = data.draw(st.floats(0, 1))
    random = np.random.default_rng(seed)
    edges = np.triu(random.random((count, count)) < density, 1)
    depends = edges | edges.T
    parallel, select = data.draw(st.integers(1, 6)), data.draw(st.sampled_from(SELECTS))
    rounds = BlockRounds(count, parallel, select, depends, floor=0.1, seed=seed)
    seen: set[int] = set()
    for _ in range(count):
        chosen = rounds.next()
        assert 1 <= len(chosen) <= parallel
        assert len(set(chosen)) == len(chosen)
        assert not depends[np.ix_(chosen, chosen)].any()
        if len(chosen) < parallel:  # each remaining block depends on a chosen one
            left = np.setdiff1d(np.arange(count), chosen)
            assert depends[np.ix_(left, chosen)].any(axis=1).all()
        rounds.learn(chosen, random.random(len(chosen)))
        seen |= set(chosen.tolist())
    if select != "random":
        assert seen == set(range(count))


def test_round_robin_takes_all_in_turn() -> None:
    rounds = BlockRounds(5, 2, "round_robin")
    assert [rounds.next().tolist() for _ in range(5)] == [[0, 1], [2, 3], [0, 4], [1, 2], [3, 4]]


def test_priority_prefers_what_has_moved_and_forgets_nobody() -> None:
    rounds, counts = BlockRounds(10, 1, "priority", floor=0.02), np.zeros(10)
    for number in range(2000):
        (block,) = rounds.next()
        counts[block] += number >= 10
        rounds.learn([block], [1.0 if block == 3 else 0.0])
    # With a share s of all rounds, another block waits 4.5 / s rounds on average, so block 3 gets a
    # share of 0.42.
    assert 0.35 < counts[3] / counts.sum() < 0.5
    assert counts.min() > 60


@pytest.mark.parametrize("select", SELECTS)
def test_all_that_have_the_same_seed_choose_the_same(select: Select) -> None:
    one, other = (BlockRounds(9, 3, select, seed=4) for _ in range(2))
    for _ in range(20):
        chosen = one.next()
        assert chosen.tolist() == other.next().tolist()
        for each in (one, other):
            each.learn(chosen, chosen / 10)


def test_couplings_of_a_linear_model_are_the_correlations_of_its_columns() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((50, 6))
    x[:, 5] = 0.0
    hessian = 2 / 50 * x.T @ x
    found = couplings(hessian * np.array([1, -1, 1, 1, -1, 1])[:, None], range(7))
    wanted = np.zeros((6, 6))
    size = np.sqrt(np.diag(hessian))[:5]
    wanted[:5, :5] = np.abs(hessian[:5, :5]) / np.outer(size, size)
    np.fill_diagonal(wanted, 0)
    np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_couplings_of_blocks_are_those_of_the_norms() -> None:
    hessian = np.diag([1.0, 4.0, 9.0, 16.0])
    hessian[0, 3] = hessian[3, 0] = 2.0
    products = np.stack([hessian[:, :2].sum(1), hessian[:, 2:].sum(1)])
    found = couplings(products, [0, 2, 4])
    one, other = np.hypot(1, 4), np.hypot(9, 16)
    wanted = 2 / np.sqrt(one * other)
    np.testing.assert_allclose(found, [[0, wanted], [wanted, 0]])


def test_on_correlated_columns_priority_needs_half_of_the_rounds_of_chance() -> None:
    """Test scheduled coordinate descent on a lasso, to a millionth of its optimum, on 3 seeds."""
    x, y = correlated_columns(300, 500, group=10, correlation=0.5, active=10)
    columns, target, alpha = x.astype(float), y[:, 0].astype(float), 0.1
    rows = len(columns)
    solver = Lasso(alpha=alpha, fit_intercept=False, tol=1e-14, max_iter=100_000)
    best = solver.fit(columns, target).coef_
    depends = np.abs(columns.T @ columns) / rows >= 0.4
    np.fill_diagonal(depends, False)

    def objective(rest: np.ndarray, weights: np.ndarray) -> float:
        return float(rest @ rest / (2 * rows) + alpha * np.abs(weights).sum())

    lowest = objective(target - columns @ best, best)

    def needed(select: Select, seed: int) -> int:
        rounds = BlockRounds(500, 8, select, depends, seed=seed)
        weights, rest, count = np.zeros(500), target.copy(), 0
        while objective(rest, weights) > lowest * (1 + 1e-6):
            chosen = rounds.next()
            wanted = weights[chosen] + columns[:, chosen].T @ rest / rows
            shrunk = np.sign(wanted) * np.maximum(np.abs(wanted) - alpha, 0)
            change = shrunk - weights[chosen]
            rest, weights[chosen] = rest - columns[:, chosen] @ change, shrunk
            rounds.learn(chosen, change.tolist())
            count += 1
        return count

    chance, priority = ([needed(s, seed) for seed in range(3)] for s in ("random", "priority"))
    assert max(priority) <= min(chance) / 2
