"""Test that labkit's Keras layer equals one process in float64, for every kind of model."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit import Cluster
from labkit.cluster import RankError
from labkit.communicator import launcher

TOLERANCE = 1e-12  # relative to a parameter's largest weight


# --- what runs on the ranks ----------------------------------------------------------------------


def fresh(precision: str = "float64", seed: int = 0) -> None:
    """Reset Keras's state that the previous test has left in this engine."""
    import keras

    keras.backend.clear_session()
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(precision)
    keras.utils.set_random_seed(seed)


def dense() -> Any:
    import keras

    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(7, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )


def rows(count: int, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    return random.standard_normal((count, 6)), random.integers(0, classes, count)


def optimizer_of(name: str, options: dict[str, Any]) -> Any:
    import keras

    return getattr(keras.optimizers, name)(**options)


def compile_with(model: Any, optimizer: Any, **options: Any) -> None:
    import keras

    given = {
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }
    model.compile(optimizer=optimizer, **(given | options))


def both(
    communicator: Any,
    make: Callable[[], Any],
    data: Any,
    optimizer: tuple[str, dict[str, Any]] = ("SGD", {"learning_rate": 0.1, "momentum": 0.9}),
    batch: int = 8,
    capacities: Any = None,
    fits: int = 1,
    validation: Any = None,
    **compiled: Any,
) -> dict[str, Any]:
    """Train on the ranks and on one process from the same weights, and return the differences."""
    import tensorflow as tf

    from labkit import keras as lkk

    def train(model: Any, batches: Any, held_out: Any, callbacks: list[Any]) -> list[Any]:
        histories = []
        for _ in range(fits):
            fitted = model.fit(
                batches, epochs=2, verbose=0, validation_data=held_out, callbacks=callbacks
            )
            histories.append(fitted.history)
        return histories

    fresh(seed=communicator.rank)  # weights differ until rank 0 broadcasts its own
    ours = make()
    start = communicator.broadcast_object(ours.get_weights())
    batches = tf.data.Dataset.from_tensor_slices(data).batch(batch)
    held_out = validation and tf.data.Dataset.from_tensor_slices(validation).batch(batch)
    compile_with(ours, lkk.DistributedOptimizer(optimizer_of(*optimizer), communicator), **compiled)
    histories = train(
        ours,
        lkk.shard(batches, communicator, capacities),
        held_out and lkk.shard(held_out, communicator),
        lkk.callbacks(communicator),
    )
    told = None
    if communicator.rank == 0:
        one = make()
        one.set_weights(start)
        compile_with(one, optimizer_of(*optimizer), **compiled)
        alone = train(one, batches, held_out, [])
        told = one.get_weights(), alone
    weights, alone = communicator.broadcast_object(told)
    pairs = list(zip(ours.get_weights(), weights, strict=True))
    return {
        "difference": [float(np.abs(a - b).max() / max(1e-3, np.abs(b).max())) for a, b in pairs],
        "moved": float(max(np.abs(b - s).max() for (_, b), s in zip(pairs, start, strict=True))),
        "weights": [a.tobytes() for a, _ in pairs],
        "histories": histories,
        "alone": alone,
    }


def same(results: list[dict[str, Any]], tolerance: float = TOLERANCE) -> None:
    """Check that all ranks equal one process, and that training changed the weights."""
    for result in results:
        assert max(result["difference"]) <= tolerance
        assert result["moved"] > 1e-3
        assert result["weights"] == results[0]["weights"]
        for ours, alone in zip(result["histories"], result["alone"], strict=True):
            assert set(ours) == set(alone)
            for name, values in alone.items():
                np.testing.assert_allclose(ours[name], values, rtol=1e-9, err_msg=name)


# --- equal to one process ------------------------------------------------------------------------


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True}),
        ("Adam", {"learning_rate": 0.01}),
        ("AdamW", {"learning_rate": 0.01, "weight_decay": 0.1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_training_equals_one_process(cluster: Cluster, name: str, options: dict[str, Any]) -> None:
    def work(communicator: Any) -> Any:
        return both(communicator, dense, rows(24), (name, options))

    same(cluster.call(work, ranks=2))


def test_unequal_parts_and_a_last_batch_smaller_than_the_ranks_equal_one_process(
    cluster: Cluster,
) -> None:
    def work(communicator: Any) -> Any:
        return both(communicator, dense, rows(18), batch=8)  # 8 + 8 + 2 on 3 ranks

    same(cluster.call(work, ranks=3))


@pytest.mark.slow
def test_capacities_divide_the_batch_and_equal_one_process(cluster: Cluster) -> None:
    def work(communicator: Any) -> Any:
        import tensorflow as tf

        from labkit import keras as lkk

        batches = tf.data.Dataset.from_tensor_slices(rows(17)).batch(8)
        parts = lkk.shard(batches, communicator, [3, 1])
        sizes = [len(x) for x, _ in parts]
        return sizes, both(communicator, dense, rows(17), capacities=[3, 1])

    results = cluster.call(work, ranks=2)
    assert [sizes for sizes, _ in results] == [[6, 6, 0], [2, 2, 1]]
    same([result for _, result in results])


@pytest.mark.battery(1, 2)
@pytest.mark.parametrize(
    "options",
    [
        {"clipnorm": 0.05},
        {"global_clipnorm": 0.05},
        {"clipvalue": 0.01},
        {"gradient_accumulation_steps": 2},
        {"use_ema": True, "ema_overwrite_frequency": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_the_optimizer_does_to_gradients_equals_one_process(
    cluster: Cluster, options: dict[str, Any]
) -> None:
    def work(communicator: Any) -> Any:
        return both(communicator, dense, rows(20), ("SGD", {"learning_rate": 0.5} | options))

    same(cluster.call(work, ranks=2))


def test_regularizers_count_once_however_unequal_the_parts(cluster: Cluster) -> None:
    def regular() -> Any:
        import keras

        l2 = keras.regularizers.L2(0.1)
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, kernel_regularizer=l2)])

    def work(communicator: Any) -> Any:
        return both(communicator, regular, rows(9), capacities=[5, 1])

    same(cluster.call(work, ranks=2))


def test_embeddings_equal_one_process(cluster: Cluster) -> None:
    def embedded() -> Any:
        import keras

        return keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                keras.layers.Embedding(11, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )

    def work(communicator: Any) -> Any:
        codes = np.random.default_rng(0).integers(0, 11, (22, 5)).astype(np.int32)
        return both(communicator, embedded, (codes, rows(22)[1]))

    same(cluster.call(work, ranks=2))


def test_sample_weights_equal_one_process(cluster: Cluster) -> None:
    def work(communicator: Any) -> Any:
        weights = np.linspace(0.1, 2, 21)
        return both(communicator, dense, (*rows(21), weights), weighted_metrics=["accuracy"])

    same(cluster.call(work, ranks=2))


@pytest.mark.slow
def test_several_inputs_and_outputs_by_name_equal_one_process(cluster: Cluster) -> None:
    def forked() -> Any:
        import keras

        a, b = keras.Input((6,), name="a"), keras.Input((2,), name="b")
        hidden = keras.layers.Dense(5, activation="tanh")(keras.layers.Concatenate()([a, b]))
        outputs = {
            "kind": keras.layers.Dense(3, name="kind")(hidden),
            "size": keras.layers.Dense(1, name="size")(hidden),
        }
        return keras.Model({"a": a, "b": b}, outputs)

    def work(communicator: Any) -> Any:
        import keras

        x, y = rows(16)  # Keras averages an output's own loss over batches of any size
        data = ({"a": x, "b": x[:, :2] ** 2}, {"kind": y, "size": x[:, :1]})
        return both(
            communicator,
            forked,
            data,
            loss={
                "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                "size": "mse",
            },
            loss_weights={"kind": 1.0, "size": 0.3},
            metrics={"kind": ["accuracy"], "size": ["mae"]},
            validation=data,
        )

    same(cluster.call(work, ranks=2))


def test_metrics_and_validation_are_those_of_the_global_data(cluster: Cluster) -> None:
    """Test AUC and accuracy over parts of unequal size, some empty: they are no means of means."""

    def work(communicator: Any) -> Any:
        import keras

        x, y = rows(17, classes=2)
        model = lambda: keras.Sequential(  # noqa: E731
            [keras.Input((6,)), keras.layers.Dense(1, activation="sigmoid")]
        )
        return both(
            communicator,
            model,
            (x, y),
            validation=(x[::-1], y),
            loss="binary_crossentropy",
            metrics=["AUC", "accuracy", "Precision", "FalseNegatives"],
        )

    results = cluster.call(work, ranks=3)
    same(results)
    assert {"val_AUC", "val_accuracy", "val_loss"} <= set(results[0]["histories"][0])
    assert np.isfinite(results[0]["histories"][0]["val_loss"]).all()


@pytest.mark.slow
def test_a_train_step_of_the_users_own_equals_one_process(cluster: Cluster) -> None:
    def own() -> Any:
        import keras
        import tensorflow as tf

        class Own(keras.Model):  # type: ignore[misc]
            def train_step(self, data: Any) -> Any:
                x, y = data
                with tf.GradientTape() as tape:
                    prediction = self(x, training=True)
                    loss = self.compute_loss(x, y, prediction) + 0.1 * tf.reduce_mean(prediction**2)
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply_gradients(
                    zip(gradients, self.trainable_variables, strict=True)
                )
                for metric in self.metrics:
                    if metric.name == "loss":
                        metric.update_state(loss, sample_weight=tf.shape(x)[0])
                    else:
                        metric.update_state(y, prediction)
                return {metric.name: metric.result() for metric in self.metrics}

        inputs = keras.Input((6,))
        return Own(inputs, keras.layers.Dense(3)(inputs))

    def work(communicator: Any) -> Any:
        return both(communicator, own, rows(10), batch=4, metrics=None)

    same(cluster.call(work, ranks=3))


@pytest.mark.battery(0, 1)
@pytest.mark.parametrize("compiled", [True, False])
def test_two_optimizers_of_one_train_step_equal_one_process(
    cluster: Cluster, compiled: bool
) -> None:
    """Test unequal parts: both optimizers weigh each rank by its rows, compiled or not."""

    def work(communicator: Any) -> dict[str, Any]:
        import keras
        import tensorflow as tf

        from labkit import keras as lkk

        class Two(keras.Model):  # type: ignore[misc]
            def train_step(self, data: Any) -> Any:
                x, y = data
                with tf.GradientTape(persistent=True) as tape:
                    loss = tf.reduce_mean(
                        (self(x, training=True) - tf.one_hot(y, 3, dtype=tf.float64)) ** 2
                    )
                first, last = (layer.trainable_variables for layer in self.layers[1:])
                self.slow.apply(tape.gradient(loss, first), first)
                self.fast.apply(tape.gradient(loss, last), last)
                return {"loss": loss}

        def made() -> Any:
            inputs = keras.Input((6,))
            hidden = keras.layers.Dense(5, activation="tanh")(inputs)
            return Two(inputs, keras.layers.Dense(3)(hidden))

        def train(model: Any, batches: Any, wrap: Any, callbacks: list[Any]) -> None:
            model.slow = wrap(keras.optimizers.SGD(0.1))
            model.fast = wrap(keras.optimizers.Adam(0.05))
            model.compile(**({"optimizer": model.fast} if compiled else {"loss": "mse"}))
            model.fit(batches, epochs=2, verbose=0, callbacks=callbacks)

        fresh(seed=communicator.rank)
        ours, one = made(), made()
        start = communicator.broadcast_object(ours.get_weights())
        one.set_weights(start)
        batches = tf.data.Dataset.from_tensor_slices(rows(10)).batch(4)
        train(
            ours,
            lkk.shard(batches, communicator),
            lambda plain: lkk.DistributedOptimizer(plain, communicator),
            lkk.callbacks(communicator),
        )
        train(one, batches, lambda plain: plain, [])
        pairs = list(zip(ours.get_weights(), one.get_weights(), strict=True))
        return {
            "difference": [float(np.abs(a - b).max()) for a, b in pairs],
            "moved": max(
                float(np.abs(b - s).max()) for (_, b), s in zip(pairs, start, strict=True)
            ),
        }

    for found in cluster.call(work, ranks=3):
        assert max(found["difference"]) <= TOLERANCE
        assert found["moved"] > 1e-3


@pytest.mark.slow
def test_a_second_fit_goes_on_where_the_first_ended(cluster: Cluster) -> None:
    def work(communicator: Any) -> Any:
        options = {"learning_rate": 0.01}
        return both(communicator, dense, rows(18), ("Adam", options), fits=2)

    results = cluster.call(work, ranks=2)
    same(results)
    assert len(results[0]["histories"]) == 2


@pytest.mark.slow
def test_an_optimizer_that_has_trained_goes_on_with_its_state(cluster: Cluster) -> None:
    def work(communicator: Any) -> float:
        import keras
        import tensorflow as tf

        from labkit import keras as lkk

        fresh()
        batches = tf.data.Dataset.from_tensor_slices(rows(16)).batch(8)
        ours, one = dense(), dense()
        one.set_weights(ours.get_weights())
        for model in (ours, one):
            compile_with(model, keras.optimizers.Adam(0.01))
            model.fit(batches, verbose=0)
        compile_with(ours, lkk.DistributedOptimizer(ours.optimizer, communicator))
        ours.fit(lkk.shard(batches, communicator), verbose=0, callbacks=lkk.callbacks(communicator))
        one.fit(batches, verbose=0)
        pairs = zip(ours.get_weights(), one.get_weights(), strict=True)
        return float(max(np.abs(a - b).max() for a, b in pairs))

    assert max(cluster.call(work, ranks=2)) <= TOLERANCE


# --- what must not break -------------------------------------------------------------------------


@pytest.mark.slow
def test_batch_normalisation_stays_finite_when_a_rank_has_no_rows(cluster: Cluster) -> None:
    def normalised() -> Any:
        import keras

        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(5),
                keras.layers.BatchNormalization(momentum=0.5),
                keras.layers.Dense(3),
            ]
        )

    def work(communicator: Any) -> Any:
        result = both(communicator, normalised, rows(9), batch=4, validation=rows(5))
        return [np.frombuffer(w).tolist() for w in result["weights"]], result["histories"][0]

    results = cluster.call(work, ranks=3)
    for weights, history in results:
        assert all(np.isfinite(w).all() for w in weights)
        assert all(np.isfinite(values).all() for values in history.values())
    # trained parameters are equal on all ranks, but moving statistics belong to each rank
    assert results[0][0][:4] == results[1][0][:4] == results[2][0][:4]


def test_dropout_draws_differently_on_each_rank(cluster: Cluster) -> None:
    def work(communicator: Any) -> list[float]:
        import keras
        import tensorflow as tf

        from labkit import keras as lkk

        fresh(seed=3)  # the same seed on all ranks, as in an experiment
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5)])
        model.add(keras.layers.Dense(1))
        compile_with(model, lkk.DistributedOptimizer("sgd", communicator), loss="mse", metrics=None)
        batches = tf.data.Dataset.from_tensor_slices((np.ones((4, 64)), np.ones((4, 1)))).batch(4)
        model.fit(
            lkk.shard(batches, communicator), verbose=0, callbacks=lkk.callbacks(communicator)
        )
        masks = model.layers[0](np.ones((1, 64)), training=True).numpy()[0]
        return [float(m) for m in masks]

    first, second = cluster.call(work, ranks=2)
    assert first != second


def test_train_on_batch_takes_the_steps_of_one_process_even_if_xla_was_asked_for(
    cluster: Cluster,
) -> None:
    def work(communicator: Any) -> float:
        import keras

        from labkit import keras as lkk

        weights = []
        for ranks in (False, True):
            fresh()
            model = dense()
            optimizer: Any = keras.optimizers.SGD(0.1)
            if ranks:
                optimizer = lkk.DistributedOptimizer(optimizer, communicator)
            compile_with(model, optimizer, jit_compile=ranks)
            if ranks:
                lkk.attach(model)
            x, y = rows(18)
            for start in (0, 9):  # of each 9 rows, the ranks have 5 and 4
                part = slice(start, start + 9)
                if ranks:
                    cuts = (start, start + 5, start + 9)
                    part = slice(cuts[communicator.rank], cuts[communicator.rank + 1])
                model.train_on_batch(x[part], y[part])
            weights.append(model.get_weights())
        pairs = zip(*weights, strict=True)
        return max(float(np.abs(one - two).max() / np.abs(one).max()) for one, two in pairs)

    assert max(cluster.call(work, ranks=2)) <= TOLERANCE


def test_an_overflow_on_one_rank_alone_is_skipped_by_all_and_training_goes_on(
    cluster: Cluster,
) -> None:
    def work(communicator: Any) -> dict[str, Any]:
        import keras
        import tensorflow as tf

        from labkit import keras as lkk

        fresh("mixed_float16", seed=communicator.rank)
        model = dense()
        scaled = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=2.0**10
        )
        compile_with(model, lkk.DistributedOptimizer(scaled, communicator))
        x, y = rows(24)
        x[9] = 1e6  # too large for float16; rank 0 has rows 8 to 11, in the second of three batches
        seen: list[Any] = []

        class Watch(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                optimizer = self.model.optimizer
                weights = b"".join(w.tobytes() for w in self.model.get_weights())
                seen.append((float(optimizer.dynamic_scale.numpy()), weights))

        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        model.fit(
            lkk.shard(batches, communicator),
            verbose=0,
            callbacks=[*lkk.callbacks(communicator), Watch()],
        )
        finite = all(np.isfinite(w).all() for w in model.get_weights())
        return {"seen": seen, "finite": finite}

    first, second = cluster.call(work, ranks=2)
    assert first == second
    assert first["finite"]
    scales = [scale for scale, _ in first["seen"]]
    weights = [weight for _, weight in first["seen"]]
    assert scales == [2.0**10, 2.0**9, 2.0**9]
    assert weights[0] == weights[1] != weights[2]


def test_a_name_under_mixed_float16_is_scaled_inside_and_not_wrapped_by_compile(
    cluster: Cluster,
) -> None:
    def work(communicator: Any) -> list[bool]:
        import keras

        from labkit import keras as lkk

        fresh("mixed_float16")
        model = dense()
        optimizer = lkk.DistributedOptimizer("adam", communicator)
        compile_with(model, optimizer)
        scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        return [model.optimizer is optimizer, scaled]

    assert cluster.call(work, ranks=2) == [[True, True]] * 2


def test_an_optimizer_that_does_not_exchange_is_refused(cluster: Cluster) -> None:
    def plain(communicator: Any) -> None:
        from labkit import keras as lkk

        fresh()
        model = dense()
        compile_with(model, "sgd")
        model.fit(*rows(8), verbose=0, callbacks=lkk.callbacks(communicator))

    def wrapped(communicator: Any) -> None:
        import keras

        from labkit import keras as lkk

        fresh()
        optimizer = lkk.DistributedOptimizer("sgd", communicator)
        keras.config.set_dtype_policy("mixed_float16")  # compile() then wraps the optimizer
        model = dense()
        compile_with(model, optimizer)
        model.fit(*rows(8), verbose=0, callbacks=lkk.callbacks(communicator))

    for function in (plain, wrapped):
        with pytest.raises(RankError, match=r"exchanges no gradients.*DistributedOptimizer"):
            cluster.call(function, ranks=2)


def test_a_compressor_with_a_momentum_of_its_own_refuses_the_optimizer_s(cluster: Cluster) -> None:
    def work(communicator: Any) -> str:
        import keras

        from labkit import keras as lkk
        from labkit.common.errors import InvalidInput

        lkk.DistributedOptimizer(keras.optimizers.SGD(0.1), communicator, compressor="DGC")
        twice = keras.optimizers.SGD(0.1, momentum=0.9)
        try:
            lkk.DistributedOptimizer(twice, communicator, compressor="DGC")
        except InvalidInput as error:
            return str(error)
        return "accepted"

    assert "momentum=0.9 would apply twice" in cluster.call(work, ranks=1)[0]


def test_early_stopping_on_a_rank_s_own_numbers_stops_all_ranks_together(cluster: Cluster) -> None:
    """Test a train_step that returns only a local loss: all ranks must stop together."""

    def work(communicator: Any) -> list[Any]:
        import keras
        import tensorflow as tf

        from labkit import keras as lkk

        class Own(keras.Model):  # type: ignore[misc]
            def train_step(self, data: Any) -> Any:
                super().train_step(data)
                self.epochs.assign_add(1.0)
                # the value improves on rank 0 and worsens on rank 1, so the mean worsens
                worse = -1.0 if communicator.rank == 0 else 3.0
                return {"own": self.epochs * worse}

        fresh()
        inputs = keras.Input((6,))
        model = Own(inputs, keras.layers.Dense(3)(inputs))
        model.epochs = tf.Variable(0.0, trainable=False)
        compile_with(model, lkk.DistributedOptimizer("sgd", communicator))
        stop = keras.callbacks.EarlyStopping(monitor="own", mode="min", patience=1)
        batches = tf.data.Dataset.from_tensor_slices(rows(8)).batch(8)
        history = model.fit(
            lkk.shard(batches, communicator),
            epochs=6,
            verbose=0,
            callbacks=[*lkk.callbacks(communicator), stop],
        ).history
        return [len(history["own"]), history["own"]]

    results = cluster.call(work, ranks=2)
    assert results == [[2, [1.0, 2.0]]] * 2


def test_after_a_fit_that_failed_metrics_are_right_again(cluster: Cluster) -> None:
    def work(communicator: Any) -> list[float]:
        import keras
        import tensorflow as tf

        from labkit import keras as lkk

        class Fail(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                raise RuntimeError("as planned")

        fresh()
        always = keras.layers.Dense(1, kernel_initializer="zeros", bias_initializer="ones")
        model = keras.Sequential([keras.Input((6,)), always])
        model.compile(
            optimizer=lkk.DistributedOptimizer(keras.optimizers.SGD(0.0), communicator),
            loss="mse",
            metrics=[keras.metrics.FalsePositives(name="false")],
        )
        x, _ = rows(12)
        batches = tf.data.Dataset.from_tensor_slices((x, np.zeros((12, 1)))).batch(4)
        parts, callbacks = lkk.shard(batches, communicator), lkk.callbacks(communicator)
        with contextlib.suppress(RuntimeError):
            model.fit(parts, verbose=0, callbacks=[*callbacks, Fail()])
        history = model.fit(parts, verbose=0, callbacks=lkk.callbacks(communicator)).history
        count: list[float] = history["false"]
        return count

    assert cluster.call(work, ranks=2) == [[12.0]] * 2  # each row counts once


def test_after_training_one_rank_alone_may_evaluate(cluster: Cluster) -> None:
    def work(communicator: Any) -> float:
        import tensorflow as tf

        from labkit import keras as lkk

        fresh()
        model = dense()
        compile_with(model, lkk.DistributedOptimizer("sgd", communicator))
        batches = tf.data.Dataset.from_tensor_slices(rows(8)).batch(4)
        model.fit(
            lkk.shard(batches, communicator), verbose=0, callbacks=lkk.callbacks(communicator)
        )
        return model.evaluate(*rows(6), verbose=0)[0] if communicator.rank == 0 else 0.0

    assert cluster.call(work, ranks=2)[0] > 0


# --- shard, evaluate, predict, save --------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_shards_of_all_ranks_are_the_global_batches(cluster: Cluster, ranks: int) -> None:
    def work(communicator: Any) -> list[list[int]]:
        import tensorflow as tf

        from labkit import keras as lkk

        x = np.arange(11)
        batches = tf.data.Dataset.from_tensor_slices({"a": x, "b": 2 * x}).batch(4)
        parts = list(lkk.shard(batches, communicator))
        assert all((part["b"].numpy() == 2 * part["a"].numpy()).all() for part in parts)
        return [part["a"].numpy().tolist() for part in parts]

    results = cluster.call(work, ranks=ranks)
    steps = [np.concatenate(parts).tolist() for parts in zip(*results, strict=True)]
    assert steps == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


@pytest.mark.parametrize("capacities", [[1.0], [1.0, 0.0], [1.0, -1.0]])
def test_impossible_capacities_are_refused(cluster: Cluster, capacities: list[float]) -> None:
    def work(communicator: Any) -> None:
        import tensorflow as tf

        from labkit import keras as lkk

        lkk.shard(tf.data.Dataset.range(4).batch(2), communicator, capacities)

    with pytest.raises(RankError, match="give 2 numbers above 0, one per rank"):
        cluster.call(work, ranks=2)


def test_evaluate_is_over_the_data_of_all_ranks(cluster: Cluster) -> None:
    def work(communicator: Any) -> list[Any]:
        import tensorflow as tf

        from labkit import keras as lkk

        fresh()
        model = dense()
        compile_with(model, "sgd")
        x, y = rows(13)
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)  # the last batch has one row
        sharded = lkk.evaluate(model, lkk.shard(batches, communicator), communicator)
        cuts = [(x[:9], y[:9]), (x[9:], y[9:]), None][communicator.rank]
        unequal = lkk.evaluate(model, cuts, communicator)
        alone = model.evaluate(x, y, verbose=0, return_dict=True)
        return [sharded, unequal, alone]

    for sharded, unequal, alone in cluster.call(work, ranks=3):
        assert sharded == pytest.approx(alone, rel=1e-9)
        assert unequal == pytest.approx(alone, rel=1e-9)


def test_a_rank_without_data_may_evaluate_with_a_model_that_never_saw_any(
    cluster: Cluster,
) -> None:
    def work(communicator: Any) -> Any:
        from labkit import keras as lkk

        fresh()
        model = dense()
        compile_with(model, "sgd")
        return lkk.evaluate(model, rows(5) if communicator.rank == 1 else None, communicator)

    results = cluster.call(work, ranks=2)
    assert results[0] == results[1]
    assert set(results[0]) == {"loss", "accuracy"}


@pytest.mark.parametrize("count", [1, 2, 10])
def test_predictions_are_gathered_in_order_on_all_ranks(cluster: Cluster, count: int) -> None:
    def work(communicator: Any) -> Any:
        import keras

        from labkit import keras as lkk

        fresh(seed=1)
        inputs = {"a": keras.Input((6,), name="a")}
        hidden = keras.layers.Dense(2)(inputs["a"])
        model = keras.Model(inputs, {"h": hidden, "s": keras.layers.Dense(1)(hidden)})
        x = {"a": rows(count)[0]}
        return lkk.predict(model, x, communicator), model.predict(x, verbose=0)

    for ours, alone in cluster.call(work, ranks=4):
        for name in ("h", "s"):
            np.testing.assert_allclose(ours[name], alone[name], rtol=1e-12)


@pytest.mark.slow
def test_a_saved_model_opens_without_labkit_and_trains_on(cluster: Cluster, tmp_path: Path) -> None:
    def work(communicator: Any) -> Any:
        import keras
        import tensorflow as tf

        from labkit import keras as lkk

        fresh("float32")
        model = dense()
        optimizer = lkk.DistributedOptimizer(keras.optimizers.Adam(0.02), communicator)
        compile_with(model, optimizer)
        batches = tf.data.Dataset.from_tensor_slices(rows(16)).batch(8)
        model.fit(
            lkk.shard(batches, communicator), verbose=0, callbacks=lkk.callbacks(communicator)
        )
        if communicator.rank == 0:
            model.save("model.keras")
        return model.predict(rows(4)[0], verbose=0)

    predicted = cluster.call(work, ranks=2)[0]
    script = """
import sys, keras, numpy as np
model = keras.models.load_model("model.keras")
random = np.random.default_rng(5)
x, y = random.standard_normal((4, 6)), random.integers(0, 3, 4)
np.save("predicted.npy", model.predict(x, verbose=0))
print(type(model.optimizer).__module__, type(model.optimizer) is keras.optimizers.Adam)
print(int(model.optimizer.iterations.numpy()), float(model.optimizer.learning_rate.numpy()))
model.fit(x, y, verbose=0)
print([name for name in sys.modules if name.startswith("labkit")])
"""
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240
    )
    assert found.returncode == 0, found.stderr[-2000:]
    first, second, third = found.stdout.splitlines()[-3:]
    assert first.endswith("True")
    assert second.startswith("2 0.0199")
    assert third == "[]"
    np.testing.assert_allclose(np.load(tmp_path / "predicted.npy"), predicted, rtol=1e-5)


TRAIN = """
import keras
import numpy as np
import tensorflow as tf
from labkit import keras as lkk

communicator = lkk.init()
random = np.random.default_rng(0)
x = random.standard_normal((203, 8)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(203, seed=1).batch(32)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
model.compile(
    optimizer=lkk.DistributedOptimizer(keras.optimizers.SGD(0.5), communicator),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(
    lkk.shard(dataset, communicator),
    epochs=3,
    verbose=0,
    callbacks=lkk.callbacks(communicator),
)
total = float(sum(np.abs(w).sum() for w in model.get_weights()))
print(communicator.rank, communicator.size, f"{total:.9f}", history.history["accuracy"])
"""


@pytest.mark.slow
def test_a_script_of_the_users_own_trains_under_mpiexec(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    environment = os.environ | launcher.environment()
    environment = {name: v for name, v in environment.items() if name not in launcher.QUIET}
    found = subprocess.run(
        [*launcher.mpiexec(2), sys.executable, "train.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert "OSC UCX" not in found.stderr
    first, second = sorted(found.stdout.splitlines())
    assert first.split()[:2] == ["0", "2"]
    assert second.split()[:2] == ["1", "2"]
    assert first.split()[2:] == second.split()[2:]
    accuracies = [float(word.strip("[],")) for word in first.split()[3:]]
    assert accuracies[-1] > 0.9


def test_a_schedule_of_the_users_own_needs_no_registration(cluster: Cluster) -> None:
    def work(communicator: Any) -> Any:
        import keras

        class Halving(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
            def __call__(self, step: Any) -> Any:
                return 0.1 / (1.0 + keras.ops.cast(step, "float64"))

            def get_config(self) -> dict[str, Any]:
                return {}

        return both(communicator, dense, rows(16), ("SGD", {"learning_rate": Halving()}))

    same(cluster.call(work, ranks=2))


def test_ranks_with_other_variables_are_told_so(cluster: Cluster) -> None:
    def work(communicator: Any) -> None:
        import keras

        from labkit import keras as lkk

        fresh("float64" if communicator.rank else "float32")
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        compile_with(model, lkk.DistributedOptimizer("sgd", communicator))
        model.fit(*rows(8), verbose=0, callbacks=lkk.callbacks(communicator))

    with pytest.raises(RankError, match=r"different variables.*float32.*float64.*same model"):
        cluster.call(work, ranks=2)


def test_ranks_that_have_made_more_layers_before_train_together(cluster: Cluster) -> None:
    """Test ranks on which Keras gives the variables different names."""

    def work(communicator: Any) -> Any:
        import tensorflow as tf

        from labkit import keras as lkk

        fresh()
        for _ in range(communicator.rank):
            dense()
        model = dense()
        compile_with(model, lkk.DistributedOptimizer("sgd", communicator))
        batches = tf.data.Dataset.from_tensor_slices(rows(8)).batch(4)
        callbacks = lkk.callbacks(communicator)
        model.fit(lkk.shard(batches, communicator), verbose=0, callbacks=callbacks)
        return [w.tobytes() for w in model.get_weights()]

    first, second = cluster.call(work, ranks=2)
    assert first == second
