"""Test all schedules with all algorithms against training in one process; and disagreements."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from labkit import AllReduce, Cluster, Experiment
from labkit.cluster import RankError
from labkit.common.errors import InvalidInput
from labkit.communicator import ALGORITHMS
from labkit.exchange import SCHEDULES

ALL = ("auto", *ALGORITHMS)
# Numbers of samples of each rank in each step: the parts are unequal, and in the last step one rank
# has no sample.
PARTS = {2: [(4, 3), (3, 3), (0, 5)], 3: [(4, 3, 3), (3, 3, 4), (3, 4, 0)]}
EXACT = 1e-12  # relative tolerance per variable
BUCKET = 64  # bytes; there are several buckets, and variables are divided


def batches(rank: int | None, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return a rank's part of every global batch; for rank None, the whole batches."""
    random = np.random.default_rng(5)
    found = []
    for parts in PARTS[size]:
        x, y = random.standard_normal((sum(parts), 6)), random.standard_normal((sum(parts), 3))
        ends = np.cumsum((0, *parts))
        own = slice(None) if rank is None else slice(ends[rank], ends[rank + 1])
        found.append((x[own], y[own]))
    return found


def trained(data: list[tuple[np.ndarray, np.ndarray]], mean: Any) -> list[np.ndarray]:
    """Return the weights after one pass over the data in a custom loop with momentum."""
    import tensorflow as tf

    random = np.random.default_rng(3)
    shapes = [(6, 5), (5,), (5, 3), (3,)]
    weights = [tf.Variable(random.standard_normal(shape) / 2) for shape in shapes]
    momenta = [tf.Variable(tf.zeros_like(weight)) for weight in weights]
    form = [tf.TensorSpec((None, width), tf.float64) for width in (6, 3)]

    @tf.function(input_signature=form)
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            hidden = tf.tanh(x @ weights[0] + weights[1])
            loss = tf.reduce_mean((hidden @ weights[2] + weights[3] - y) ** 2)
        gradients = mean(tape.gradient(loss, weights), tf.shape(x)[0])
        for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
            weight.assign_sub(0.1 * momentum.assign(0.9 * momentum + gradient))

    for x, y in data:
        step(x, y)
    return [weight.numpy() for weight in weights]


def fitted(data: list[tuple[np.ndarray, np.ndarray]], exchange: Any) -> list[np.ndarray]:
    """Return the weights after `model.fit`; an exchange with "priority" replaces Keras's step."""
    import keras
    import tensorflow as tf

    from labkit.exchange.priority import PriorityTraining
    from labkit.keras import Synchronize

    form = tuple(tf.TensorSpec((None, width), tf.float64) for width in (6, 3))
    given = tf.data.Dataset.from_generator(lambda: iter(data), output_signature=form)

    def optimizer() -> Any:
        return keras.optimizers.SGD(0.1, momentum=0.9)

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    own = optimizer()
    callbacks = [keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch))]
    if exchange is not None:
        own.exchange = exchange
    model.compile(optimizer=own, loss="mse")
    if exchange is not None:
        training = PriorityTraining(model, optimizer, exchange)
        callbacks = [training, Synchronize(exchange.communicator), *callbacks]
    model.fit(given, epochs=2, verbose=0, callbacks=callbacks)
    return [np.array(weight) for weight in model.get_weights()]


def largest_difference(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """Return the largest relative difference of weights, per array relative to its largest."""
    return max(
        float(np.abs(one - other).max() / np.abs(other).max())
        for one, other in zip(found, wanted, strict=True)
    )


def in_a_loop(communicator: Any, schedule: str) -> dict[str, float]:
    from labkit.exchange import Exchange

    wanted = trained(batches(None, communicator.size), lambda gradients, rows: gradients)
    differences = {}
    for algorithm in ALL:
        exchange = Exchange(communicator, algorithm, schedule, BUCKET, eager=True)
        found = trained(batches(communicator.rank, communicator.size), exchange.mean)
        differences[algorithm] = largest_difference(found, wanted)
    return differences


def in_fit(communicator: Any) -> dict[str, float]:
    import keras

    from labkit.exchange import Exchange

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        wanted = fitted(batches(None, communicator.size), None)
        differences = {}
        for algorithm in ALL:
            exchange = Exchange(communicator, algorithm, "priority", BUCKET)
            found = fitted(batches(communicator.rank, communicator.size), exchange)
            differences[algorithm] = largest_difference(found, wanted)
        return differences
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        *((each, 3) for each in SCHEDULES if each != "priority"),
        pytest.param("overlap", 2, marks=pytest.mark.slow),
    ],
)
def test_with_every_algorithm_the_weights_are_those_of_one_process(
    cluster: Cluster, schedule: str, ranks: int
) -> None:
    for differences in cluster.call(in_a_loop, schedule, ranks=ranks):
        assert set(differences) == set(ALL)
        assert max(differences.values()) <= EXACT, differences


@pytest.mark.slow
def test_priority_with_every_algorithm_trains_as_one_process_does(cluster: Cluster) -> None:
    for differences in cluster.call(in_fit, ranks=2):
        assert set(differences) == set(ALL)
        assert max(differences.values()) <= EXACT, differences


@pytest.mark.parametrize("option", [{"use_ema": True}, {"loss_scale_factor": 8.0}])
def test_priority_refuses_what_keras_does_around_its_own_step(option: dict[str, Any]) -> None:
    strategy = AllReduce(schedule="priority")
    with pytest.raises(InvalidInput, match=f"remove {next(iter(option))}"):
        Experiment(workers=2, strategy=strategy, optimizer_options=option)


def test_priority_waits_before_it_issues_though_no_gradient_asks_for_that(
    cluster: Cluster,
) -> None:
    """The gradient of a loss that is linear in the weights does not depend on the weights."""

    def fit(communicator: Any) -> float:
        import keras

        from labkit.exchange import Exchange
        from labkit.exchange.priority import PriorityTraining
        from labkit.keras import Synchronize

        steps, width = 200, 20_000
        model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(3, use_bias=False)])
        own = keras.optimizers.SGD(1.0)
        own.exchange = exchange = Exchange(communicator, "ring", "priority", 2**16)
        model.compile(optimizer=own, loss=lambda y, scores: keras.ops.sum(scores, axis=-1))
        training = PriorityTraining(model, lambda: keras.optimizers.SGD(1.0), exchange)
        callbacks = [training, Synchronize(communicator)]
        start = model.get_weights()[0]
        x = np.repeat(np.arange(steps, dtype=np.float32) + communicator.rank, width)
        x, y = x.reshape(steps, width), np.zeros((steps, 3), np.float32)
        model.fit(x, y, batch_size=1, shuffle=False, verbose=0, callbacks=callbacks)
        # The values are whole numbers and halves, so sums and means are exact, except for the
        # initial weights.
        wanted = start - (np.arange(steps) + 0.5).sum()
        return float(np.abs(model.get_weights()[0] - wanted).max())

    assert max(cluster.call(fit, ranks=2)) < 0.5


def test_priority_names_a_variable_without_a_gradient(cluster: Cluster) -> None:
    def fit(communicator: Any) -> None:
        import keras

        from labkit.exchange import Exchange
        from labkit.exchange.priority import PriorityTraining

        class Idle(keras.layers.Layer):  # type: ignore[misc]
            def build(self, shape: Any) -> None:
                self.unused = self.add_weight(name="unused", shape=(2,))

            def call(self, x: Any) -> Any:
                return x

        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), Idle()])
        own = keras.optimizers.SGD(0.1)
        own.exchange = exchange = Exchange(communicator, "ring", "priority", BUCKET)
        model.compile(optimizer=own, loss="mse")
        training = PriorityTraining(model, lambda: keras.optimizers.SGD(0.1), exchange)
        x, y = np.zeros((4, 6), np.float32), np.zeros((4, 3), np.float32)
        model.fit(x, y, verbose=0, callbacks=[training])

    with pytest.raises(RankError, match=r"a gradient of every trainable variable, but .*unused"):
        cluster.call(fit, ranks=2)


@pytest.mark.parametrize("schedule", ["sequential", "overlap"])
def test_overlap_exchanges_while_backpropagation_goes_on(cluster: Cluster, schedule: str) -> None:
    """The last layer's gradient is ready at once; the first layer's needs long computation."""

    def gap(communicator: Any) -> float:
        """Return the seconds from the first exchange's end to the last gradient's packing."""
        import tensorflow as tf

        from labkit.exchange import Exchange

        exchange = Exchange(communicator, "ring", schedule, 4 * 64, eager=True)
        weights = tf.random.stateless_normal((512, 512), (1, 2)) / 30

        @tf.function
        def step(value: Any) -> Any:
            for _ in range(100):
                value = tf.tanh(value @ weights)
            first, last = tf.fill([64], tf.reduce_sum(value)), tf.ones(64)
            return exchange.mean([first, last])

        step(weights)
        exchange.timeline.events.clear()
        step(weights)
        found = {(kind, bucket): times for kind, _, bucket, *times in exchange.timeline.events}
        packed = found["pack", max(bucket for _, bucket in found)][0]  # first layer's gradient
        return float(packed - found["communicate", 0][1])

    for free in cluster.call(gap, ranks=2):
        assert free > 0 if schedule == "overlap" else free < 0


@pytest.mark.parametrize(
    ("cores", "network", "stands"), [(2, None, True), (3, None, False), (2, "10GbE", False)]
)
def test_overlap_waits_where_the_core_that_moves_a_bucket_would_compute(
    cluster: Cluster, cores: int, network: str | None, stands: bool
) -> None:
    def trace(communicator: Any) -> tuple[bool, int, list[list[float]]]:
        """Return whether training stands still, the number of buckets, and all means."""
        import tensorflow as tf

        from labkit.exchange import Exchange, autotune

        enough, autotune.usable_cores = autotune.usable_cores, lambda: cores
        try:
            means = []
            for compressor in (None, "Int8"):
                exchange = Exchange(communicator, "auto", "overlap", 4 * 64, compressor)
                parts = [tf.random.stateless_normal([64], (communicator.rank, n)) for n in (1, 2)]
                traced = tf.function(lambda *given, mean=exchange.mean: mean([*given]))
                means += [mean.numpy().tolist() for mean in traced(*parts)]
                if compressor is None:
                    said = exchange.describe()
            assert len(exchange.buckets) == 2  # fixed, so that lossy results are equal everywhere
            return said["stands_still"], len(said["bucket_bytes"]), means
        finally:
            autotune.usable_cores = enough

    [one, other] = cluster.call(trace, ranks=2, network=network)
    assert one == other
    assert one[:2] == (stands, 1 if stands else 2)
    for plain, lossy in zip(one[2][:2], one[2][2:], strict=True):
        np.testing.assert_allclose(lossy, plain, atol=0.05)


def test_ranks_take_turns_only_while_a_staggered_exchange_asks_for_it(cluster: Cluster) -> None:
    def turns(communicator: Any) -> list[bool]:
        import tensorflow as tf

        from labkit.exchange import Exchange

        schedules = ("sequential", "staggered")
        exchanges = [Exchange(communicator, "ring", schedule) for schedule in schedules]
        seen = []
        for exchange in (*exchanges, *exchanges):
            exchange.mean([tf.constant([1.0, 2.0])])
            seen.append(communicator._emulation.paced)
        return seen

    assert cluster.call(turns, ranks=2, network="1GbE") == [[False, True] * 2] * 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_of_several_dtypes_are_cut_and_put_together(
    cluster: Cluster, schedule: str
) -> None:
    shapes = [((7, 5), "float32"), ((3,), "float64"), ((40,), "float16"), ((2, 9), "float64")]

    def mean(communicator: Any) -> list[Any]:
        import tensorflow as tf

        from labkit.exchange import Exchange

        exchange = Exchange(communicator, "ring", schedule, BUCKET)

        @tf.function
        def step(factor: Any) -> Any:
            values = [
                tf.reshape(tf.range(np.prod(shape), dtype=tf.float64), shape) for shape, _ in shapes
            ]
            gradients = [
                tf.cast(value * factor, kind)
                for value, (_, kind) in zip(values, shapes, strict=True)
            ]
            return exchange.mean(gradients)

        factor = tf.constant(float(communicator.rank), tf.float64)
        return [(each.dtype.name, each.numpy()) for _ in range(2) for each in step(factor)]

    for told in cluster.call(mean, ranks=3):
        for (shape, kind), (name, found) in zip(shapes * 2, told, strict=True):
            assert name == kind
            wanted = np.arange(np.prod(shape)).reshape(shape).astype(kind)  # factors 0, 1, 2
            np.testing.assert_allclose(found, wanted, rtol=2e-3 if kind == "float16" else 1e-6)


# --- ranks that disagree -------------------------------------------------------------------------


def with_gradients(communicator: Any, schedule: str, shapes: dict[int, list[Any]]) -> None:
    import tensorflow as tf

    from labkit.exchange import Exchange

    own = [tf.zeros(shape, kind) for shape, kind in shapes[communicator.rank]]
    names = [f"layer{number}/kernel" for number in range(len(own))]
    tf.function(Exchange(communicator, "ring", schedule).mean)(own, None, names)


USUAL = [((4, 3), "float32"), ((3,), "float32")]


@pytest.mark.parametrize("schedule", ["sequential", "overlap"])
@pytest.mark.parametrize(
    ("other", "told"),
    [
        (USUAL[:1], "rank 1 has 1 gradients, but rank 0 has 2: .*the same model"),
        (
            [((4, 5), "float32"), ((3,), "float32")],
            r"rank 1 has the gradient float32\[4, 5\] .* rank 0 has float32\[4, 3\] for layer0",
        ),
        (
            [((4, 3), "float32"), ((3,), "float64")],
            r"rank 1 has the gradient float64\[3\] .* rank 0 has float32\[3\] for layer1/kernel",
        ),
    ],
    ids=["another model", "another shape", "another dtype"],
)
def test_ranks_with_other_gradients_are_told_rank_tensor_and_shapes(
    cluster: Cluster, schedule: str, other: list[Any], told: str
) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=told):
        cluster.call(with_gradients, schedule, {0: USUAL, 1: other}, ranks=2)
    assert time.monotonic() - start < cluster.timeout / 2


@pytest.mark.battery(2, 2)
@pytest.mark.parametrize("schedule", ["sequential", "overlap"])
@pytest.mark.parametrize("algorithm", ["mpi", "ring", "shared_memory"])
def test_a_rank_with_fewer_steps_is_named_in_seconds(
    cluster: Cluster, schedule: str, algorithm: str
) -> None:
    def fit(communicator: Any) -> None:
        import keras

        from labkit import keras as lkk

        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        optimizer = lkk.DistributedOptimizer(
            keras.optimizers.SGD(0.1), communicator, algorithm=algorithm, schedule=schedule
        )
        model.compile(optimizer=optimizer, loss="mse")
        rows = 12 if communicator.rank == 0 else 8
        x, y = np.zeros((rows, 6), np.float32), np.zeros((rows, 3), np.float32)
        model.fit(x, y, batch_size=4, verbose=0, callbacks=lkk.callbacks(communicator))

    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 0 .*the exchange of gradients.*rank 1 .*epoch"):
        cluster.call(fit, ranks=2)
    assert time.monotonic() - start < cluster.timeout / 2


@pytest.mark.slow
def test_one_worker_trains_with_priority_as_with_any_schedule(cluster: Cluster) -> None:
    strategies = [AllReduce(schedule=name) for name in ("priority", "sequential")]
    runs = [
        cluster.run(Experiment(dataset="digits", steps_per_epoch=2, strategy=strategy), show=False)
        for strategy in strategies
    ]
    one, other = (run.history["loss"].tolist() for run in runs)
    assert one == other


@pytest.mark.parametrize("schedule", ["sequential", "overlap"])
@pytest.mark.parametrize(("algorithm", "shares"), [("shared_memory", True), ("ring", False)])
def test_ranks_of_one_host_write_their_means_once(
    cluster: Cluster, schedule: str, algorithm: str, shares: bool
) -> None:
    def spared(communicator: Any) -> tuple[bool, bool]:
        """Return whether means have separate memory, and whether some gradients are not moved."""
        import tensorflow as tf

        from labkit.exchange import Exchange

        exchange = Exchange(communicator, algorithm, schedule, eager=True)
        mean = communicator.mean
        asides = []

        def seen(*given: Any) -> None:
            asides.append(given[-1])
            mean(*given)

        communicator.mean = seen
        tf.function(lambda gradient: exchange.mean([gradient]))(tf.ones([64, 64]))
        [aside] = asides
        return aside.into is not None, aside.pieces is not None

    stands = schedule == "sequential"
    assert cluster.call(spared, ranks=2) == [(shares, shares and stands)] * 2
