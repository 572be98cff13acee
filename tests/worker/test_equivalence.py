"""Test the equivalence check: it passes equal runs, fails others and names what it cannot judge."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit import Cluster, Experiment
from labkit.strategies import AllReduce, Layerwise, Pipeline, Strategy, TensorParallel

SMALL = {
    "dataset": "digits",
    "dataset_options": {"rows": 100, "test_rows": 10},
    "model_options": {"widths": [8]},
    "batch_size": 30,
    "workers": 2,
}


def verify(communicator: Any, experiment: Experiment, cache: str) -> dict[str, Any]:
    from labkit.worker import equivalence
    from labkit.worker.feed import read

    os.environ["LABKIT_CACHE"] = cache
    verdict = equivalence.verify(experiment, communicator, read(experiment, communicator))
    return dict(verdict)


def verdict_of(cluster: Cluster, experiment: Experiment) -> dict[str, Any]:
    """Return the verdict, and check that it is the same on all ranks."""
    cache = str(Path.cwd() / "cache")
    verdicts = cluster.call(verify, experiment, cache, ranks=experiment.workers)
    assert verdicts == [verdicts[0]] * experiment.workers
    first: dict[str, Any] = verdicts[0]
    return first


class Lonely(Strategy):
    """A strategy that claims to be exact but exchanges nothing."""

    @property
    def exact(self) -> bool:
        return True

    def train(self, session: Any) -> None:
        session.compile(session.optimizer())
        session.fit([])


class Hasty(AllReduce):
    """A strategy that weights all ranks equally, although their parts of a batch are unequal."""

    def train(self, session: Any) -> None:
        from labkit.keras import DistributedOptimizer, broadcast

        optimizer = DistributedOptimizer(session.optimizer(), session.communicator)
        session.compile(optimizer)
        broadcast(session.model.variables, session.communicator)
        session.fit([])


RARER: list[dict[str, Any]] = [
    {"input_mode": "scatter"},
    {"learning_rate_scaling": "linear"},
    {"learning_rate_scaling": "sqrt", "warmup_epochs": 2},
    {"batch_size": 1000},
    {"input_mode": "scatter", "data_partition": "dirichlet(0.3)"},
    {"strategy": Pipeline(stages=2), "workers": 4, "data_partition": "by_label"},
    {
        "strategy": TensorParallel(tensor_parallel_size=2),
        "workers": 4,
        "data_partition": "dirichlet(0.3)",
    },
]


@pytest.mark.battery(2, 2)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"workers": 3, "batch_size": 32},
        {"batch_weights": (1, 4)},
        {"optimizer": "adam"},
        {"precision": "mixed_float16"},
        {"workers": 3, "batch_size": 32, "data_partition": "by_label"},
        *(pytest.param(fields, marks=pytest.mark.slow) for fields in RARER),
    ],
    ids=str,
)
def test_what_is_exact_passes_with_a_tiny_difference(
    cluster: Cluster, fields: dict[str, Any]
) -> None:
    verdict = verdict_of(cluster, Experiment(**SMALL | fields))
    assert verdict["verdict"] == "passed", verdict
    assert verdict["max_abs_difference"] < 1e-12
    assert verdict["tolerance"] >= 1e-9
    assert "20 steps" in verdict["reason"]
    assert "float64" in verdict["reason"]


@pytest.mark.parametrize("cell", ["lstm", pytest.param("gru", marks=pytest.mark.slow)])
def test_a_recurrent_model_without_dropout_is_held_to_it(cluster: Cluster, cell: str) -> None:
    options = {"cell": cell, "units": 4}
    experiment = Experiment(**SMALL | {"model": "rnn", "model_options": options})
    verdict = verdict_of(cluster, experiment)
    assert verdict["verdict"] == "passed", verdict


@pytest.mark.slow
def test_an_embedding_is_held_to_it_with_an_optimizer_that_squares(cluster: Cluster) -> None:
    """Test words that repeat in a batch; random states are no weights and set no tolerance."""

    def model() -> Any:
        import keras

        layers = [keras.layers.Embedding(5, 3), keras.layers.LSTM(4), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((6,), dtype="int32"), *layers])

    words = np.random.default_rng(0).integers(0, 5, (60, 6))
    data = words, words.mean(axis=1)
    fields: dict[str, Any] = {"dataset": data, "loss": "mean_squared_error", "optimizer": "adam"}
    experiment = Experiment(model=model, batch_size=20, workers=2, **fields)
    verdict = verdict_of(cluster, experiment)
    assert verdict["verdict"] == "passed"
    assert verdict["tolerance"] < 1e-7
    assert verdict_of(cluster, experiment.replace(strategy=Lonely()))["verdict"] == "failed"


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize("strategy", [Lonely(), Hasty()], ids=lambda s: type(s).__name__)
def test_a_strategy_that_is_not_what_it_claims_fails(cluster: Cluster, strategy: Strategy) -> None:
    fields = SMALL | {"strategy": strategy, "batch_weights": (1, 5)}
    verdict = verdict_of(cluster, Experiment(**fields))
    assert verdict["verdict"] == "failed", verdict
    assert verdict["max_abs_difference"] > 1e-4


def test_weights_that_are_not_a_number_do_not_pass(cluster: Cluster) -> None:
    def spoilt(communicator: Any, experiment: Experiment, cache: str) -> Any:
        import keras

        def train(self: Any, session: Any) -> None:
            AllReduce.train(self, session)
            bias = session.model.layers[-1].bias  # the model's last variable
            bias.assign(keras.ops.full_like(bias, np.nan))

        kind = type("Spoilt", (AllReduce,), {"train": train, "__module__": __name__})
        return verify(communicator, experiment.replace(strategy=kind()), cache)

    cache = str(Path.cwd() / "cache")
    verdicts = cluster.call(spoilt, Experiment(**SMALL), cache, ranks=2)
    assert [verdict["verdict"] for verdict in verdicts] == ["failed"] * 2


def normalised() -> Any:
    import keras

    layers = [keras.layers.Flatten(), keras.layers.BatchNormalization(), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def synchronised() -> Any:
    import keras

    normalise = keras.layers.BatchNormalization(synchronized=True)
    layers = [keras.layers.Flatten(), normalise, keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def with_a_step_of_its_own() -> Any:
    import keras

    class Own(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    inputs = keras.Input((8, 8, 1))
    return Own(inputs, keras.layers.Dense(10)(keras.layers.Flatten()(inputs)))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": normalised, "model_options": {}}, "normalises by the batch of each rank"),
        ({"model_options": {"dropout": 0.3}}, "draws random numbers"),
        ({"model": with_a_step_of_its_own, "model_options": {}}, "custom train_step"),
        ({"workers": 1}, "itself the reference of the check"),
        ({"verify": False}, "verify=False"),
    ],
    ids=["normalisation", "dropout", "train_step", "one worker", "verify=False"],
)
def test_where_it_cannot_tell_it_says_why(
    cluster: Cluster, fields: dict[str, Any], reason: str
) -> None:
    verdict = verdict_of(cluster, Experiment(**SMALL | fields))
    assert verdict["verdict"] == "not applicable"
    assert reason in verdict["reason"]
    assert verdict["max_abs_difference"] is None


def flipped() -> Any:
    import keras

    layers = [keras.layers.RandomFlip(name="flips"), keras.layers.Flatten(), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def spectral() -> Any:
    import keras

    inner = keras.layers.Dense(6, activation="relu")
    layers = [
        keras.layers.Flatten(),
        keras.layers.SpectralNormalization(inner, name="bounded"),
        keras.layers.Dense(10),
    ]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def frozen() -> Any:
    model = normalised()
    model.layers[1].trainable = False
    return model


IN_PARTS = Pipeline("gpipe", microbatches=2)


@pytest.mark.battery(3, 3)
@pytest.mark.parametrize(
    ("model", "strategy", "verdict", "says"),
    [
        (flipped, AllReduce(), "not applicable", "layer 'flips' (RandomFlip) draws random numbers"),
        (spectral, AllReduce(), "passed", "20 steps"),
        (spectral, Layerwise(), "passed", "20 steps"),
        (spectral, IN_PARTS, "not applicable", "layer 'bounded' (SpectralNormalization) updates"),
        (normalised, IN_PARTS, "not applicable", "(BatchNormalization) normalises by each micro"),
        (normalised, Layerwise(), "passed", "20 steps"),
        (synchronised, AllReduce(), "passed", "20 steps"),
        (synchronised, IN_PARTS, "not applicable", "(BatchNormalization) normalises by each micro"),
        (frozen, AllReduce(), "passed", "20 steps"),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__ if value else ""),
)
def test_what_differs_by_nature_is_named_and_nothing_else_is_excused(
    cluster: Cluster, model: Any, strategy: Strategy, verdict: str, says: str
) -> None:
    fields = SMALL | {"model": model, "model_options": {}, "strategy": strategy}
    found = verdict_of(cluster, Experiment(**fields))
    assert found["verdict"] == verdict, found
    assert says in found["reason"]


@pytest.mark.slow
def test_one_process_serves_all_strategies_on_the_same_batches(cluster: Cluster) -> None:
    for strategy in (AllReduce(), AllReduce("ring"), Layerwise()):
        assert verdict_of(cluster, Experiment(**SMALL, strategy=strategy))["verdict"] == "passed"
        (kept,) = Path("cache/references").iterdir()
    # Change the stored reference, so that its use is detected.
    with np.load(kept) as whole:
        np.savez(kept, *[value + 1e-3 for value in whole.values()])
    again = Experiment(**SMALL, strategy=Layerwise(recompute=True), batch_weights=None)
    assert verdict_of(cluster, again)["verdict"] == "failed"
    # Another effective learning rate needs another reference, but the same rate in another form
    # does not.
    for rate in ({"learning_rate": 0.02}, {"learning_rate_scaling": "linear"}):
        assert verdict_of(cluster, Experiment(**SMALL | rate))["verdict"] == "passed"
    assert len(list(Path("cache/references").iterdir())) == 2


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 8, 16])
@pytest.mark.parametrize("batch_size", [32, 240, 241, 1000, 1024, 4096])
@pytest.mark.parametrize("rows", [100, 5000, 8292, 60_000])
def test_fewer_rows_leave_the_same_remainders(rows: int, batch_size: int, parts: int) -> None:
    from labkit.worker.reference import UNIT, fewer

    less, size = fewer(rows, batch_size, parts)
    assert size <= batch_size
    assert less <= rows
    assert size % parts == batch_size % parts
    assert less // size == rows // batch_size  # the same number of whole batches
    assert (less % size > 0) == (rows % batch_size > 0)
    assert (less % size) % parts == (rows % batch_size) % parts
    assert size <= max(batch_size if batch_size < 3 * UNIT else 0, 3 * UNIT * parts)


def test_dropout_of_share_zero_is_held_to_it(cluster: Cluster) -> None:
    experiment = Experiment(**SMALL | {"model_options": {"widths": [8], "dropout": 0.0}})
    assert verdict_of(cluster, experiment)["verdict"] == "passed"


@pytest.mark.slow
def test_a_verdict_is_used_again_but_not_for_another_batch_size(cluster: Cluster) -> None:
    experiment = Experiment(**SMALL)
    verdict_of(cluster, experiment)
    (cached,) = Path("cache/gates").iterdir()
    # Change the cached verdict, so that its use is detected.
    cached.write_text(cached.read_text().replace("20 steps", "21 steps"))
    assert "21 steps" in verdict_of(cluster, experiment)["reason"]
    for irrelevant in ({"name": "other"}, {"epochs": 9}, {"seed": 3}, {"repeats": 2}):
        assert "21 steps" in verdict_of(cluster, experiment.replace(**irrelevant))["reason"]
    for relevant in ({"batch_size": 29}, {"optimizer": "adam"}, {"workers": 3}):
        assert "20 steps" in verdict_of(cluster, experiment.replace(**relevant))["reason"]


def test_a_data_set_of_the_users_own_is_held_to_it(cluster: Cluster) -> None:
    def data() -> Any:
        import tensorflow as tf

        random = np.random.default_rng(0)
        x, y = random.standard_normal((70, 8, 8, 1)), random.integers(0, 10, 70)
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(70, seed=1)

    def flat() -> Any:
        import keras

        layers = [keras.layers.Flatten(), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input((8, 8, 1)), *layers])

    loss = "sparse_categorical_crossentropy"
    verdict = verdict_of(
        cluster, Experiment(model=flat, dataset=data, loss=loss, workers=2, batch_size=16)
    )
    assert verdict["verdict"] == "passed", verdict
