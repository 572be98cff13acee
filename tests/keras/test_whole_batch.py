"""Test that losses and normalizations over ranks equal those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from labkit import Cluster

TOLERANCE = 1e-12  # relative to a parameter's largest weight


def sgd() -> Any:
    import keras

    return keras.optimizers.SGD(0.1, momentum=0.9)


def learned(
    communicator: Any,
    make: Callable[[], Any],
    data: Any,
    compiled: Callable[[], dict[str, Any]],
    optimizer: Callable[[], Any] = sgd,
    batch: int = 8,
    capacities: Any = None,
    drop: bool = False,
    precision: str = "float64",
    validates: bool = False,
    callbacks: Sequence[Any] = (),
) -> dict[str, Any]:
    """Return weights and history of the ranks and of one process, from the same start."""
    import keras
    import tensorflow as tf

    from labkit import keras as lkk
    from labkit.worker.rank_state import restore

    keras.backend.clear_session()
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(precision)
    keras.utils.set_random_seed(communicator.rank)
    batches = tf.data.Dataset.from_tensor_slices(data).batch(batch, drop_remainder=drop)
    ours = make()
    start = communicator.broadcast_object(ours.get_weights())
    distributed = lkk.DistributedOptimizer(optimizer(), communicator)
    ours.compile(optimizer=distributed, **compiled())
    parts = lkk.shard(batches, communicator, capacities)
    held_out = (parts, batches) if validates else (None, None)
    also = [*lkk.callbacks(communicator), *callbacks]
    fitted = ours.fit(parts, validation_data=held_out[0], verbose=0, callbacks=also)
    told = None
    if communicator.rank == 0:
        one = make()
        one.set_weights(start)
        one.compile(optimizer=optimizer(), **compiled())
        alone = one.fit(batches, validation_data=held_out[1], verbose=0).history
        told = one.get_weights(), alone
    restore()
    weights, alone = communicator.broadcast_object(told)
    pairs = list(zip(ours.get_weights(), weights, strict=True))
    apart = [np.abs(a - b).max() / max(1e-3, np.abs(b).max()) for a, b in pairs]
    return {
        "difference": float(max(apart)),
        "moved": float(max(np.abs(b - s).max() for (_, b), s in zip(pairs, start, strict=True))),
        "history": fitted.history,
        "alone": alone,
    }


def same(results: list[dict[str, Any]], tolerance: float = TOLERANCE, rtol: float = 1e-9) -> None:
    """Check that what the ranks learned equals what one process learned."""
    for result in results:
        assert result["difference"] <= tolerance
        assert result["moved"] > 1e-3
        for name, values in result["alone"].items():
            np.testing.assert_allclose(result["history"][name], values, rtol=rtol, err_msg=name)


def dense() -> Any:
    import keras

    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="tanh")])


def weighted(count: int) -> Any:
    random = np.random.default_rng(5)
    x, y = random.standard_normal((count, 6)), random.standard_normal((count, 3))
    return x, y, random.uniform(0.1, 3, count)


slow = pytest.mark.slow


@pytest.mark.battery(1, 2)
@pytest.mark.parametrize(
    "reduction",
    [
        "sum",
        pytest.param("mean_with_sample_weight", marks=slow),
        pytest.param("sum_over_batch_size", marks=slow),
    ],
)
def test_reductions_of_weighted_samples(cluster: Cluster, reduction: str) -> None:
    """Test batches of 8, 8 and 2 rows on 3 ranks: parts are unequal, and one is empty."""

    def work(communicator: Any) -> Any:
        import keras

        def compiled() -> Any:
            return {"loss": keras.losses.Huber(reduction=reduction), "weighted_metrics": ["mae"]}

        return learned(communicator, dense, weighted(18), compiled)

    same(cluster.call(work, ranks=3))


def words() -> Any:
    """Return a masked sequence model that plain Keras can train."""
    import keras

    return keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(9, 4, mask_zero=True),
            keras.layers.LSTM(5, return_sequences=True),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )


def sentences(count: int) -> Any:
    random = np.random.default_rng(7)
    x = random.integers(1, 9, (count, 6)).astype(np.int32)
    for row, end in enumerate(random.integers(1, 7, count)):
        x[row, end:] = 0
    return x, random.integers(0, 3, (count, 6))


@pytest.mark.slow
@pytest.mark.parametrize("drop", [False, pytest.param(True, marks=slow)])
def test_masked_sequences(cluster: Cluster, drop: bool) -> None:
    def work(communicator: Any) -> Any:
        import keras

        def compiled() -> Any:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            return {"loss": loss, "weighted_metrics": ["accuracy"]}

        return learned(communicator, words, sentences(18), compiled, drop=drop, validates=drop)

    same(cluster.call(work, ranks=2))


@pytest.mark.slow
def test_several_losses_each_divide_by_their_own(cluster: Cluster) -> None:
    """Test masks, weights and a plain mean together; each output's loss is reported as in Keras."""

    def forked() -> Any:
        import keras

        words = keras.Input((6,), dtype="int32")
        hidden = keras.layers.Embedding(9, 4, mask_zero=True)(words)
        outputs = {
            "kinds": keras.layers.Dense(3, name="kinds")(hidden),
            "size": keras.layers.Dense(1, name="size")(
                keras.layers.GlobalAveragePooling1D()(hidden)
            ),
            "plain": keras.layers.Dense(2, name="plain")(
                keras.layers.Flatten()(keras.layers.Embedding(9, 2)(words))
            ),
        }
        return keras.Model(words, outputs)

    def work(communicator: Any) -> Any:
        import keras

        x, y = sentences(14)
        random = np.random.default_rng(3)
        targets = {"kinds": y, "size": x[:, :1] / 9.0, "plain": random.standard_normal((14, 2))}
        shapes = {"kinds": (14, 6), "size": 14, "plain": 14}
        weights = {name: random.uniform(0.1, 2, shape) for name, shape in shapes.items()}

        def compiled() -> Any:
            loss = {
                "kinds": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                "size": keras.losses.MeanSquaredError("mean_with_sample_weight"),
                "plain": "mse",
            }
            return {"loss": loss, "loss_weights": {"kinds": 1.0, "size": 0.3, "plain": 2.0}}

        data = (x, targets, weights)
        return learned(communicator, forked, data, compiled, capacities=[2, 1], validates=True)

    same(cluster.call(work, ranks=2))


def normalized() -> Any:
    import keras

    inputs = keras.Input((6,))
    left = keras.layers.BatchNormalization(synchronized=True)(keras.layers.Dense(4)(inputs))
    right = keras.layers.BatchNormalization(synchronized=True)(keras.layers.Dense(4)(inputs))
    hidden = keras.layers.Activation("tanh")(keras.layers.Add()([left, right]))
    return keras.Model(inputs, keras.layers.Dense(3)(hidden))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=slow)])
def test_synchronized_normalization(cluster: Cluster, ranks: int) -> None:
    """Test two parallel layers whose gradients arrive in no fixed order.

    Keras numbers the names of layers, and each rank has made more layers than the rank before.
    """

    def work(communicator: Any) -> Any:
        def make() -> Any:
            return [normalized() for _ in range(communicator.rank + 1)][-1]

        return learned(communicator, make, weighted(18), lambda: {"loss": "mse"}, batch=9)

    same(cluster.call(work, ranks=ranks))


@pytest.mark.exhaustive
def test_synchronized_normalization_of_masked_steps(cluster: Cluster) -> None:
    def masked() -> Any:
        import keras

        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(9, 4, mask_zero=True),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(3),
            ]
        )

    def work(communicator: Any) -> Any:
        import keras

        def compiled() -> Any:
            return {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}

        return learned(communicator, masked, sentences(14), compiled)

    same(cluster.call(work, ranks=2))


def test_an_evaluation_in_the_middle_of_a_fit_changes_nothing(cluster: Cluster) -> None:
    """Test that each rank evaluates its own rows, then continues as one process does."""

    def work(communicator: Any) -> Any:
        import keras

        from labkit import keras as lkk

        class Evaluate(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_begin(self, logs: Any = None) -> None:
                x, y, _ = weighted(3 + communicator.rank)
                found.append(lkk.evaluate(self.model, (x, y), communicator)["loss"])

        def compiled() -> dict[str, Any]:
            return {"loss": keras.losses.Huber(reduction="sum"), "run_eagerly": True}

        found: list[float] = []
        given = (communicator, dense, weighted(10), compiled)
        return learned(*given, callbacks=[Evaluate()]), found

    results = cluster.call(work, ranks=2)
    same([result for result, _ in results])
    assert results[0][1] == results[1][1]


# --- the breadth: step by step, since compiling takes longer than the steps ----------------------


def loss_of(name: str) -> Any:
    """Return a loss of Keras by its name."""
    import keras

    options = {"Dice": {"axis": (1,)}, "Tversky": {"axis": (1,)}}.get(name, {})
    return getattr(keras.losses, name)(**options)


LOSSES = [
    "BinaryCrossentropy",
    "BinaryFocalCrossentropy",
    "CategoricalCrossentropy",
    "CategoricalFocalCrossentropy",
    "CategoricalGeneralizedCrossEntropy",
    "CategoricalHinge",
    "CosineSimilarity",
    "Dice",
    "Hinge",
    "Huber",
    "KLDivergence",
    "LogCosh",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "Poisson",
    "SquaredHinge",
    "Tversky",
]
OPTIMIZERS = [
    "SGD",
    "RMSprop",
    "Adam",
    "AdamW",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "Adafactor",
    "Nadam",
    "Ftrl",
    "Lion",
    "Lamb",
    "Muon",
    "ScheduleFreeAdamW",
    "LARS",
]
OPTIONS: list[dict[str, Any]] = [
    {"clipnorm": 0.05},
    {"global_clipnorm": 0.05},
    {"clipvalue": 0.01},
    {"weight_decay": 0.01},
    {"use_ema": True, "ema_overwrite_frequency": 2},
    {"gradient_accumulation_steps": 2},
]
REDUCTIONS = ["sum", "mean_with_sample_weight", "sum_over_batch_size"]


@pytest.mark.slow
def test_every_loss_and_reduction_is_equal(cluster: Cluster) -> None:
    """Test weighted samples, 8 + 2 rows on 3 ranks: parts are unequal, and one is empty."""

    def work(communicator: Any) -> Any:
        import keras

        def soft() -> Any:
            hidden = keras.layers.Dense(3, activation="softmax")
            return keras.Sequential([keras.Input((6,)), hidden])

        def one(name: str, reduction: str) -> Any:
            def compiled() -> dict[str, Any]:
                loss = loss_of(name)
                loss.reduction = reduction
                return {"loss": loss, "run_eagerly": True}

            x, y, weight = weighted(10)
            y = np.exp(y) / np.exp(y).sum(1, keepdims=True)
            if name == "CategoricalGeneralizedCrossEntropy":
                y = y.argmax(1)
            return learned(communicator, soft, (x, y, weight), compiled)

        pairs = [(name, REDUCTIONS[place % 3]) for place, name in enumerate(LOSSES)]
        return {" ".join(pair): one(*pair) for pair in pairs}

    results = cluster.call(work, ranks=3)
    apart = {name: one["difference"] for name, one in results[0].items()}
    assert {name: value for name, value in apart.items() if not value <= TOLERANCE} == {}
    for result in results:
        for one in result.values():
            np.testing.assert_allclose(one["history"]["loss"], one["alone"]["loss"], rtol=1e-9)


@pytest.mark.slow
def test_every_optimizer_is_equal(cluster: Cluster) -> None:
    def work(communicator: Any) -> Any:
        import keras

        from labkit.keras import LARS

        def one(name: str, options: dict[str, Any]) -> Any:
            def optimizer() -> Any:
                kind = LARS if name == "LARS" else getattr(keras.optimizers, name)
                return kind(learning_rate=0.05, **options)

            def compiled() -> dict[str, Any]:
                return {"loss": keras.losses.Huber(reduction="sum"), "run_eagerly": True}

            return learned(communicator, dense, weighted(18), compiled, optimizer)

        cases = [(name, OPTIONS[n % len(OPTIONS)]) for n, name in enumerate(OPTIMIZERS)]
        return {f"{name} {options}": one(name, options) for name, options in cases}

    results = cluster.call(work, ranks=3)
    apart = {name: one["difference"] for name, one in results[0].items()}
    assert {name: value for name, value in apart.items() if not value <= TOLERANCE} == {}


def many() -> Any:
    """Return a model of layers that treat each sample alone, and a normalization that does not."""
    import keras

    layers = keras.layers
    words = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(9, 8)(words)
    hidden = layers.MultiHeadAttention(2, 4)(hidden, hidden)
    hidden = layers.LayerNormalization()(hidden)
    hidden = layers.Conv1D(8, 3, padding="same", activity_regularizer="l2")(hidden)
    hidden = layers.GroupNormalization(2)(hidden)
    hidden = layers.BatchNormalization(synchronized=True, renorm=True)(hidden)
    hidden = layers.RMSNormalization()(hidden)
    hidden = layers.SpectralNormalization(layers.Dense(4))(hidden)
    hidden = layers.GRU(4, recurrent_regularizer="l2")(hidden)
    return keras.Model(words, layers.Dense(3)(layers.UnitNormalization()(hidden)))


@slow
def test_layers_of_every_kind_are_equal(cluster: Cluster) -> None:
    def work(communicator: Any) -> Any:
        import keras

        def compiled() -> dict[str, Any]:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
            return {"loss": loss, "run_eagerly": True}

        x, y = sentences(10)
        return learned(communicator, many, (x, y[:, 0]), compiled, validates=True)

    same(cluster.call(work, ranks=3))


@slow
@pytest.mark.parametrize(
    ("precision", "epsilon"),
    [
        ("float32", 2**-23),
        ("bfloat16", 2**-7),
        ("mixed_bfloat16", 2**-7),
        ("mixed_float16", 2**-10),
    ],
)
def test_low_precision_is_equal_within_four_epsilon(
    cluster: Cluster, precision: str, epsilon: float
) -> None:
    def work(communicator: Any) -> Any:
        import keras

        def compiled() -> dict[str, Any]:
            loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
            return {"loss": loss, "run_eagerly": True}

        given = weighted(18)
        return learned(communicator, dense, given, compiled, precision=precision)

    same(cluster.call(work, ranks=3), 4 * epsilon, 16 * epsilon)


# --- what cannot be equal is refused or named ----------------------------------------------------


def test_moving_statistics_of_ranks_of_their_own_are_one(cluster: Cluster) -> None:
    def own() -> Any:
        import keras

        normalize = keras.layers.BatchNormalization()
        return keras.Sequential([keras.Input((6,)), normalize, keras.layers.Dense(3)])

    def work(communicator: Any) -> Any:
        import contextlib
        import io

        import keras
        import tensorflow as tf

        from labkit import keras as lkk

        keras.backend.clear_session()
        model = own()
        model.compile(lkk.DistributedOptimizer("sgd", communicator), "mse", run_eagerly=True)
        x, y, _ = weighted(8)
        parts = lkk.shard(tf.data.Dataset.from_tensor_slices((x, y)).batch(8), communicator)
        with contextlib.redirect_stderr(io.StringIO()) as told:
            model.fit(parts, callbacks=lkk.callbacks(communicator), verbose=0)
        halves = [0.01 * half.mean(0) for half in (x[:4], x[4:])]
        return told.getvalue(), model.layers[0].moving_mean.numpy(), np.mean(halves, axis=0)

    told, kept, means = zip(*cluster.call(work, ranks=2), strict=True)
    np.testing.assert_array_equal(kept[0], kept[1])
    np.testing.assert_allclose(kept[0], means[0], rtol=1e-5)
    assert "(BatchNormalization) normalises by the batch of each rank" in told[0]
    assert told[1] == ""


@pytest.mark.parametrize(
    ("loss", "schedule", "says"),
    [
        (None, "overlap", "schedule='overlap' sends gradients during backpropagation"),
        ("none", "sequential", "reduction='none', which returns a value per sample"),
    ],
)
def test_what_has_no_meaning_over_ranks_is_refused(
    cluster: Cluster, loss: str | None, schedule: str, says: str
) -> None:
    def work(communicator: Any) -> Any:
        import keras

        from labkit import keras as lkk
        from labkit.common.errors import InvalidInput

        keras.backend.clear_session()
        model = normalized()
        optimizer = lkk.DistributedOptimizer("sgd", communicator, schedule=schedule)
        given = "mse" if loss is None else keras.losses.MeanSquaredError(reduction=loss)
        model.compile(optimizer, given, run_eagerly=True)
        x, y, _ = weighted(4)
        try:
            model.fit(x, y, callbacks=lkk.callbacks(communicator), verbose=0)
        except InvalidInput as error:
            return str(error)
        return "nothing"

    assert all(says in told for told in cluster.call(work, ranks=2))


def test_a_loss_of_a_batch_as_a_whole_is_named(cluster: Cluster) -> None:
    def work(communicator: Any) -> Any:
        import contextlib
        import io

        import keras

        from labkit import keras as lkk

        keras.backend.clear_session()
        model = dense()
        optimizer = lkk.DistributedOptimizer("sgd", communicator)
        model.compile(optimizer, keras.losses.Dice(), run_eagerly=True)
        x, y, _ = weighted(4)
        with contextlib.redirect_stderr(io.StringIO()) as told:
            model.fit(x, y, callbacks=lkk.callbacks(communicator), verbose=0)
        return told.getvalue()

    told = cluster.call(work, ranks=2)
    assert "loss 'dice' is defined only for a whole batch; labkit instead averages" in told[0]
    assert told[1] == ""
