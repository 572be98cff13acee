"""Test models with weights in sub-models or created by the first batch against one process."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from labkit import Cluster

TOLERANCE = 1e-5  # of float32


def vae(logs: bool = False) -> Any:
    """Return a VAE with weights in two sub-models, no `call`, and noise made from the inputs."""
    import keras
    import tensorflow as tf

    class VAE(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            dense = keras.layers.Dense
            self.encoder = keras.Sequential([keras.Input((6,)), dense(5, "tanh"), dense(4)])
            self.decoder = keras.Sequential([keras.Input((2,)), dense(5, "tanh"), dense(6)])
            self.total = keras.metrics.Mean(name="loss")

        @property
        def metrics(self) -> list[Any]:
            return [self.total]

        def train_step(self, data: Any) -> Any:
            x, _ = data
            with tf.GradientTape() as tape:
                mean, spread = tf.split(self.encoder(x), 2, -1)
                z = mean + tf.exp(spread / 2) * tf.sin(17 * x[:, :2])
                apart = tf.reduce_mean(tf.reduce_sum((x - self.decoder(z)) ** 2, -1))
                prior = tf.exp(spread) + mean**2 - spread - 1
                loss = apart + tf.reduce_mean(tf.reduce_sum(prior, -1)) / 2
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
            self.total.update_state(loss)
            return {"vae": self.total.result(), "now": apart} if logs else {"loss": loss}

    return VAE()


def cgan() -> Any:
    """Return a GAN of two sub-models, each with its own optimizer."""
    import keras
    import tensorflow as tf

    class GAN(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            dense = keras.layers.Dense
            self.judge = keras.Sequential([keras.Input((10,)), dense(5, "tanh"), dense(1)])
            self.maker = keras.Sequential([dense(5, "tanh"), dense(6)])
            self.means = [keras.metrics.Mean(name=name) for name in ("judge", "maker")]

        @property
        def metrics(self) -> list[Any]:
            return self.means

        def compile(self, first: Any, second: Any, loss: Any) -> None:
            super().compile()
            self.first, self.second, self.loss_function = first, second, loss

        def train_step(self, data: Any) -> Any:
            x, y = data
            kind, ones = tf.one_hot(y, 4), tf.ones((tf.shape(x)[0], 1))
            noise = tf.concat([tf.cos(9 * x[:, :2]), kind], -1)
            both = [tf.concat([each, kind], -1) for each in (self.maker(noise), x)]
            with tf.GradientTape() as tape:
                labels = tf.concat([ones, ones * 0], 0)
                judged = self.loss_function(labels, self.judge(tf.concat(both, 0)))
            weights = self.judge.trainable_weights
            self.first.apply_gradients(zip(tape.gradient(judged, weights), weights, strict=True))
            with tf.GradientTape() as tape:
                made = self.judge(tf.concat([self.maker(noise), kind], -1))
                fooled = self.loss_function(ones * 0, made)
            weights = self.maker.trainable_weights
            self.second.apply_gradients(zip(tape.gradient(fooled, weights), weights, strict=True))
            for mean, value in zip(self.means, (judged, fooled), strict=True):
                mean.update_state(value)
            return {mean.name: mean.result() for mean in self.means}

    return GAN()


def distiller() -> Any:
    """Return a model with its own loss over two sub-models; the first batch builds one of them."""
    import keras

    class Distiller(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
            self.student = keras.Sequential([keras.layers.Dense(5, "tanh"), keras.layers.Dense(4)])
            self.teacher.trainable = False

        def call(self, x: Any) -> Any:
            return self.student(x)

        def compute_loss(self, x: Any, y: Any, y_pred: Any, *given: Any, **named: Any) -> Any:
            softly = keras.losses.KLDivergence()
            taught = keras.ops.softmax(self.teacher(x) / 3), keras.ops.softmax(y_pred / 3)
            return super().compute_loss(x, y, y_pred, *given, **named) + softly(*taught)

    return Distiller()


def nested() -> Any:
    """Return a model whose layers make sub-layers in `build`, with synchronized normalization."""
    import keras

    class Block(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            normalize = keras.layers.BatchNormalization(synchronized=True)
            self.inner = keras.Sequential([keras.layers.Dense(5, "tanh"), normalize])
            self.inner.build(shape)
            self.scale = self.add_weight(shape=(5,), initializer="glorot_uniform")

        def call(self, x: Any, training: Any = None) -> Any:
            return self.inner(x, training=training) * self.scale

    class Nested(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.last = [Block(), Block()], keras.layers.Dense(4)

        def call(self, x: Any, training: Any = None) -> Any:
            for block in self.blocks:
                x = block(x, training=training)
            return self.last(x)

    return Nested()


def own_weights() -> Any:
    """Return a model that creates its own weights in `build`."""
    import keras

    class Own(keras.Model):
        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(shape[-1], 4), initializer="glorot_uniform")

        def call(self, x: Any) -> Any:
            return x @ self.kernel

    return Own()


def lazy() -> Any:
    import keras

    normalize = keras.layers.BatchNormalization(synchronized=True)
    return keras.Sequential([keras.layers.Dense(5, "tanh"), normalize, keras.layers.Dense(4)])


def functional() -> Any:
    import keras

    inputs = keras.Input((6,))
    inner = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh")])
    return keras.Model(inputs, keras.layers.Dense(4)(inner(inputs)))


MODELS = {
    "vae": vae,
    "vae-with-other-logs": lambda: vae(logs=True),
    "conditional-gan": cgan,
    "distiller": distiller,
    "nested": nested,
    "own-weights": own_weights,
    "lazily-built": lazy,
    "with-sub-model": functional,
}


def trained(communicator: Any, make: Callable[[], Any]) -> dict[str, Any]:
    """Return weights and history of the ranks and of one process, and what the ranks printed."""
    import keras
    import tensorflow as tf

    from labkit import keras as lkk
    from labkit.worker.rank_state import restore

    random = np.random.default_rng(3)
    rows = random.standard_normal((17, 6)).astype("float32"), random.integers(0, 4, 17)
    batches = tf.data.Dataset.from_tensor_slices(rows).batch(8)  # the last batch has one row

    def fit(data: Any, callbacks: Any, optimizer: Callable[[], Any]) -> Any:
        model = make()
        cross = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if make is cgan:
            binary = keras.losses.BinaryCrossentropy(from_logits=True)
            model.compile(optimizer(), optimizer(), binary)
        else:
            model.compile(optimizer(), cross)
        history = model.fit(data, epochs=2, verbose=0, callbacks=callbacks).history
        weights = [w.numpy() for w in model.weights if "seed" not in w.path]
        return weights, {name: np.array(values) for name, values in history.items()}

    restore()
    keras.utils.set_random_seed(1 + communicator.rank)  # the weights of rank 0 are used
    with contextlib.redirect_stderr(io.StringIO()) as told:
        ours = fit(
            lkk.shard(batches, communicator),
            lkk.callbacks(communicator),
            lambda: lkk.DistributedOptimizer(keras.optimizers.SGD(0.05), communicator),
        )
    keras.utils.set_random_seed(1)
    alone = None
    if communicator.rank == 0:
        alone = fit(batches, [], lambda: keras.optimizers.SGD(0.05))
    return {"ours": ours, "alone": alone, "told": told.getvalue()}


@pytest.mark.exhaustive
def test_models_of_every_build_end_as_in_one_process(cluster: Cluster) -> None:
    """Test that weights and history equal one process; a custom `train_step` is named on rank 0."""

    def work(communicator: Any) -> Any:
        return {name: trained(communicator, make) for name, make in MODELS.items()}

    results = cluster.call(work, ranks=2)
    for name in MODELS:
        weights, history = results[0][name]["alone"]
        for rank in (0, 1):
            found = results[rank][name]["ours"]
            assert found[1].keys() == history.keys(), name
            for value, expected in zip(found[0], weights, strict=True):
                np.testing.assert_allclose(value, expected, 1e-4, TOLERANCE, err_msg=name)
            for log, values in history.items():
                np.testing.assert_allclose(found[1][log], values, TOLERANCE, err_msg=name)
        may_differ = name.startswith("vae") or name == "conditional-gan"
        sentence = "training may differ from that of one process: the model has a custom train_step"
        told = results[0][name]["told"]
        assert sentence in told if may_differ else "labkit:" not in told, name
        assert "labkit:" not in results[1][name]["told"], name


def test_numbers_that_a_step_draws_are_named_once(cluster: Cluster) -> None:
    """Test layers that draw with a generator, draw without one, or draw nothing."""

    def work(communicator: Any) -> Any:
        import keras
        import tensorflow as tf

        from labkit import keras as lkk

        class Noise(keras.layers.Layer):
            def __init__(self, kind: str) -> None:
                super().__init__(name="noise")
                self.kind = kind
                if kind == "generator":
                    self.seeds = keras.random.SeedGenerator(1)

            def call(self, x: Any) -> Any:
                if self.kind == "generator":
                    return x + keras.random.normal(tf.shape(x), seed=self.seeds)
                return x + tf.random.normal(tf.shape(x)) if self.kind == "plain" else x

        def told_of(kind: str) -> str:
            model = keras.Sequential([keras.Input((6,)), Noise(kind), keras.layers.Dense(1)])
            model.compile(optimizer=lkk.DistributedOptimizer("sgd", communicator), loss="mse")
            data = tf.data.Dataset.from_tensor_slices((np.ones((4, 6)), np.ones((4, 1)))).batch(2)
            parts, callbacks = lkk.shard(data, communicator), lkk.callbacks(communicator)
            with contextlib.redirect_stderr(io.StringIO()) as told:
                model.fit(parts, verbose=0, callbacks=callbacks)
            return "".join(line for line in told.getvalue().splitlines() if "labkit:" in line)

        return [told_of(kind) for kind in ("generator", "plain", "nothing")]

    told, others = cluster.call(work, ranks=2)
    assert others == ["", "", ""]
    assert told[2] == ""
    for text, reason in zip(
        told, ("(Noise) draws random", "RandomStandardNormal' draws"), strict=False
    ):
        assert text.count("training may differ from that of one process") == 1
        assert reason in text


@pytest.mark.slow
def test_a_model_trains_on_with_batches_of_another_size(cluster: Cluster) -> None:
    """Test that a compiled step is traced again with the hooks of the current fit."""

    def work(communicator: Any) -> Any:
        import keras
        import tensorflow as tf

        from labkit import keras as lkk
        from labkit.worker.rank_state import restore

        def fit(optimizer: Any, part: Callable[[Any], Any], callbacks: Any) -> Any:
            keras.utils.set_random_seed(1)
            model = lazy()
            loss = keras.losses.MeanSquaredError("sum")
            model.compile(optimizer, loss)
            for batch in (6, 4, 6, 2):
                data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch, drop_remainder=True)
                model.fit(part(data), verbose=0, callbacks=callbacks)
            return [w.numpy() for w in model.weights]

        restore()
        random = np.random.default_rng(3)
        x, y = (random.standard_normal((12, n)).astype("float32") for n in (6, 4))
        ours = fit(
            lkk.DistributedOptimizer(keras.optimizers.SGD(0.01), communicator),
            lambda data: lkk.shard(data, communicator),
            lkk.callbacks(communicator),
        )
        alone = fit(keras.optimizers.SGD(0.01), lambda data: data, [])
        return [float(np.abs(a - b).max()) for a, b in zip(ours, alone, strict=True)]

    for apart in cluster.call(work, ranks=2):
        assert max(apart) < TOLERANCE
