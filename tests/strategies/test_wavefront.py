"""Test recurrent models on ranks, with time cut into segments, against one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from labkit import Cluster, Experiment, Pipeline
from labkit.common.errors import InvalidInput
from labkit.strategies import AllReduce, Strategy

Weights = list[np.ndarray]
STEPS = 8
random = np.random.default_rng(0)
X = random.standard_normal((100, STEPS, 3))
EACH = X, random.standard_normal((100, STEPS, 2))  # a target a step
END = X, random.integers(0, 3, 100)  # one a sequence


def answers_each_step() -> Any:
    import keras

    layers = [
        keras.layers.LSTM(5, return_sequences=True, kernel_regularizer="l2"),
        keras.layers.Dense(4, "tanh"),
        keras.layers.GRU(3, return_sequences=True),
        keras.layers.LayerNormalization(),
        keras.layers.SimpleRNN(4, return_sequences=True),
        keras.layers.Dense(2),
    ]
    return keras.Sequential([keras.Input((STEPS, 3)), *layers])


def answers_at_the_end() -> Any:
    import keras

    layers = [
        keras.layers.GRU(5, return_sequences=True),
        keras.layers.LSTM(4),
        keras.layers.Dense(5, "tanh"),
        keras.layers.Dense(3, "softmax"),
    ]
    return keras.Sequential([keras.Input((STEPS, 3)), *layers])


def without_recurrence() -> Any:
    import keras

    layers = [keras.layers.Dense(4), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((STEPS, 3)), *layers])


def weighted() -> Any:
    import tensorflow as tf

    weights = np.random.default_rng(1).uniform(size=(100, STEPS))
    return tf.data.Dataset.from_tensor_slices((*EACH, weights))


# There are 20 steps, also with batches of 30, 30, 30 and 10 rows.
BASE: dict[str, Any] = {
    "model": answers_each_step,
    "dataset": EACH,
    "loss": "mean_squared_error",
    "batch_size": 25,
    "epochs": 5,
    "learning_rate": 0.3,
    "precision": "float64",
    "verify": False,
}
AT_THE_END = {
    "model": answers_at_the_end,
    "dataset": END,
    "loss": "sparse_categorical_crossentropy",
}


def wavefront(microbatches: int, **fields: Any) -> Pipeline:
    return Pipeline(schedule="wavefront", microbatches=microbatches, **fields)


def experiment(strategy: Strategy, workers: int, **fields: Any) -> Experiment:
    return Experiment(**BASE | {"strategy": strategy, "workers": workers} | fields)


def train(communicator: Any, experiments: list[Experiment]) -> list[tuple[Weights, list[Any]]]:
    """Return each experiment's weights on this rank, and its events as (kind, time segment)."""
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    found = []
    for each in experiments:
        session = TrainingSession(each, communicator, read(each, communicator))
        each.strategy.train(session)
        weights = [variable.numpy() for variable in session.model.trainable_variables]
        rows = [(kind, number) for kind, _, number, *_ in session.timeline.events if number >= 0]
        found.append((weights, rows))
    return found


def assert_exact(
    cluster: Cluster, workers: int, strategies: list[Strategy], **fields: Any
) -> list[list[list[Any]]]:
    """Check that weights equal one process on all ranks; return the events of each rank."""
    one = experiment(AllReduce(), 1, **fields)
    (((expected, _),),) = cluster.call(train, [one], ranks=1)
    questions = [experiment(strategy, workers, **fields) for strategy in strategies]
    ranks = cluster.call(train, questions, ranks=workers)
    scale = max(np.abs(weight).max() for weight in expected)
    for rank in ranks:
        for weights, _ in rank:
            for found, weight in zip(weights, expected, strict=True):
                assert np.abs(found - weight).max() <= 1e-10 * scale
    return [[done for _, done in rank] for rank in ranks]


@pytest.mark.slow
def test_stretches_on_ranks_end_with_the_weights_of_one_process(cluster: Cluster) -> None:
    strategies: list[Strategy] = [wavefront(3, partition=(1, 5))]  # 2, 3 and 3 steps
    ranks = assert_exact(cluster, 2, strategies)
    table = wavefront(3).table(2)
    for rank, (done,) in enumerate(ranks):
        expected = [
            (f"{action} {stage}", number)
            for _, stage, action, number, _ in table.of_rank(rank).rows()
        ]
        assert done == expected * 20


@pytest.mark.slow
def test_what_lies_behind_the_last_output_alone_sees_the_last_stretch(cluster: Cluster) -> None:
    strategies: list[Strategy] = [wavefront(3, partition=(2, 2))]
    before, behind = assert_exact(cluster, 2, strategies, **AT_THE_END)
    assert [row for row in before[0] if row[0] == "forward 0"] == [
        ("forward 0", number) for number in (0, 1, 2)
    ] * 20
    each = ["receive 1", "forward 1", "backward 1", "send 1"]
    assert behind[0] == [(action, 2) for action in each] * 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "strategies"),
    [
        (1, [wavefront(4)]),
        (2, [wavefront(5, recompute=True), wavefront(8, partition=(5, 1))]),
        (3, [wavefront(2, partition=(1, 4, 1))]),
        (4, [wavefront(6), wavefront(3, stages=2)]),  # each replica has its own rows
    ],
)
def test_stages_stretches_and_replicas(
    cluster: Cluster, workers: int, strategies: list[Strategy]
) -> None:
    assert_exact(cluster, workers, strategies, batch_size=30)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "strategies"),
    [
        (2, [wavefront(2, recompute=True)]),
        (4, [wavefront(5, stages=2)]),
    ],
)
def test_one_answer_a_sequence(cluster: Cluster, workers: int, strategies: list[Strategy]) -> None:
    assert_exact(cluster, workers, strategies, batch_size=30, **AT_THE_END)


@pytest.mark.slow
def test_sample_weights_of_each_step(cluster: Cluster) -> None:
    assert_exact(cluster, 2, [wavefront(3)], dataset=weighted)


def of_any_length() -> Any:
    import keras

    layers = [
        keras.layers.GRU(4, return_sequences=True),
        keras.layers.LSTM(3),
        keras.layers.Dense(3, "softmax"),
    ]
    return keras.Sequential([keras.Input((None, 3)), *layers])


@pytest.mark.slow
def test_a_model_that_leaves_the_number_of_steps_open(cluster: Cluster) -> None:
    fields = AT_THE_END | {"model": of_any_length, "validation": (X[:9], END[1][:9])}
    assert_exact(cluster, 2, [wavefront(3)], **fields)


@pytest.mark.slow
def test_optimizers_that_remember(cluster: Cluster) -> None:
    assert_exact(cluster, 2, [wavefront(4)], optimizer="adam", learning_rate=0.01)


@pytest.mark.slow
def test_a_named_model_passes_the_gate(cluster: Cluster) -> None:
    question = Experiment(
        model="rnn",
        model_options={"layers": 2, "units": 6, "cell": "gru"},
        dataset="digits",
        dataset_options={"rows": 60, "test_rows": 9},
        batch_size=20,
        learning_rate=0.1,
        workers=2,
        strategy=wavefront(3),
    )
    run = cluster.run(question)
    assert run.metrics["equivalence"]["verdict"] == "passed"
    assert 0 <= run.metrics["test_accuracy"] <= 1


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"strategy": wavefront(9)}, "microbatches=9 exceeds the 8 time steps.*allowed: 1 to 8"),
        ({"model": "rnn", "dataset": "digits", "strategy": wavefront(9)}, "allowed: 1 to 8"),
        (
            {"model": "mlp", "dataset": "digits", "strategy": wavefront(4)},
            "model 'mlp' has no recurrent layers; allowed: rnn, or a callable",
        ),
        (
            {"strategy": wavefront(4, virtual_stages_per_rank=2)},
            "virtual_stages_per_rank=2 applies to schedule='interleaved'",
        ),
        (
            {"model": "rnn", "dataset": "digits", "strategy": wavefront(4, stages=4), "workers": 4},
            "chain of 3 blocks; allowed with workers=4: 1 or 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_ranks_start(
    fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        Experiment(**BASE | {"workers": 2} | fields)


def test_more_stretches_than_rows_are_no_mistake() -> None:
    assert experiment(wavefront(8), 2, batch_size=4).strategy.exact


def test_a_model_of_ones_own_without_recurrence_is_refused_on_the_ranks(cluster: Cluster) -> None:
    with pytest.raises(Exception, match="this one has no recurrent layer"):
        cluster.call(train, [experiment(wavefront(4), 2, model=without_recurrence)], ranks=2)
