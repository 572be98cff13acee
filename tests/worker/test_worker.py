"""Test experiments on a cluster: all families of models and data, callables, feeds and records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit import Cluster, DelayedGradients, Experiment, InvalidInput
from labkit.cluster import RankError
from labkit.datasets import available
from labkit.records.run import Run
from labkit.records.store import HISTORY_COLUMNS

DIGITS = {"dataset": "digits", "dataset_options": {"rows": 120, "test_rows": 41}}
SHORT = DIGITS | {"workers": 2, "batch_size": 32, "verify": False, "model_options": {"widths": [8]}}

X = np.random.default_rng(0).standard_normal((50, 5)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


def weights(run: Run) -> list[np.ndarray]:
    return list(run.model().get_weights())


def flat_model() -> Any:
    import keras

    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])


def compiled_model() -> Any:
    import keras

    def crossentropy(y: Any, scores: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(y, scores, from_logits=True)

    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    model.compile(
        optimizer=keras.optimizers.Adam(0.05),
        loss=crossentropy,
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="right")],
    )
    return model


def batches_of_seven() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(7)


def samples() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y))


# --- models and data -----------------------------------------------------------------------------


@pytest.mark.battery(0, 2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "model_options", "dataset", "dataset_options"),
    [
        pytest.param(
            "mlp",
            {"widths": [8]},
            "synthetic",
            {"task": "regression", "rows": 64, "targets": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "mlp", {"widths": [8]}, "adult", {"rows": 64, "test_rows": 9}, marks=pytest.mark.slow
        ),
        ("cnn", {"filters": [4], "dense": 8}, "mnist", {"rows": 64, "test_rows": 9}),
        pytest.param(
            "rnn",
            {"units": 8, "embedding": 4},
            "shakespeare",
            {"rows": 64, "test_rows": 9, "sequence_length": 12},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_family_trains_on_fitting_data(
    cluster: Cluster, model: str, model_options: Any, dataset: str, dataset_options: Any
) -> None:
    if reason := available(dataset):
        pytest.skip(reason)
    run = cluster.run(
        Experiment(
            model=model,
            model_options=model_options,
            dataset=dataset,
            dataset_options=dataset_options,
            workers=2,
            batch_size=32,
            steps_per_epoch=2,
            learning_rate=0.05,
        ),
        show=False,
    )
    assert run.metrics["equivalence"]["verdict"] == "passed", run.metrics["equivalence"]
    assert np.isfinite(run.metrics["test_loss"])
    regression = dataset_options.get("task") == "regression"
    assert ("test_accuracy" in run.metrics) == (not regression)
    assert run.history["loss"].notna().all()


@pytest.mark.exhaustive
def test_inception_trains_on_synthetic_images(cluster: Cluster) -> None:
    run = cluster.run(
        Experiment(
            model="inception_v3",
            dataset="synthetic",
            dataset_options={"shape": [75, 75, 3], "rows": 8, "test_rows": 4},
            workers=2,
            batch_size=4,
            steps_per_epoch=2,
        ),
        show=False,
    )
    assert run.metrics["equivalence"]["verdict"] == "not applicable"
    assert np.isfinite(run.metrics["test_loss"])
    assert all(np.isfinite(w).all() for w in weights(run))


def test_arrays_and_a_named_model(cluster: Cluster) -> None:
    run = cluster.run(
        Experiment(
            dataset=(X, Y),
            validation=(X[:9], Y[:9]),
            model_options={"widths": [4]},
            workers=3,
            batch_size=16,
            epochs=3,
        ),
        show=False,
    )
    assert run.metrics["equivalence"]["verdict"] == "passed"
    assert len(run.metrics["epochs"]) == 3
    assert {"accuracy", "val_accuracy"} <= set(run.metrics["epochs"][0])


@pytest.mark.slow
@pytest.mark.parametrize("data", [samples, pytest.param(batches_of_seven, marks=pytest.mark.slow)])
def test_callables_for_everything(cluster: Cluster, data: Any) -> None:
    run = cluster.run(
        Experiment(
            model=flat_model,
            dataset=data,
            validation=samples,
            loss="sparse_categorical_crossentropy",
            metrics=("accuracy",),
            workers=2,
            batch_size=20,
        ),
        show=False,
    )
    samples_of_step = run.history.groupby("step")["samples"].sum()
    assert samples_of_step.tolist() == [20, 20, 10]
    assert run.metrics["equivalence"]["verdict"] == "passed", run.metrics["equivalence"]
    assert "test_accuracy" in run.metrics


@pytest.mark.slow
def test_a_compiled_model_keeps_its_optimizer_loss_and_metrics(cluster: Cluster) -> None:
    run = cluster.run(
        Experiment(
            model=compiled_model,
            dataset=(X, Y),
            validation=(X, Y),
            workers=2,
            batch_size=10,
            epochs=8,
        ),
        show=False,
    )
    assert run.metrics["equivalence"]["verdict"] == "passed", run.metrics["equivalence"]
    assert run.metrics["test_right"] > 0.75


@pytest.mark.slow
def test_several_inputs_and_outputs_through_an_experiment(cluster: Cluster) -> None:
    def forked() -> Any:
        import keras

        a, b = keras.Input((5,), name="a"), keras.Input((5,), name="b")
        both = keras.layers.Concatenate()([a, b])
        outputs = {name: keras.layers.Dense(1, name=name)(both) for name in ("p", "q")}
        return keras.Model({"a": a, "b": b}, outputs)

    targets = X[:, :1]
    for feed in ("shard", "scatter"):
        run = cluster.run(
            Experiment(
                model=forked,
                dataset=({"a": X, "b": X + 1}, {"p": targets, "q": -targets}),
                loss="mse",
                workers=2,
                batch_size=16,
                input_mode=feed,
            ),
            show=False,
        )
        assert run.metrics["equivalence"]["verdict"] == "passed", run.metrics["equivalence"]


def test_a_model_that_keras_cannot_save_is_trained_and_recorded(cluster: Cluster) -> None:
    def subclassed() -> Any:
        import keras

        class Own(keras.Model):  # type: ignore[misc]
            def __init__(self, head: Any) -> None:
                super().__init__()
                self.head = head

            def build(self, shape: Any) -> None:
                self.head.build(shape)
                self.built = True

            def call(self, x: Any) -> Any:
                return self.head(x)

            def get_config(self) -> Any:
                raise NotImplementedError("no config")

        model = Own(keras.layers.Dense(2))
        model.build((None, 5))
        return model

    run = cluster.run(
        Experiment(
            model=subclassed,
            dataset=(X, Y),
            loss="sparse_categorical_crossentropy",
            workers=2,
            batch_size=16,
            verify=False,
        ),
        show=False,
    )
    assert run.status["state"] == "completed"
    assert len(run.history) == 8
    assert not (run.path / "model.keras").exists()
    assert "Keras cannot save it: no config" in (run.path / "logs" / "rank0.log").read_text()


def test_a_callable_without_a_model_is_refused_with_what_it_gave(cluster: Cluster) -> None:
    def nothing() -> int:
        return 3

    with pytest.raises(RankError, match=r"returned int; it must return a keras\.Model"):
        cluster.run(Experiment(**SHORT | {"model": nothing, "model_options": {}}), show=False)


# --- the record ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Yield one run, which several tests read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("recorded"))
        yield cluster.run(
            Experiment(**SHORT | {"epochs": 2, "verify": True, "batch_weights": (1, 3)}), show=False
        )


def test_the_history_has_a_row_a_step_and_rank(recorded: Run) -> None:
    history = recorded.history
    assert list(history.columns) == [*HISTORY_COLUMNS, "codec_seconds"]
    pairs = [(step, rank) for step in range(8) for rank in range(2)]
    assert list(zip(history["step"], history["rank"], strict=True)) == pairs
    assert history["epoch"].tolist() == [0] * 8 + [1] * 8
    # Rank 0 has a quarter of each batch of 32, 32, 32 and 24 rows.
    assert history[history["rank"] == 0]["samples"].tolist() == [8, 8, 8, 6] * 2
    assert history[history["rank"] == 1]["samples"].tolist() == [24, 24, 24, 18] * 2
    parts = history[["compute_seconds", "communicate_seconds", "wait_seconds"]]
    np.testing.assert_allclose(parts.sum(axis=1), history["seconds"], rtol=1e-6)
    assert (parts >= 0).all().all()


def test_the_history_counts_what_the_ranks_exchange(recorded: Run) -> None:
    parameters = sum(w.size for w in weights(recorded))
    history = recorded.history
    payload = history[history["step"] > 0]["payload_bytes"]  # step 0 also agrees on a schedule
    assert (payload >= 4 * parameters).all()
    assert (payload < 4 * parameters + 64).all()  # gradients and the rank's weight in the mean
    assert recorded.metrics["payload_bytes_per_step"] == pytest.approx(payload.mean())


def test_the_metrics_have_the_agreed_keys(recorded: Run) -> None:
    metrics = json.loads((recorded.path / "metrics.json").read_text())
    assert {
        "schema",
        "test_loss",
        "test_accuracy",
        "samples_per_second",
        "step_ms",
        "first_step_ms",
        "train_seconds",
        "payload_bytes_per_step",
        "wire_bytes_per_step",
        "clock",
        "network",
        "oversubscribed",
        "workers",
        "threads",
        "equivalence",
        "epochs",
    } <= set(metrics)
    assert set(metrics["step_ms"]) == {"median", "p10", "p90"}
    assert set(metrics["equivalence"]) == {"verdict", "max_abs_difference", "tolerance", "reason"}
    assert metrics["equivalence"]["verdict"] == "passed"
    assert [epoch["step"] for epoch in metrics["epochs"]] == [4, 8]
    assert {"epoch", "step", "seconds", "loss", "accuracy", "val_loss", "val_accuracy"} == set(
        metrics["epochs"][0]
    )
    seconds = [epoch["seconds"] for epoch in metrics["epochs"]]
    own = recorded.history.query("rank == 0")["seconds"].sum()  # other ranks may have begun earlier
    assert 0 < seconds[0] < seconds[1] == pytest.approx(own)
    assert own <= metrics["train_seconds"] * (1 + 1e-9)


def test_the_record_names_no_place_or_person(recorded: Run) -> None:
    texts = [path for path in recorded.path.rglob("*") if path.suffix in (".json", ".log")]
    assert {path.name for path in texts} >= {"experiment.json", "environment.json", "rank1.log"}
    for path in texts:
        assert str(Path.home()) + "/" not in path.read_text()
        assert str(recorded.path.parent) not in path.read_text()


def test_the_saved_model_predicts_what_the_metrics_say(recorded: Run) -> None:
    import keras

    from labkit import datasets

    data = datasets.load("digits", rows=120, test_rows=41)
    model = recorded.model()
    loss, accuracy = model.evaluate(data.x_test, data.y_test, verbose=0)
    assert loss == pytest.approx(recorded.metrics["test_loss"], rel=1e-5)
    assert accuracy == pytest.approx(recorded.metrics["test_accuracy"], abs=1e-6)
    assert type(model.optimizer) is keras.optimizers.SGD


# --- how it trains -------------------------------------------------------------------------------


@pytest.mark.slow  # test_arrays_and_a_named_model already compares three ranks with one
def test_more_ranks_see_the_same_global_batches(cluster: Cluster) -> None:
    """Test that training on one rank and on three ranks ends with the same weights."""
    experiment = Experiment(**SHORT | {"precision": "float64", "epochs": 2})
    one = weights(cluster.run(experiment.replace(workers=1), show=False))
    three = weights(cluster.run(experiment.replace(workers=3), show=False))
    for ours, theirs in zip(one, three, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)


@pytest.mark.slow
def test_scattered_rows_train_like_their_own_global_batches(cluster: Cluster) -> None:
    fields = {"input_mode": "scatter", "verify": True, "batch_weights": (2, 1)}
    run = cluster.run(Experiment(**SHORT | fields), show=False)
    assert run.metrics["equivalence"]["verdict"] == "passed", run.metrics["equivalence"]
    assert run.history.groupby("rank")["samples"].sum().tolist() == [79, 41]


RATES = [("none", 0, 0.04), ("sqrt", 0, 0.04 * 2**0.5)]


@pytest.mark.parametrize(
    ("scaling", "warmup", "final"),
    [*(pytest.param(*each, marks=pytest.mark.slow) for each in RATES), ("linear", 1, 0.08)],
)
def test_the_rate_is_scaled_and_warmed_up_and_saved_as_a_number(
    cluster: Cluster, scaling: str, warmup: int, final: float
) -> None:
    def watch() -> list[Any]:
        import keras

        class Rates(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                print("rate", round(float(self.model.optimizer.learning_rate), 6))

        return [Rates()]

    run = cluster.run(
        Experiment(
            **SHORT
            | {
                "learning_rate": 0.04,
                "learning_rate_scaling": scaling,
                "warmup_epochs": warmup,
                "epochs": 2,
                "callbacks": watch,
            }
        ),
        show=False,
    )
    log = (run.path / "logs" / "rank1.log").read_text()
    rates = [float(line.split()[1]) for line in log.splitlines() if line.startswith("rate")]
    wanted = [final] * 8 if not warmup else [0.04, 0.05, 0.06, 0.07, *[0.08] * 4]
    np.testing.assert_allclose(rates, wanted, atol=1e-5)
    assert float(run.model().optimizer.learning_rate.numpy()) == pytest.approx(final)


def test_early_stopping_ends_all_ranks_after_the_same_epoch(cluster: Cluster) -> None:
    def stop() -> list[Any]:
        import keras

        return [keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=1e9, patience=1)]

    run = cluster.run(Experiment(**SHORT | {"epochs": 9, "callbacks": stop}), show=False)
    assert run.history.groupby("rank")["epoch"].max().tolist() == [1, 1]
    assert run.status["state"] == "completed"


def test_a_callback_that_stops_one_rank_within_an_epoch_stops_all(cluster: Cluster) -> None:
    def stop() -> list[Any]:
        import keras

        class OnOneRank(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                from mpi4py import MPI

                if MPI.COMM_WORLD.rank == 1 and self.model.optimizer.iterations == 1:
                    self.model.stop_training = True

        return [OnOneRank()]

    run = cluster.run(Experiment(**SHORT | {"epochs": 3, "callbacks": stop}), show=False)
    assert run.status["state"] == "completed"
    assert run.history.groupby("rank").size().tolist() == [3, 3]


def test_a_callback_stops_one_worker_at_once(cluster: Cluster) -> None:
    def stop() -> list[Any]:
        import keras

        class AtOnce(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.model.stop_training = True

        return [AtOnce()]

    alone = Experiment(**SHORT | {"workers": 1, "epochs": 3, "callbacks": stop})
    assert len(cluster.run(alone, show=False).history) == 1


@pytest.mark.slow
def test_repeats_are_seeds_with_medians_and_spread(cluster: Cluster) -> None:
    """Test that the same seed gives the same bits, and another seed different ones."""
    run = cluster.run(Experiment(**SHORT | {"repeats": 3, "seed": 5}), show=False)
    again = cluster.run(Experiment(**SHORT | {"seed": 6}), show=False)
    bits = [[w.tobytes() for w in weights(each)] for each in (*run.seeds, again)]
    assert [bit == bits[-1] for bit in bits] == [False, True, False, True]
    assert [seed.name for seed in run.seeds] == ["seed5", "seed6", "seed7"]
    losses = [seed.metrics["test_loss"] for seed in run.seeds]
    assert len(set(losses)) == 3
    assert run.metrics["test_loss"] == sorted(losses)[1]
    assert run.metrics["spread"]["test_loss"] == [min(losses), max(losses)]
    assert run.metrics["repeats"] == 3
    assert run.history.groupby("seed").size().to_dict() == {5: 8, 6: 8, 7: 8}
    with pytest.raises(InvalidInput, match="repeats=3"):
        cluster.submit(Experiment(**SHORT | {"repeats": 3}))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["lamb", "lars", "schedulefreeadamw"])
def test_optimizers_by_name(cluster: Cluster, optimizer: str) -> None:
    run = cluster.run(
        Experiment(**SHORT | {"optimizer": optimizer, "verify": True, "steps_per_epoch": 2}),
        show=False,
    )
    assert run.metrics["equivalence"]["verdict"] == "passed", run.metrics["equivalence"]
    assert type(run.model().optimizer).__name__.lower() == optimizer


@pytest.mark.battery(1, 2)
@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_precisions(cluster: Cluster, precision: str) -> None:
    run = cluster.run(Experiment(**SHORT | {"precision": precision}), show=False)
    assert np.isfinite(run.metrics["test_loss"])
    assert run.model().layers[-1].compute_dtype == precision.removeprefix("mixed_")


@pytest.mark.slow
def test_a_run_leaves_nothing_behind_for_the_next(cluster: Cluster) -> None:
    """Test that dtype policy, float type and graph are the experiment's, whatever ran before."""
    plain = Experiment(**SHORT)
    first = cluster.run(plain, show=False)
    cluster.run(plain.replace(precision="float64", optimizer="adam", seed=9), show=False)
    again = cluster.run(plain, show=False)
    assert (again.name, again.path.is_absolute()) == (f"{first.name}-2", True)
    assert [w.tobytes() for w in weights(first)] == [w.tobytes() for w in weights(again)]

    def policy(communicator: Any) -> list[str]:
        import keras

        return [keras.config.floatx(), keras.config.dtype_policy().name]

    cluster.run(plain.replace(precision="float64", steps_per_epoch=1), show=False)
    assert cluster.call(policy, ranks=2) == [["float32", "float32"]] * 2


@pytest.mark.battery(0, 1)
@pytest.mark.parametrize(
    "given", [{}, {"precision": "mixed_float16"}, {"strategy": DelayedGradients()}], ids=str
)
def test_what_a_run_has_traced_goes_when_the_run_is_over(
    cluster: Cluster, given: dict[str, Any]
) -> None:
    """Test for leaks: TensorFlow keeps custom gradients, and with each its graph and model."""

    def graphs(communicator: Any) -> int:
        import gc

        gc.collect()
        return sum(type(each).__name__ == "FuncGraph" for each in gc.get_objects())

    counted = []
    for _ in range(3):
        cluster.run(Experiment(**SHORT | {"steps_per_epoch": 2} | given), show=False)
        counted.append(cluster.call(graphs, ranks=2))
    assert all(later <= before for before, later in zip(counted[1], counted[2], strict=True))


def test_a_rank_whose_batches_are_empty_reports_no_loss(cluster: Cluster) -> None:
    run = cluster.run(
        Experiment(dataset=(X[:6], Y[:6]), model="linear", workers=4, batch_size=3, verify=False),
        show=False,
    )
    empty = run.history["samples"] == 0
    assert empty.any()
    assert run.history["loss"].isna().equals(empty)
    assert run.history.groupby("step")["samples"].sum().tolist() == [3, 3]


@pytest.mark.slow
def test_held_out_batches_smaller_than_the_ranks_count_right(cluster: Cluster) -> None:
    """Test held-out batches of 1,024 rows and of 1 row, which no rank may turn into NaN."""
    options = {"rows": 64, "test_rows": 1025}
    experiment = Experiment(
        model="linear", dataset="synthetic", dataset_options=options, batch_size=32, verify=False
    )
    one = cluster.run(experiment, show=False).metrics
    three = cluster.run(experiment.replace(workers=3), show=False).metrics
    assert three["test_loss"] == pytest.approx(one["test_loss"], rel=1e-5)
    assert three["test_accuracy"] == pytest.approx(one["test_accuracy"], rel=1e-6)


def test_collections_of_garbage_pass_over_modules_from_the_first_session_on(
    cluster: Cluster,
) -> None:
    def passed_over(communicator: Any) -> int:
        import gc

        from labkit.worker import rank_state

        gc.unfreeze()
        rank_state.leave_modules.cache_clear()
        rank_state.reset(Experiment(dataset="digits"))
        return gc.get_freeze_count()

    [objects] = cluster.call(passed_over, ranks=1)
    assert objects > 100_000


@pytest.mark.exhaustive
def test_what_engines_prepare_changes_no_draw_no_setting_and_no_run(cluster: Cluster) -> None:
    def prepared(communicator: Any) -> tuple[bool, bool]:
        import gc
        import random

        import keras
        import numpy as np

        from labkit.worker import rank_state
        from labkit.worker.work import prepare

        def state() -> str:
            settings = keras.config.floatx(), keras.config.dtype_policy().name
            return repr((random.getstate(), np.random.get_state(), settings))

        gc.unfreeze()
        rank_state.leave_modules.cache_clear()
        before = state()
        prepare()
        return state() == before, gc.get_freeze_count() > 100_000

    experiment = Experiment(model="linear", dataset="digits", epochs=1, verify=False, workers=2)
    before = cluster.run(experiment, show=False)
    assert cluster.call(prepared, ranks=2) == [(True, True)] * 2
    after = cluster.run(experiment, show=False)
    for column in ("loss", "samples"):  # a first run also times allreduce algorithms by messages
        assert list(after.history[column]) == list(before.history[column])
    assert after.metrics["test_loss"] == before.metrics["test_loss"]
