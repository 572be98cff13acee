"""Test that ranks together predict and validate exactly as the undivided model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import labkit as lk
from labkit import Cluster, Experiment, InvalidInput, Run
from labkit.strategies import Strategy

random = np.random.default_rng(0)
X = random.standard_normal((37, 8, 8, 1)).astype(np.float32)
ROWS = (0, 1, 37)
# The batches have 30, 30, 30 and 10 samples; the last batch has fewer samples than micro-batches.
FIELDS: dict[str, Any] = {
    "model": "mlp",
    "model_options": {"widths": [7, 6, 5]},
    "dataset": "digits",
    "dataset_options": {"rows": 100, "test_rows": 50},
    "batch_size": 30,
    "workers": 4,
    "strategy": lk.Pipeline(stages=2, microbatches=15),
}
TOGETHER: list[Strategy] = [
    lk.AllReduce(),
    lk.Layerwise(),
    lk.Pipeline(stages=2, partition=(1, 4)),
    lk.DelayedGradients(modules=2),
    lk.TensorParallel(),
    lk.TensorParallel(tensor_parallel_size=2),
    lk.SpatialParallel(),
    lk.SpatialParallel(grid=(1, 2)),
]


@pytest.fixture(scope="module")
def trained(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run whose trained model all strategies of this file divide among ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trained"))
        return cluster.run(Experiment(**FIELDS), show=False)


@pytest.mark.slow
def test_a_batch_of_fewer_rows_than_micro_batches_is_exact(trained: Run) -> None:
    assert trained.metrics["equivalence"]["verdict"] == "passed"


def test_a_run_predicts_as_it_was_trained(cluster: Cluster, trained: Run) -> None:
    whole = trained.model().predict(X, verbose=0)
    np.testing.assert_allclose(cluster.predict(trained, X), whole, rtol=1e-5, atol=1e-6)
    found = cluster.predict(str(trained.model_file), X, "Layerwise", workers=3, batch_size=10)
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)
    assert found.dtype == whole.dtype
    assert cluster.predict(trained, X[:0]).shape == (0, 10)


def by_all(
    communicator: Any, model: Any, strategies: list[Strategy], x: Any, batch_size: int
) -> Any:
    """Return this rank's predictions by strategy and number of samples, and the whole model's."""
    import keras

    from labkit.worker import inference
    from labkit.worker.rank_state import restore

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(0)
    built = model()
    try:
        return [
            [
                inference.predict(communicator, built, strategy, x[:rows], batch_size)
                for rows in ROWS
            ]
            for strategy in strategies
        ], built.predict(x, verbose=0)
    finally:
        restore()


def assert_same(cluster: Cluster, ranks: int, model: Any, strategies: list[Strategy]) -> None:
    from labkit.cluster.prediction import join_parts

    x = X.astype(np.float64)
    found = cluster.call(by_all, model, strategies, x, 4, ranks=ranks)
    for place, strategy in enumerate(strategies):
        for number, rows in enumerate(ROWS):
            y = join_parts([each[place][number] for each, _ in found])
            assert y.dtype == np.float64
            assert y.shape == (rows, 10)
            np.testing.assert_allclose(y, found[0][1][:rows], 1e-12, 1e-13, err_msg=str(strategy))


def mlp() -> Any:
    import keras
    from keras.layers import BatchNormalization, Dense, Dropout, Flatten

    layers = [Flatten(), Dense(7, "relu"), Dropout(0.5), Dense(6, "tanh"), BatchNormalization()]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers, Dense(10)])


def five_blocks() -> Any:
    import keras
    from keras.layers import Conv2D, Dense, Flatten, MaxPooling2D

    layers = [Conv2D(5, 3, activation="relu"), MaxPooling2D(), Flatten(), Dense(7, "relu")]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers, Dense(10)])


@pytest.mark.slow
def test_all_strategies_predict_what_the_whole_model_predicts(cluster: Cluster) -> None:
    assert_same(cluster, 4, five_blocks, TOGETHER)


def test_several_stages_on_a_rank_pass_on_groups_of_micro_batches(cluster: Cluster) -> None:
    chunks: list[Strategy] = [
        lk.Pipeline(schedule="interleaved", microbatches=3, virtual_stages_per_rank=2),
        lk.TensorParallel(),
    ]
    assert_same(cluster, 3, mlp, chunks)
    assert_same(cluster, 1, mlp, chunks[:1])


def ahead(communicator: Any) -> Any:
    """Rank 0 sends all micro-batches, 128 KiB each, before rank 1 receives any."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4096), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    x = np.random.default_rng(0).standard_normal((4, 8, 2))
    found = lk.Pipeline().predictor(model, communicator)(iter(x))
    first = [next(found) for _ in x] if communicator.rank == 0 else []
    communicator.barrier("the end of the first stage")
    both = [*first, *found]
    return [y for y, _ in both], np.stack([model(part) for part in x])


def test_a_stage_takes_the_next_micro_batch_before_the_last_one_has_arrived(
    cluster: Cluster,
) -> None:
    (first, _), (last, whole) = cluster.call(ahead, ranks=2)
    assert first == [None] * 4
    np.testing.assert_allclose(np.stack(last), whole, rtol=1e-4, atol=1e-5)


# --- held-out rows -------------------------------------------------------------------------------


def with_penalties() -> Any:
    """Return a model in which layers of every pipeline stage add regularization losses."""
    import keras
    from keras.layers import Activation, Dense, Flatten

    layers = [
        Dense(7, "relu", kernel_regularizer="l2"),
        Dense(6, activity_regularizer="l2"),
        Activation("tanh"),
        Dense(8, "relu"),
        Dense(9, "relu"),
    ]
    return keras.Sequential([keras.Input((8, 8, 1)), Flatten(), *layers, Dense(10)])


def weighted() -> Any:
    import tensorflow as tf

    random = np.random.default_rng(1)
    rows = random.standard_normal((50, 8, 8, 1)), random.integers(0, 10, 50), random.random(50)
    return tf.data.Dataset.from_tensor_slices(rows).batch(11)


def nothing() -> list[Any]:
    return []


def validated(communicator: Any, experiments: list[Experiment]) -> Any:
    """Return validation metrics, those of the whole model, and how often it was assembled."""
    import keras

    from labkit.worker.feed import read
    from labkit.worker.rank_state import restore
    from labkit.worker.session import TrainingSession

    found = []
    for experiment in experiments:
        session = TrainingSession(experiment, communicator, read(experiment, communicator))
        logs: list[dict[str, float]] = []
        told = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda _, found, to=logs: to.append(found)
        )
        session.callbacks.append(told)
        loop, collected = session.loop, []

        def counting(
            step: Any, collect: Any, predict: Any, loop: Any = loop, times: Any = collected
        ) -> None:
            loop(step, lambda: (times.append(1), collect()), predict)

        session.loop = counting  # type: ignore[method-assign]
        experiment.strategy.train(session)
        found.append((logs[-1], session.evaluate(), len(collected)))
        restore()
    return found


@pytest.mark.slow
def test_stages_and_slices_measure_what_the_whole_model_measures(cluster: Cluster) -> None:
    base = FIELDS | {
        "model": with_penalties,
        "model_options": {},
        "precision": "float64",
        "loss": "sparse_categorical_crossentropy",
        "metrics": ("accuracy",),
        "validation": weighted,
        "epochs": 2,
        "verify": False,
    }
    strategies = [
        lk.Pipeline(stages=2, schedule="interleaved", microbatches=2, virtual_stages_per_rank=3),
        lk.DelayedGradients(),
        lk.TensorParallel(tensor_parallel_size=2),
    ]
    experiments = [Experiment(**base | {"strategy": each}) for each in strategies]
    logits = {"loss": None, "dataset": "digits", "callbacks": nothing}  # the outputs stay divided
    experiments.append(Experiment(**base | {"strategy": lk.TensorParallel()} | logits))
    ranks = cluster.call(validated, experiments)
    assert [whole for _, _, whole in ranks[0]] == [1, 1, 1, 2]
    for rank in ranks:
        for (logs, metrics, _), strategy in zip(rank, [*strategies, "scores"], strict=True):
            assert sorted(metrics) == ["accuracy", "loss"]
            own = {name: logs[f"val_{name}"] for name in metrics}
            assert own == pytest.approx(metrics, rel=1e-12), strategy


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"x": [[1.0]]}, "contains a float; .*: use numpy.asarray"),
        ({"x": (X, X[:3])}, r"different numbers of rows, \[3, 37\]"),
        ({"batch_size": 0}, "batch_size=0 is impossible; give a whole number of at least 1"),
        ({"workers": 5}, "workers=5 on a cluster of 4 ranks; give workers=1 to 4"),
        (
            {"run": "no.keras"},
            "'no.keras' has no model file: give a completed run, or an existing .keras file",
        ),
        ({"strategy": "Pipelin"}, "unknown strategy 'Pipelin' .did you mean 'Pipeline'"),
        ({"strategy": lk.Pipeline(stages=3)}, "stages=3 does not divide workers=4"),
        (
            {"strategy": lk.TensorParallel(tensor_parallel_size=3)},
            "tensor_parallel_size=3 does not divide workers=4",
        ),
        ({"strategy": lk.Pipeline(stages=2, partition=(3, 3))}, r"such as \[2, 3\]"),
    ],
    ids=str,
)
def test_what_cannot_be_predicted_is_refused_before_ranks_work(
    cluster: Cluster, trained: Run, arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence) as refusal:
        cluster.predict(**{"run": trained, "x": X} | arguments)
    assert not isinstance(refusal.value, lk.cluster.RankError)


def test_what_only_the_model_tells_is_refused_by_the_ranks(cluster: Cluster, trained: Run) -> None:
    with pytest.raises(InvalidInput, match=r"^x has rows of shape \[7\], the model takes \[8, 8, "):
        cluster.predict(trained, np.zeros((3, 7)))
    with pytest.raises(InvalidInput, match=r"^x has 2 arrays, but the model takes 1"):
        cluster.predict(trained, (X, X))
    file = Path(trained.model_file)
    with pytest.raises(
        InvalidInput, match=r"^stages=4 of virtual_stages_per_rank=2 has 8 stages.* allowed"
    ):
        cluster.predict(
            file, X, lk.Pipeline(schedule="interleaved", microbatches=4, virtual_stages_per_rank=2)
        )
