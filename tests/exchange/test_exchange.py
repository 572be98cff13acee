"""Test that the mean of the ranks' gradients is the gradient of all their samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from labkit import Cluster
from labkit.cluster import RankError


def test_every_rank_counts_by_its_rows(cluster: Cluster) -> None:
    rows = [3, 1, 0, 5]

    def mean(communicator: Any) -> list[np.ndarray]:
        import tensorflow as tf

        from labkit.exchange import Exchange

        exchange = Exchange(communicator)
        random = np.random.default_rng(communicator.rank)
        gradients = [tf.constant(random.standard_normal(shape)) for shape in [(3, 2), (), (5,)]]
        traced = tf.function(lambda n: exchange.mean(gradients, n))
        return [m.numpy() for m in traced(tf.constant(rows[communicator.rank]))]

    results = cluster.call(mean)
    randoms = [np.random.default_rng(rank) for rank in range(4)]
    for place, shape in enumerate([(3, 2), (), (5,)]):
        gradients = [random.standard_normal(shape) for random in randoms]
        wanted = sum(n * g for n, g in zip(rows, gradients, strict=True)) / sum(rows)
        for result in results:
            np.testing.assert_allclose(result[place], wanted, rtol=1e-14)
            assert result[place].shape == shape


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_in_common_memory_a_mean_of_large_values_is_their_mean_step_after_step(
    cluster: Cluster, ranks: int
) -> None:
    def differences(communicator: Any) -> float:
        import tensorflow as tf

        from labkit.exchange import Exchange

        exchange = Exchange(communicator, "shared_memory")
        kinds = [tf.TensorSpec([n], tf.float32) for n in (1000, 3, 70_001)]
        traced = tf.function(
            lambda rows, *given: exchange.mean([*given], rows),
            input_signature=[tf.TensorSpec([], tf.int64), *kinds],
        )
        largest = 0.0
        for step, uneven in enumerate([False, True, False, True]):
            drawn = [np.random.default_rng((step, rank)) for rank in range(communicator.size)]
            scale = 3e38 if step < 2 else 1.0
            values = [
                [scale * d.uniform(0.5, 1, k.shape).astype(np.float32) for k in kinds]
                for d in drawn
            ]
            rows = [1 + uneven * rank for rank in range(communicator.size)]
            own = communicator.rank
            for n, mean in enumerate(traced(tf.constant(rows[own], tf.int64), *values[own])):
                of_ranks = np.array([value[n] for value in values], np.float64)
                wanted = np.average(of_ranks, axis=0, weights=rows)
                largest = max(largest, float(np.max(np.abs(mean.numpy() / wanted - 1))))
        return largest

    assert max(cluster.call(differences, ranks=ranks)) < 4e-7


def test_without_rows_every_rank_counts_the_same(cluster: Cluster) -> None:
    def mean(communicator: Any) -> list[float]:
        import tensorflow as tf

        from labkit.exchange import Exchange

        means = Exchange(communicator).mean([tf.constant([float(communicator.rank), 1.0])])
        return list(means[0].numpy())

    assert cluster.call(mean) == [[1.5, 1.0]] * 4


def test_a_rank_without_rows_leaves_no_trace_even_of_what_is_not_a_number(
    cluster: Cluster,
) -> None:
    def mean(communicator: Any) -> list[float]:
        import tensorflow as tf

        from labkit.exchange import Exchange

        empty = communicator.rank == 1
        gradient = [np.nan, np.inf, -np.inf] if empty else [1.0, 2.0, 3.0]
        means = Exchange(communicator).mean([tf.constant(gradient)], tf.constant(0 if empty else 4))
        return list(means[0].numpy())

    assert cluster.call(mean, ranks=2) == [[1.0, 2.0, 3.0]] * 2


def test_what_is_not_a_number_on_a_rank_with_rows_reaches_all(cluster: Cluster) -> None:
    def mean(communicator: Any) -> bool:
        import tensorflow as tf

        from labkit.exchange import Exchange

        gradient = [np.inf if communicator.rank == 1 else 1.0]
        means = Exchange(communicator).mean([tf.constant(gradient)], tf.constant(4))
        return bool(np.isinf(means[0].numpy()[0]))

    assert cluster.call(mean, ranks=3) == [True] * 3


def test_none_stays_none_and_slices_become_dense(cluster: Cluster) -> None:
    def mean(communicator: Any) -> list[Any]:
        import tensorflow as tf

        from labkit.exchange import Exchange

        slices = tf.IndexedSlices(
            tf.constant([[1.0, 1.0], [2.0, 2.0]]), tf.constant([communicator.rank, 2]), (4, 2)
        )
        means = Exchange(communicator).mean([None, slices, None, tf.constant([7.0])])
        return [m if m is None else m.numpy().tolist() for m in means]

    wanted = [None, [[0.5, 0.5], [0.5, 0.5], [2.0, 2.0], [0.0, 0.0]], None, [7.0]]
    assert cluster.call(mean, ranks=2) == [wanted] * 2


def test_gradients_of_two_dtypes_keep_their_dtype_and_place(cluster: Cluster) -> None:
    def mean(communicator: Any) -> list[Any]:
        import tensorflow as tf

        from labkit.exchange import Exchange

        gradients = [
            tf.constant([1.0 + communicator.rank], tf.float32),
            tf.constant([1e-17 + communicator.rank], tf.float64),
            tf.constant([4.0], tf.float32),
        ]
        means = tf.function(Exchange(communicator).mean)(gradients)
        return [(m.dtype.name, float(m.numpy()[0])) for m in means]

    wanted = [("float32", 1.5), ("float64", 0.5), ("float32", 4.0)]
    assert cluster.call(mean, ranks=2) == [wanted] * 2


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-3), ("bfloat16", 1e-2)])
def test_half_precision_gradients_do_not_overflow_and_rows_are_not_rounded(
    cluster: Cluster, dtype: str, tolerance: float
) -> None:
    def mean(communicator: Any) -> tuple[str, list[float]]:
        import tensorflow as tf

        from labkit.exchange import Exchange

        # 259 samples of 1000 sum to 259,000, which exceeds float16; bfloat16 has 258 and 260, but
        # not 259.
        gradient = tf.cast([1000.0, 1.0], dtype)
        means = Exchange(communicator).mean(
            [gradient], tf.constant(259 if communicator.rank else 1)
        )
        return means[0].dtype.name, [float(x) for x in means[0].numpy()]

    for name, values in cluster.call(mean, ranks=2):
        assert name == dtype
        np.testing.assert_allclose(values, [1000.0, 1.0], rtol=tolerance)


def test_ranks_may_have_their_gradients_ready_in_any_order(cluster: Cluster) -> None:
    """Buckets follow one fixed order, so ranks whose graphs run differently do not block."""

    def mean(communicator: Any) -> list[float]:
        import tensorflow as tf

        from labkit.exchange import Exchange

        exchange = Exchange(communicator)

        @tf.function
        def step() -> Any:
            slow = tf.numpy_function(_late, [tf.constant(1.0, tf.float64)], tf.float64)
            slow.set_shape(())
            fast = tf.constant(2.0, tf.float32)
            pair = [slow, fast] if communicator.rank else [tf.constant(1.0, tf.float64), fast]
            return exchange.mean(pair)

        return [float(value) for _ in range(3) for value in step()]

    assert cluster.call(mean, ranks=2) == [[1.0, 2.0] * 3] * 2


def _late(value: Any) -> Any:
    import time

    time.sleep(0.05)
    return value


def test_one_rank_alone_has_its_own_gradients(cluster: Cluster) -> None:
    def mean(communicator: Any) -> bool:
        import tensorflow as tf

        from labkit.exchange import Exchange

        gradient = tf.constant([1.0])
        return Exchange(communicator).mean([gradient, None], tf.constant(3)) == [gradient, None]

    assert cluster.call(mean, ranks=1) == [True]


def test_a_step_that_stands_still_does_not_nap_because_another_exchange_overlaps(
    cluster: Cluster,
) -> None:
    def waits(communicator: Any) -> list[bool]:
        import tensorflow as tf

        from labkit.exchange import Exchange

        still, busy = Exchange(communicator), Exchange(communicator, schedule="overlap", eager=True)
        seen = []
        mean = communicator.mean

        def watched(*arguments: Any) -> None:
            seen.append(communicator.wait_policy.polite)
            mean(*arguments)

        communicator.mean = watched
        gradient = tf.constant([1.0, 2.0])
        for exchange in (still, busy, still):
            exchange.mean([gradient])
        return seen[::2]

    assert cluster.call(waits) == [[False, False]] * 4


def test_two_compiled_steps_with_other_variables_are_refused_in_one_line(cluster: Cluster) -> None:
    def work(communicator: Any) -> list[str]:
        import tensorflow as tf

        from labkit.exchange import Exchange

        told = []
        for schedule in ("sequential", "overlap"):
            exchange = Exchange(communicator, "ring", schedule)
            first, second = tf.function(exchange.mean), tf.function(exchange.mean)
            first([tf.ones(3)])
            second([tf.ones(5)])
            try:
                first([tf.ones(3)])
            except Exception as error:
                told.append(str(error))
        return told

    for told in cluster.call(work, ranks=2):
        assert ["give each step a separate optimizer" in text for text in told] == [True, True]


def test_a_loss_without_any_gradient_is_refused(cluster: Cluster) -> None:
    def work(communicator: Any) -> Any:
        from labkit.exchange import Exchange

        return Exchange(communicator, "ring").mean([None, None])

    with pytest.raises(RankError, match="no variable has a gradient"):
        cluster.call(work, ranks=2)
