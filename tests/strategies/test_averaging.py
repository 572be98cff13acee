"""Test parameter averaging against NumPy loops that share no code with it, on both clocks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import sample_programs
from sample_programs import FAST, SIZE, Numbers, play

from labkit import (
    QSGD,
    AsynchronousDiLoCo,
    Cluster,
    Codistillation,
    ElasticAveraging,
    ErrorFeedback,
    Experiment,
    Gossip,
    ParameterAveraging,
    PowerSGD,
)
from labkit.common.errors import InvalidInput
from labkit.compression.numbers import uniform
from labkit.network import Slowdown
from labkit.programs import Gradient

WORKERS = 3
ROWS = (1, 2, 5)  # batch rows of each worker
SHARES = np.array(ROWS) / sum(ROWS)


@pytest.fixture(autouse=True)
def unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Numbers, "batch", lambda _, worker: ROWS[worker])


def local(weights: np.ndarray, worker: int) -> np.ndarray:
    """Take a step as `Numbers` does: the gradient is a hundredth of the weights plus worker + 1."""
    return weights - 0.1 * (0.01 * weights + (worker + 1))


def reference(steps: int, period: int, outer: str | None, warmup: int = 0) -> list[np.ndarray]:
    """Return the weights of all workers after these steps, by the formulas of the papers."""
    own = [np.zeros(4 * SIZE) for _ in ROWS]
    shared, velocity = own[0], 0.0
    for step in range(1, steps + 1):
        own = [local(weights, worker) for worker, weights in enumerate(own)]
        if step <= warmup:  # the mean of steps from equal weights is the step by the mean gradient
            shared = sum(share * weights for share, weights in zip(SHARES, own, strict=True))
            own = [shared] * len(ROWS)
        elif (step - warmup) % period == 0 or step == steps:
            moved = sum(s * (shared - weights) for s, weights in zip(SHARES, own, strict=True))
            if outer is None:
                shared = shared - moved
            elif outer == "sgd":
                shared = shared - 0.7 * moved
            else:
                velocity = 0.9 * velocity + moved
                shared = shared - 0.7 * (moved + 0.9 * velocity)
            own = [shared] * len(ROWS)
    return own


@pytest.mark.parametrize(("period", "warmup"), [(3, 0), (4, 5), (1, 0)])
@pytest.mark.parametrize("outer", [None, "sgd", "nesterov"])
def test_replicas_meet_as_the_papers_say(period: int, warmup: int, outer: Any) -> None:
    strategy = ParameterAveraging(period, outer_optimizer=outer, warmup_steps=warmup)
    _, scenes, _ = play(strategy, WORKERS, steps=20)
    for worker, expected in enumerate(reference(20, period, outer, warmup)):
        np.testing.assert_allclose(scenes.held[worker], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("outer", "warmup"), [(None, 0), ("nesterov", 3)])
def test_who_is_slower_takes_fewer_steps_and_nobody_waits(outer: Any, warmup: int) -> None:
    """Test periods of 4 steps: a worker 2 times as slow takes two, one 2.5 times as slow one."""
    slow = {1: Slowdown(compute=2.0), 2: Slowdown(compute=2.5)}
    strategy = ParameterAveraging(
        4, outer_optimizer=outer, warmup_steps=warmup, local_steps="by_speed"
    )
    world, scenes, _ = play(strategy, WORKERS, None, steps=20 + warmup, slow=slow)
    taken = [(1, 2, 3, 4), (2, 4), (3,)]
    shared, velocity = reference(warmup, 1, None, warmup)[0], np.zeros(4 * SIZE)
    for _ in range(20 // 4):
        after = []
        for worker, steps in enumerate(taken):
            own = shared
            for _ in steps:
                own = local(own, worker)
            after.append(own)
        rows = np.array([len(steps) * own for steps, own in zip(taken, ROWS, strict=True)])
        moved = sum(s * (shared - w) for s, w in zip(rows / sum(rows), after, strict=True))
        if outer is None:
            shared = shared - moved
        else:
            velocity = 0.9 * velocity + moved
            shared = shared - 0.7 * (moved + 0.9 * velocity)
    for worker in range(WORKERS):
        np.testing.assert_allclose(scenes.held[worker], shared, rtol=0, atol=1e-12)
    assert scenes.steps == {0: 20 + warmup, 1: 10 + warmup, 2: 5 + warmup}
    assert world.now == pytest.approx(20 * 0.1 + warmup * 0.25)  # the fastest worker sets the pace


def test_a_worker_without_rows_meets_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Numbers, "batch", lambda _, worker: 2 * worker)
    _, scenes, _ = play(ParameterAveraging(1), WORKERS, steps=5)
    weights = np.zeros(4 * SIZE)
    for _ in range(5):
        weights = (2 * local(weights, 1) + 4 * local(weights, 2)) / 6
    for worker in range(WORKERS):
        np.testing.assert_allclose(scenes.held[worker], weights, rtol=0, atol=1e-12)


class Heavy(Numbers):
    """Numbers with momentum, which workers keep: v ← 0.9 v - 0.1 g, w ← w + v."""

    moves: ClassVar[dict[int, np.ndarray]] = {}

    def update(self, holder: int, gradient: np.ndarray, rate: float = 1.0) -> np.ndarray:
        self.moves[holder] = 0.9 * self.moves.get(holder, 0.0) - 0.1 * gradient
        self.held[holder] = self.held[holder] + self.moves[holder]
        return self.held[holder]

    def states(self, worker: int) -> np.ndarray:
        return self.moves.get(worker, np.zeros(4 * SIZE))

    def adopt(self, worker: int, weights: np.ndarray, states: np.ndarray | None) -> np.ndarray:
        self.held[worker] = weights
        if states is not None:
            self.moves[worker] = states
        return weights

    def forget(self, worker: int) -> None:
        self.moves[worker] = np.zeros(4 * SIZE)


@pytest.mark.parametrize(
    ("state", "turns", "same"),
    [
        ("keep", False, True),  # a mean with constant shares is linear, and so is momentum
        ("keep", True, False),
        ("average", True, True),
        ("reset", False, False),
    ],
)
def test_with_momentum_meeting_each_step_is_synchronous_or_not(
    state: Any, turns: bool, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test shares of rows that change from step to step if `turns` is set."""

    def batch(self: Numbers, worker: int) -> int:
        return ROWS[(worker + turns * self.steps[worker]) % WORKERS]

    monkeypatch.setattr(sample_programs, "Numbers", Heavy)
    monkeypatch.setattr(Heavy, "moves", {})
    monkeypatch.setattr(Heavy, "batch", batch)
    _, scenes, _ = play(ParameterAveraging(1, optimizer_state=state), WORKERS, steps=20)
    weights = velocity = np.zeros(4 * SIZE)
    for step in range(1, 21):
        shares = np.roll(SHARES, -turns * step)
        velocity = 0.9 * velocity - 0.1 * (0.01 * weights + shares @ (1 + np.arange(WORKERS)))
        weights = weights + velocity
    apart = max(abs(scenes.held[worker] - weights).max() for worker in range(WORKERS))
    assert (apart < 1e-12) == same
    assert same or apart > 1e-2


def streamed(
    steps: int, period: int, fragments: int, delay: int, outer: str | None
) -> list[np.ndarray]:
    """Return the weights when fragments are averaged in turn, late, keeping later local steps."""
    own = [np.zeros(4 * SIZE) for _ in ROWS]
    shared, velocity = np.zeros(4 * SIZE), np.zeros(4 * SIZE)

    def land(now: int) -> None:
        while flying and flying[0][0] <= now:
            _, where, sent = flying.pop(0)
            moved = sum(s * (shared[where] - w) for s, w in zip(SHARES, sent, strict=True))
            if outer == "nesterov":
                velocity[where] = 0.9 * velocity[where] + moved
                moved = 0.7 * (moved + 0.9 * velocity[where])
            shared[where] -= moved
            for weights, each in zip(own, sent, strict=True):
                weights[where] = shared[where] + (weights[where] - each)

    edges = np.linspace(0, 4 * SIZE, fragments + 1).astype(int)
    stretches = [slice(*each) for each in itertools.pairwise(edges)]
    flying: list[tuple[int, slice, list[np.ndarray]]] = []
    for step in range(1, steps + 1):
        own = [local(weights, worker) for worker, weights in enumerate(own)]
        land(steps + delay if step == steps else step)
        for number, where in enumerate(stretches):
            if step % period == (number + 1) * period // fragments % period or step == steps:
                flying.append((step + delay, where, [weights[where].copy() for weights in own]))
                if step == steps or not delay:
                    land(step + delay)
    return own


@pytest.mark.parametrize("outer", [None, "nesterov"])
@pytest.mark.parametrize(("fragments", "delay"), [(2, 0), (4, 0), (1, 3), (4, 1)])
def test_fragments_meet_in_turn_and_late(fragments: int, delay: int, outer: Any) -> None:
    strategy = ParameterAveraging(
        8, fragments=fragments, overlap_steps=delay, outer_optimizer=outer
    )
    _, scenes, _ = play(strategy, WORKERS, steps=21)
    for worker, expected in enumerate(streamed(21, 8, fragments, delay, outer)):
        np.testing.assert_allclose(scenes.held[worker], expected, rtol=0, atol=1e-11)


PULLS = np.random.default_rng(0).normal(size=(WORKERS, 4 * SIZE))  # the pull of each worker's data


def pulled(self: Numbers, worker: int, weights: np.ndarray) -> Gradient:
    """Return a gradient that differs in each element."""
    step = self.steps[worker] = self.steps.get(worker, -1) + 1
    return Gradient(0.01 * weights + PULLS[worker], ROWS[worker], 0.5, step)


def four_bits(values: np.ndarray, chance: np.ndarray) -> np.ndarray:
    """Return values in 15 levels, with a norm per 32 values; `chance` decides who is rounded up."""
    norms = np.repeat(np.linalg.norm(values.reshape(-1, 32), axis=1), 32)
    levels = np.floor(np.abs(values) / norms * 7 + chance)
    return np.sign(values) * levels * norms / 7


@pytest.mark.parametrize("outer", [None, "nesterov"])
def test_outer_gradients_in_four_bits_are_made_up_for_at_the_next_meeting(
    outer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test against NumPy with the compressor's random draws, but without its other code."""
    import tensorflow as tf

    @tf.function(jit_compile=True)
    def drawn(key: Any) -> Any:
        return uniform(4 * SIZE, key)

    monkeypatch.setattr(Numbers, "gradient", pulled)
    compressor = ErrorFeedback(QSGD(levels=7, bucket=32))
    strategy = ParameterAveraging(3, outer_optimizer=outer, compressor=compressor)
    _, scenes, _ = play(strategy, WORKERS, steps=20)
    shared, velocity = np.zeros(4 * SIZE), np.zeros(4 * SIZE)
    left = np.zeros((WORKERS, 4 * SIZE))
    for meeting, steps in enumerate([3] * 6 + [2]):
        heard = []
        for worker, pull in enumerate(PULLS):
            own = shared
            for _ in range(steps):
                own = own - 0.1 * (0.01 * own + pull)
            wanted = WORKERS * SHARES[worker] * (shared - own) + left[worker]
            draws = drawn(tf.constant([worker + 1, meeting]))
            heard.append(four_bits(wanted, draws.numpy()))
            left[worker] = wanted - heard[-1]
        moved = np.mean(heard, 0)
        if outer:
            velocity = 0.9 * velocity + moved
            moved = 0.7 * (moved + 0.9 * velocity)
        shared = shared - moved
    for worker in range(WORKERS):
        np.testing.assert_allclose(scenes.held[worker], shared, rtol=0, atol=1e-12)
    assert abs(left).max() > 1e-3


def test_whoever_meets_rarely_sends_little_and_a_stream_sends_evenly() -> None:
    each, seldom, stream = (
        [row["wire_bytes"] for row in play(strategy, WORKERS, steps=24)[1].rows if row["rank"] == 0]
        for strategy in (
            ParameterAveraging(1),
            ParameterAveraging(8),
            ParameterAveraging(8, fragments=4),
        )
    )
    assert sum(seldom) == pytest.approx(sum(each) / 8, rel=1e-3)
    assert sum(stream[:-1]) == pytest.approx(sum(seldom[:-1]) * 11 / 8, rel=1e-3)
    assert max(stream[:-1]) == pytest.approx(max(seldom) / 4, rel=1e-3)


def test_a_stream_hides_behind_the_steps_that_go_on() -> None:
    """Test that three steps of 0.1 s hide 16 ms of communication, except at the last averaging."""
    waits, late = (
        play(strategy, WORKERS, network=FAST, steps=25)
        for strategy in (ParameterAveraging(8), ParameterAveraging(8, overlap_steps=3))
    )

    def on_the_way(scenes: Numbers) -> float:
        return sum(row["communicate_seconds"] for row in scenes.rows if row["step"] < 24)

    assert on_the_way(waits[1]) > 0.1
    assert on_the_way(late[1]) == pytest.approx(0.0, abs=1e-9)


def test_what_workers_keep_goes_on_is_averaged_or_begins_anew() -> None:
    keep, average, reset = (
        play(ParameterAveraging(4, optimizer_state=state), WORKERS, steps=8)[1]
        for state in ("keep", "average", "reset")
    )
    assert keep.kept == reset.kept == {}
    # A state of `Numbers` is ten times the worker's number plus its steps; the workers' mean of the
    # first part, weighted by rows, is 15.
    assert average.kept == {worker: [15.0 + 4, 15.0 + 8] for worker in range(WORKERS)}
    assert keep.forgot == average.forgot == []
    assert sorted(reset.forgot) == [0, 0, 1, 1, 2, 2]


def test_the_period_falls_with_the_loss() -> None:
    """Test a loss of 0.5 / step, for which √(F_j/F_0) and the steps of averaging are known."""
    strategy = ParameterAveraging(8, adaptive=True)
    rows = [row for row in play(strategy, WORKERS, steps=40)[1].rows if row["rank"] == 0]
    met = [int(row["step"]) + 1 for row in rows if row["messages"]]
    losses = [0.5 / (step + 1) for step in range(40)]
    at, period, expected, first = 0, 8, [], 0.0
    while at + period < 40:
        mean = np.mean(losses[at : at + period])
        first, at = first or mean, at + period
        expected.append(at)
        period = int(np.ceil(8 * np.sqrt(mean / first)))
    assert met == [*expected, 40]
    assert met[0] == 8
    assert len(met) > 40 // 8 + 1


@pytest.mark.parametrize(
    ("losses", "met"),
    [
        ([1.0, 4.0, 9.0, 1.0], [8, 16, 24, 32]),  # the loss grows, so the period stays
        ([1.0, np.nan, 0.25, 1.0], [8, 16, 24, 28, 32]),  # the loss is unknown, so the period stays
        ([0.0, 0.0, 2.0, 0.5], [8, 16, 24, 32]),  # the first loss is 0, so the period cannot fall
    ],
)
def test_the_period_stays_where_the_loss_says_nothing(
    losses: list[float], met: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a separate loss for every eight steps."""
    plain = Numbers.gradient

    def gradient(self: Numbers, worker: int, weights: np.ndarray) -> Gradient:
        found = plain(self, worker, weights)
        return replace(found, loss=losses[found.step // 8])

    monkeypatch.setattr(Numbers, "gradient", gradient)
    scenes = play(ParameterAveraging(8, adaptive=True), WORKERS, steps=32)[1]
    rows = [row for row in scenes.rows if row["rank"] == 0]
    assert [int(row["step"]) + 1 for row in rows if row["messages"]] == met


def test_a_falling_period_starves_nobody() -> None:
    """Test that a worker four times slower steps in each period, even in the shortest of 4."""
    slow = {2: Slowdown(compute=4.0)}
    strategy = ParameterAveraging(16, adaptive=True, local_steps="by_speed")
    _, scenes, _ = play(strategy, WORKERS, steps=200, slow=slow)
    assert scenes.steps[0] == 200
    assert scenes.steps[2] >= 200 // 5


def trained(communicator: Any, experiments: list[Experiment]) -> list[tuple[list[Any], list[int]]]:
    """Return each experiment's weights, and the counted bytes that this rank sends in each step."""
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    found = []
    for experiment in experiments:
        session = TrainingSession(experiment, communicator, read(experiment, communicator))
        session.feed.validation = None
        experiment.strategy.train(session)
        weights = [weight.numpy() for weight in session.model.weights]
        found.append((weights, [int(row["wire_bytes"]) for row in session.stage.rows]))
        session.close()
    return found


@pytest.mark.slow
def test_both_clocks_train_the_same_weights(cluster: Cluster) -> None:
    """Test unequal batches, and layers with moving statistics."""
    strategies = [
        ParameterAveraging(
            3,
            outer_optimizer="nesterov",
            warmup_steps=2,
            compressor=ErrorFeedback(QSGD(7, bucket=32)),
        ),
        ParameterAveraging(3, optimizer_state="average", local_steps="by_speed"),
        ParameterAveraging(
            4, fragments=2, overlap_steps=1, compressor=ErrorFeedback(QSGD(levels=127))
        ),
        ParameterAveraging("epoch", optimizer_state="reset", compressor=PowerSGD()),
        Gossip("exponential"),
        ElasticAveraging(0.2, period=3, center="allreduce"),
    ]
    wall = [
        Experiment(
            dataset="digits",
            dataset_options={"rows": 100, "test_rows": 10},
            model=normalized,
            batch_size=30,
            epochs=2,
            workers=3,
            strategy=each,
            optimizer="adam",
            precision="float64",
            batch_weights=(1, 2, 1),
            stragglers={0: 2.0},
        )
        for each in strategies
    ]
    ranks = cluster.call(trained, wall, ranks=3)
    virtual = [each.replace(virtual={"compute_time": 0.01}, network="1GbE") for each in wall]
    (theirs,) = cluster.call(trained, virtual, ranks=1)
    for strategy, *ours, (other, _) in zip(strategies, *ranks, theirs, strict=True):
        for one, _ in ours:
            apart = [float(abs(a - b).max()) for a, b in zip(one, other, strict=True)]
            assert max(apart) < 1e-12, (strategy, apart)


def kept(communicator: Any, experiments: list[Experiment]) -> list[tuple[Any, Any, Any]]:
    """Return moving statistics of the model and of all its workers, and optimizer slots."""
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    found = []
    for experiment in experiments:
        session = TrainingSession(experiment, communicator, read(experiment, communicator))
        session.feed.validation = None
        experiment.strategy.train(session)
        stage, layers = session.stage, session.model.non_trainable_variables
        workers = [stage.replica.states(worker) for worker in range(experiment.workers)]
        slots = [np.concatenate([np.ravel(v) for v in stage._shards[w].slots]) for w in range(3)]
        found.append(([layer.numpy() for layer in layers], workers, slots))
        session.close()
    return found


@pytest.mark.slow
def test_what_is_evaluated_has_the_mean_of_moving_statistics(cluster: Cluster) -> None:
    """Test that moving statistics are averaged in any mode; a reset clears only optimizer slots."""
    ways: list[Any] = [
        ParameterAveraging(3, optimizer_state=s) for s in ("keep", "average", "reset")
    ]
    base = Experiment(
        dataset="digits",
        dataset_options={"rows": 120, "test_rows": 10},
        model=normalized,
        batch_size=30,
        epochs=2,
        workers=3,
        optimizer="adam",
        precision="float64",
        clock="virtual",
        virtual={"compute_time": 0.01},
        data_partition="by_label",
    )
    asked = [base.replace(strategy=way) for way in [*ways, Gossip("ring")]]
    (told,) = cluster.call(kept, asked, ranks=1)
    for ours, workers, _ in told:
        for one, *theirs in zip(ours, *workers, strict=True):
            np.testing.assert_allclose(one, np.mean(theirs, 0), rtol=0, atol=1e-12)
        assert abs(ours[0]).max() > 0.01  # moving means start at 0
    (_, workers, slots), (_, _, nothing) = told[1], told[2]
    np.testing.assert_allclose(slots[0], slots[2], rtol=0, atol=1e-12)
    np.testing.assert_allclose(workers[0][0], workers[2][0], rtol=0, atol=1e-12)
    assert not any(each.any() for each in nothing)


def normalized() -> Any:
    import keras
    from keras.layers import BatchNormalization, Dense

    # A bias before a normalization has a gradient of rounding errors only, which Adam would
    # enlarge.
    layers = [Dense(8, use_bias=False), BatchNormalization(), Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *layers])


def test_ranks_that_meet_rarely_send_little_and_a_stream_sends_evenly(cluster: Cluster) -> None:
    """Test the bytes that the ranks count."""
    wall = [
        Experiment(
            dataset="digits",
            dataset_options={"rows": 120, "test_rows": 10},
            model_options={"widths": [8]},
            batch_size=10,
            workers=2,
            strategy=strategy,
        )
        for strategy in (
            ParameterAveraging(1),
            ParameterAveraging(4),
            ParameterAveraging(4, fragments=2),
        )
    ]
    for told in cluster.call(trained, wall, ranks=2):
        each, seldom, stream = (sent for _, sent in told)
        assert sum(seldom) * 4 == sum(each)
        assert max(stream[:-1]) * 2 == max(seldom)  # the last averaging includes all fragments


@pytest.mark.slow
def test_ranks_of_which_nobody_waits_take_all_steps(cluster: Cluster) -> None:
    """Test that all steps are taken by any of the workers, and that the final weights are equal."""
    wall = [
        Experiment(
            dataset="digits",
            dataset_options={"rows": 120, "test_rows": 10},
            model_options={"widths": [8]},
            batch_size=12,
            epochs=2,
            workers=workers,
            strategy=strategy,
        )
        for workers, strategy in (
            (3, Gossip("random_pairs", asynchronous=True)),
            (2, ElasticAveraging(0.2, period=3, momentum=0.9)),
            (2, AsynchronousDiLoCo(4, momentum_delay=2)),
        )
    ]
    ranks = cluster.call(trained, wall, ranks=3)
    for number, each in enumerate(wall):
        assert sum(len(told[number][1]) for told in ranks) == each.workers * 20
        for other in ranks[1:]:
            pairs = zip(ranks[0][number][0], other[number][0], strict=True)
            assert all((one == same).all() and np.isfinite(one).all() for one, same in pairs)


def learned(communicator: Any, experiments: list[Experiment]) -> list[tuple[float, float]]:
    """Return the mean loss of all workers in the first and last step of each experiment."""
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    found = []
    for experiment in experiments:
        session = TrainingSession(experiment, communicator, read(experiment, communicator))
        session.feed.validation = None
        experiment.strategy.train(session)
        rows = session.stage.rows
        ends = (min(row["step"] for row in rows), max(row["step"] for row in rows))
        first, last = (np.mean([row["loss"] for row in rows if row["step"] == at]) for at in ends)
        found.append((float(first), float(last)))
        session.close()
    return found


@pytest.mark.slow
def test_replicas_learn_where_each_has_other_labels(cluster: Cluster) -> None:
    base = Experiment(
        dataset="digits",
        dataset_options={"rows": 240, "test_rows": 10},
        model_options={"widths": [16]},
        batch_size=48,
        epochs=6,
        learning_rate=0.2,
        workers=4,
        data_partition="by_label",
        clock="virtual",
        virtual={"compute_time": 0.01},
    )
    # Losses of codistillation include the predictions of other workers, which know other labels
    # only.
    taught = Codistillation(4, distillation_weight=0.1)
    ways = [ParameterAveraging(4), ElasticAveraging(0.1), Gossip("ring"), taught]
    (told,) = cluster.call(learned, [base.replace(strategy=way) for way in ways], ranks=1)
    for way, (first, last) in zip(ways, told, strict=True):
        assert last < 0.6 * first, (way, first, last)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"period": 4, "overlap_steps": 4},
            "averages a fragment every 4 steps, but with overlap_steps=4 an averaging",
        ),
        ({"period": 4, "fragments": 8}, "averages a fragment every 0 steps"),
        (
            {"optimizer_state": "average", "overlap_steps": 1},
            "applies to whole models.*use optimizer_state='keep'",
        ),
        ({"period": "epoch", "fragments": 2}, "need a fixed period"),
        ({"fragments": 2, "compressor": "PowerSGD"}, "compresses single layers"),
        ({"local_steps": "by_speed"}, "but all workers are equally fast"),
        (
            {"local_steps": "by_speed", "stragglers": {1: 9.0}},
            "no step for .* period of 9 or more",
        ),
        (
            {"period": "epoch", "local_steps": "by_speed", "stragglers": {1: 99.0}},
            "'epoch' with local_steps='by_speed' has 6 steps, which leave no step",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(fields: dict[str, Any], said: str) -> None:
    slow = fields.get("stragglers", {})
    strategy = ParameterAveraging(**{k: v for k, v in fields.items() if k != "stragglers"})
    with pytest.raises(InvalidInput, match=said):
        Experiment(dataset="digits", workers=2, strategy=strategy, stragglers=slow)
