"""Test codistillation against NumPy loops that share no code with it, on both clocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sample_programs import PASSED, SIZE, Numbers, play

from labkit import Cluster, Codistillation, Experiment
from labkit.common.errors import InvalidInput

WORKERS, STEPS = 3, 20


def said(who: int, whose: int, step: int, weights: np.ndarray) -> np.ndarray:
    """Return predictions as `Numbers` makes them."""
    return (who + 1) * weights[:PASSED] + 10.0 * whose + step


@pytest.mark.parametrize("exchange", ["predictions", "weights"])
def test_others_are_heard_a_period_later(exchange: Any) -> None:
    """Test without a model which workers' predictions, steps and weights count, and their cost."""
    strategy = Codistillation(4, distillation_weight=0.5, exchange=exchange)
    _, scenes, _ = play(strategy, WORKERS, steps=STEPS)
    own, kept = [np.zeros(4 * SIZE)] * WORKERS, {0: [np.zeros(4 * SIZE)] * WORKERS}
    for step in range(STEPS):
        old = kept.setdefault(step - step % 4, own)
        gradients = [0.01 * weights + worker + 1 for worker, weights in enumerate(own)]
        if step >= 8:
            old = kept[step - step % 4 - 4]
            for worker, weights in enumerate(own):
                # Received weights are run by the receiver, while predictions are made by the
                # sender.
                others = [other for other in range(WORKERS) if other != worker]
                who = [worker if exchange == "weights" else other for other in others]
                drawn = np.mean(
                    [said(a, worker, step, old[b]) for a, b in zip(who, others, strict=True)], 0
                )
                drawn = np.tile(drawn, 4 * SIZE // PASSED)
                gradients[worker] = gradients[worker] + 0.5 * (0.01 * weights - drawn)
        own = [weights - 0.1 * gradient for weights, gradient in zip(own, gradients, strict=True)]
    for worker in range(WORKERS):
        np.testing.assert_allclose(scenes.held[worker], own[worker], rtol=1e-12)
    rows = [row for row in scenes.rows if row["rank"] == 0]
    spent = sum(row["compute_seconds"] for row in rows)
    # In each of the last 12 steps, a worker makes two predictions, each at a third of a gradient's
    # cost.
    assert spent == pytest.approx(0.1 * (STEPS + 2 * 12 / 3))


@pytest.mark.parametrize("exchange", ["predictions", "weights"])
def test_all_stop_after_the_same_step(exchange: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a stop wanted at step 10 is sent at 12 and known at 16, and ends that period."""
    monkeypatch.setattr(Numbers, "stops", lambda self: self.steps.get(0, 0) >= 10)
    _, scenes, _ = play(Codistillation(4, exchange=exchange), WORKERS, steps=40)
    assert scenes.steps == dict.fromkeys(range(WORKERS), 20)


ROWS, CLASSES = 60, 10  # rows of digits, so that workers' parts of a batch are unequal


def parts(communicator: Any, experiment: Experiment, equal: bool) -> dict[str, Any]:
    """Return worker 0's weights, all batches, and the bytes that this rank sent."""
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    class Session(TrainingSession):
        def batches(self) -> Any:
            found = super().batches()
            return (lambda _, number: found(0, number)) if equal else found

    session = Session(experiment, communicator, read(experiment, communicator))
    session.feed.validation = None
    batches = session.batches()
    first = [weight.numpy() for weight in session.model.weights]
    steps = session.feed.steps * experiment.epochs
    rows = [
        [tuple(np.asarray(batch) for batch in batches(worker, step)[:2]) for step in range(steps)]
        for worker in range(experiment.workers)
    ]
    meter = communicator.traffic
    before = meter.copy()
    experiment.strategy.train(session)
    sent = meter.since(before).wire_bytes
    assert experiment.clock == "virtual" or sent == sum(
        row["wire_bytes"] for row in session.stage.rows
    )
    weights = [weight.numpy() for weight in session.model.weights]
    session.close()
    return {"first": first, "rows": rows, "weights": weights, "sent": sent}


def softmax(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    scores = np.exp(x @ w + b - (x @ w + b).max(1, keepdims=True))
    return scores / scores.sum(1, keepdims=True)


def reference(told: dict[str, Any], period: int, share: float, rate: float) -> list[np.ndarray]:
    """Return worker 0's weights by softmax regressions in NumPy that learn from each other."""
    own = [tuple(each.copy() for each in told["first"]) for _ in told["rows"]]
    kept = {}
    for step in range(len(told["rows"][0])):
        begin = step - step % period
        kept.setdefault(begin, own)
        after = []
        for worker, (w, b) in enumerate(own):
            x, y = told["rows"][worker][step]
            x = x.reshape(len(x), -1)
            p = softmax(x, w, b)
            error = p - np.eye(CLASSES)[y]
            if begin >= 2 * period:
                others = [o for n, o in enumerate(kept[begin - period]) if n != worker]
                error = error + share * (p - np.mean([softmax(x, *o) for o in others], 0))
            after.append((w - rate * x.T @ error / len(x), b - rate * error.mean(0)))
        own = after
    return list(own[0])


@pytest.mark.slow
def test_models_learn_from_each_other_as_a_loop_in_numpy_says(cluster: Cluster) -> None:
    """Test unequal rows, and the counted bytes of a period's predictions or of weights."""
    base = Experiment(
        dataset="digits",
        dataset_options={"rows": ROWS, "test_rows": 10},
        model_options={"widths": []},
        batch_size=12,
        epochs=4,
        workers=3,
        batch_weights=(1, 3, 2),
        learning_rate=0.5,
        precision="float64",
    )
    found = {
        exchange: cluster.call(
            parts,
            base.replace(strategy=Codistillation(3, distillation_weight=0.7, exchange=exchange)),
            False,
            ranks=3,
        )
        for exchange in ("predictions", "weights")
    }
    for told in found.values():
        expected = reference(told[0], 3, 0.7, 0.5)
        for ours, theirs in zip(told[0]["weights"], expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
        apart = reference(told[0], 3, 0.0, 0.5)
        assert abs(told[0]["weights"][0] - apart[0]).max() > 1e-3
    # Workers send at steps 3, 6, …, 15, for steps 6 to 19, to two others.
    size = 8 * (64 * CLASSES + CLASSES)
    sent = {name: [rank["sent"] for rank in told] for name, told in found.items()}
    assert sent["weights"] == [2 * 5 * size] * 3
    heard = [2, 6, 4]  # rows of each worker's batch
    whole = [14 * 8 * CLASSES * (sum(heard) - own) for own in heard]
    assert sent["predictions"] == whole


def test_without_weight_two_replicas_of_equal_data_are_two_trainings(cluster: Cluster) -> None:
    pair = Experiment(
        dataset="digits",
        dataset_options={"rows": ROWS, "test_rows": 10},
        model_options={"widths": []},
        batch_size=12,
        epochs=4,
        workers=2,
        learning_rate=0.5,
        precision="float64",
        clock="virtual",
        virtual={"compute_time": 0.01},
        strategy=Codistillation(3, distillation_weight=0.0),
    )
    (told,) = cluster.call(parts, pair, True, ranks=1)
    for ours, theirs in zip(told["weights"], reference(told, 3, 0.0, 0.5), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"dataset": lambda: None, "model": lambda: None},
            "other workers predict on a batch before",
        ),
        ({"input_mode": "scatter"}, "does not support separate models"),
    ],
)
def test_what_others_cannot_predict_is_refused(fields: dict[str, Any], said: str) -> None:
    given = {"dataset": "digits", "workers": 2, "strategy": Codistillation()} | fields
    with pytest.raises(InvalidInput, match=said):
        Experiment(**given)
