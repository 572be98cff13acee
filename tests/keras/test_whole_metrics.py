"""Test that every metric over unequal parts equals that of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from labkit import Cluster

ROWS, BATCH = 25, 8  # the last batch has one row, so a rank has none of it
TOLERANCE = 1e-5  # of float32


def data(kind: str = "classes", rows: int = ROWS) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(3)
    x = random.standard_normal((rows, 6)).astype("float32")
    y = random.integers(0, 4, rows)
    weight = random.uniform(0.1, 3, rows).astype("float32")
    return x, (np.eye(4, dtype="float32")[y] if kind == "one-hot" else y), weight


def mlp() -> Any:
    import keras

    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(4)]
    )


def own_metrics() -> list[Any]:  # noqa: C901 - a table
    """Return user-defined metrics that are no sums, or do not look like sums."""
    import keras
    import tensorflow as tf

    class State(keras.metrics.Metric):
        def __init__(self, name: str, start: float = 0.0) -> None:
            super().__init__(name=name)
            self.start = start
            self.state = self.add_weight(
                name="state", initializer=keras.initializers.Constant(start)
            )

        def reset_state(self) -> None:
            self.state.assign(self.start)

        def result(self) -> Any:
            return tf.identity(self.state)

    class Folded(State):
        def __init__(self, name: str, fold: Callable[..., Any], start: float = 0.0) -> None:
            super().__init__(name, start)
            self.fold = fold

        def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
            weight = 1.0 if sample_weight is None else tf.reshape(sample_weight, (-1, 1))
            self.state.assign(self.fold(self.state, p * weight))

    class Correlation(keras.metrics.Metric):
        """A streaming correlation that merges each batch's moments into the earlier ones."""

        def __init__(self) -> None:
            super().__init__(name="correlation")
            self.moments = self.add_weight(name="moments", shape=(6,), initializer="zeros")

        def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
            x, y = p[:, 0], tf.cast(y, p.dtype)
            n, *means, xx, yy, xy = tf.unstack(self.moments)
            new, own = tf.cast(tf.size(x), p.dtype), [tf.reduce_mean(x), tf.reduce_mean(y)]
            dx, dy = own[0] - means[0], own[1] - means[1]
            share = n * new / (n + new)
            xx += tf.reduce_sum((x - own[0]) ** 2) + dx * dx * share
            yy += tf.reduce_sum((y - own[1]) ** 2) + dy * dy * share
            xy += tf.reduce_sum((x - own[0]) * (y - own[1])) + dx * dy * share
            to = new / (n + new)
            self.moments.assign(
                tf.stack([n + new, means[0] + dx * to, means[1] + dy * to, xx, yy, xy])
            )

        def result(self) -> Any:
            _, _, _, xx, yy, xy = tf.unstack(self.moments)
            return xy / tf.sqrt(xx * yy + 1e-9)

    class OwnF1(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="own_f1")
            self.parts = [keras.metrics.Precision(), keras.metrics.Recall()]

        def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
            of, is_one = tf.equal(y, 1), tf.equal(tf.argmax(p, -1), 1)
            for part in self.parts:
                part.update_state(tf.cast(of, tf.float32), tf.cast(is_one, tf.float32))

        def reset_state(self) -> None:
            for part in self.parts:
                part.reset_state()

        def result(self) -> Any:
            return tf.add_n([part.result() for part in self.parts])

    class MadeLate(keras.metrics.Metric):
        state = None

        def __init__(self) -> None:
            super().__init__(name="made_late")

        def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
            if self.state is None:
                self.state = self.add_weight(name="state", shape=(4,), initializer="zeros")
            self.state.assign(tf.maximum(self.state, tf.reduce_max(p, 0)))

        def result(self) -> Any:
            return tf.reduce_sum(self.state)

        def reset_state(self) -> None:
            if self.state is not None:
                self.state.assign(tf.zeros(4))

    def by_row(y: Any, p: Any) -> Any:
        return tf.abs(p[:, 0])

    def of_batch(y: Any, p: Any) -> Any:
        return tf.reduce_max(p) - tf.reduce_mean(p)

    def against_batch(y: Any, p: Any) -> Any:
        return tf.abs(p[:, 0] - tf.reduce_mean(p[:, 0]))

    return [
        Folded("maximum", lambda v, p: tf.maximum(v, tf.reduce_max(p))),
        Folded("minimum", lambda v, p: tf.minimum(v, tf.reduce_min(p))),
        Folded("last", lambda v, p: p[-1, 0]),
        Folded("batches", lambda v, p: v + 1.0),
        Folded("product", lambda v, p: v * tf.reduce_prod(1 + p[:, 0] / 50), 1.0),
        Folded("smooth", lambda v, p: 0.9 * v + 0.1 * tf.reduce_mean(p)),
        *(Correlation(), OwnF1(), MadeLate(), by_row, of_batch, against_batch),
    ]


def kerass_metrics() -> list[Any]:
    """Return Keras's own metrics for one-hot targets."""
    import keras

    known = keras.metrics
    return [
        *(known.AUC(from_logits=True), known.F1Score("macro"), known.PrecisionAtRecall(0.4)),
        *(known.Precision(top_k=2), known.Recall(0.3), known.OneHotMeanIoU(4), known.R2Score()),
        *(known.CosineSimilarity(), known.RootMeanSquaredError(), known.TruePositives(0.3)),
        *("accuracy", known.SensitivityAtSpecificity(0.5), known.TopKCategoricalAccuracy(2)),
        *(keras.losses.dice, keras.losses.MeanSquaredError(name="loss_object")),
    ]


def no_metrics() -> None:
    return None


def seen(
    communicator: Any,
    kind: str,
    metrics: Callable[[], Any],
    weighted: Callable[[], Any] = no_metrics,
    **compiled: Any,
) -> Any:
    """Return what fit, validation and both evaluations report on the ranks and in one process."""
    import keras
    import tensorflow as tf

    from labkit import keras as lkk
    from labkit.worker.rank_state import restore

    restore()
    columns = data(kind) if weighted is not no_metrics else data(kind)[:2]
    whole = tf.data.Dataset.from_tensor_slices(columns)
    # For data that is not cut from common batches, rank 0 has 7 rows and the last rank has the
    # rest.
    first, last = whole.take(7).batch(4), whole.skip(7).batch(4)

    def compile_model(distributed: bool) -> Any:
        keras.backend.clear_session()  # Keras then numbers the names of metrics from the start
        keras.utils.set_random_seed(1)
        model, optimizer = mlp(), keras.optimizers.SGD(0.05)
        if distributed:
            optimizer = lkk.DistributedOptimizer(optimizer, communicator)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            optimizer=optimizer,
            loss="mse" if kind == "one-hot" else loss,
            metrics=metrics(),
            weighted_metrics=weighted(),
            **compiled,
        )
        return model

    ours, parts = compile_model(True), lkk.shard(whole.batch(BATCH), communicator)
    held_out = lkk.shard(whole.batch(7), communicator)
    callbacks = lkk.callbacks(communicator)
    fitted = ours.fit(parts, validation_data=held_out, epochs=2, verbose=0, callbacks=callbacks)
    own = {0: first, communicator.size - 1: last}.get(communicator.rank)
    found = [
        fitted.history,
        lkk.evaluate(ours, held_out, communicator, sharded=True),
        lkk.evaluate(ours, own, communicator),
    ]
    if communicator.rank:
        return found, None
    one = compile_model(False)
    alone = one.fit(whole.batch(BATCH), validation_data=whole.batch(7), epochs=2, verbose=0)
    return found, [
        alone.history,
        one.evaluate(whole.batch(7), verbose=0, return_dict=True),
        one.evaluate(first.concatenate(last), verbose=0, return_dict=True),
    ]


def same(results: list[Any], count: int) -> None:
    """Check that all ranks report the same as one process."""
    alone = results[0][1]
    assert len(alone[1]) == count + 1  # the loss
    for found, _ in results:
        for reported, expected in zip(found, alone, strict=True):
            assert reported.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(reported[name], value, TOLERANCE, 1e-6, err_msg=name)


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_metrics_of_the_users_own(cluster: Cluster, ranks: int) -> None:
    same(cluster.call(seen, "classes", own_metrics, ranks=ranks), len(own_metrics()))


@pytest.mark.slow
def test_metrics_of_keras(cluster: Cluster) -> None:
    same(cluster.call(seen, "one-hot", kerass_metrics, ranks=2), len(kerass_metrics()))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"steps_per_execution": 2}])
def test_metrics_with_weights(cluster: Cluster, options: dict[str, Any]) -> None:
    """Leave out metric functions: Keras applies no sample weights to one number per batch."""

    def work(communicator: Any) -> Any:
        return seen(communicator, "classes", no_metrics, lambda: own_metrics()[:9], **options)

    same(cluster.call(work, ranks=2), 9)


def test_a_metric_may_return_its_variable(cluster: Cluster) -> None:
    def work(communicator: Any) -> list[float]:
        import keras
        import tensorflow as tf

        from labkit import keras as lkk
        from labkit.worker.rank_state import restore

        class Total(keras.metrics.Metric):
            def __init__(self) -> None:
                super().__init__(name="total")
                self.state = self.add_weight(name="state", initializer="zeros")

            def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
                self.state.assign_add(tf.reduce_sum(tf.cast(y, self.state.dtype)))

            def result(self) -> Any:
                return self.state

        restore()
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        optimizer = lkk.DistributedOptimizer(keras.optimizers.SGD(0.0), communicator)
        model.compile(optimizer, "mse", metrics=[Total()])
        y = np.arange(10.0)[:, None]
        rows = lkk.shard(tf.data.Dataset.from_tensor_slices((y, y)).batch(4), communicator)
        fitted = model.fit(rows, epochs=2, verbose=0, callbacks=lkk.callbacks(communicator))
        return [float(value) for value in fitted.history["total"]]

    assert cluster.call(work, ranks=2) == [[45.0, 45.0]] * 2
