"""Test compressors on real ranks: over MPI, they give the same results as in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from labkit import Cluster
from labkit.cluster import RankError
from labkit.compression import (
    DGC,
    QSGD,
    BFloat16,
    Chain,
    Compressor,
    ErrorFeedback,
    Float16,
    Int8,
    OneBit,
    PowerSGD,
    RandomK,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
)

FAMILY: list[Compressor] = [
    Float16(),
    BFloat16(),
    Int8(),
    Int8(channels=True),
    QSGD(),
    TernGrad(),
    OneBit(),
    SignSGD(),
    TopK(ratio=0.1),
    RandomK(ratio=0.1),
    Threshold(value=1.0),
    DGC(ratio=0.1, clip_norm=3.0),
    PowerSGD(),
    ErrorFeedback(inner=TopK(ratio=0.1)),
    ErrorFeedback(inner=OneBit()),
    ErrorFeedback(inner=PowerSGD(approximation_rank=1)),
    Chain(first=TopK(ratio=0.1), second=Int8()),
]
SHAPES = [(12, 7), (7,), (7, 3), (3,)]
STEPS = 3


def over_mpi(communicator: Any, family: list[Any], algorithm: str) -> list[Any]:
    """Return per compressor: means of three steps, audit, collective calls per step, seconds."""
    import tensorflow as tf

    from labkit.exchange import Exchange
    from labkit.worker.gradient_log import Audit

    found: list[Any] = []
    for compressor in family:
        exchange = Exchange(communicator, algorithm, compressor=compressor)
        audit = Audit(communicator, compressor.conserves, compressor.rounding)
        exchange.watchers.append(audit.observe)
        rng = np.random.default_rng(communicator.rank)
        means = []
        for _ in range(STEPS):
            gradients = [tf.constant(rng.standard_normal(s).astype("f4")) for s in SHAPES]
            means.append([mean.numpy() for mean in exchange.mean(gradients)])
        assert exchange.compressed is not None
        calls = exchange.compressed.calls / STEPS
        found.append((means, audit.difference(), calls, exchange.compressed.seconds))
    return found


def in_lockstep(compressor: Compressor, ranks: int) -> list[list[np.ndarray]]:
    """Return the means of the same steps without MPI; one bucket contains all gradients."""
    import tensorflow as tf

    from labkit.compression import reduce_all

    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES])
    rngs = [np.random.default_rng(rank) for rank in range(ranks)]
    parts = range(len(SHAPES)) if compressor.by_layer else range(1)
    shapes = SHAPES if compressor.by_layer else [(int(ends[-1]),)]
    states = [[compressor.start(shapes[p], r, p, ranks) for r in range(ranks)] for p in parts]
    means = []
    for _ in range(STEPS):
        drawn = [[rng.standard_normal(s).astype("f4") for s in SHAPES] for rng in rngs]
        if not compressor.by_layer:
            drawn = [[np.concatenate([a.ravel() for a in arrays])] for arrays in drawn]
        step = []
        for part in parts:
            tensors = [tf.constant(arrays[part]) for arrays in drawn]
            reduced = reduce_all(compressor, tensors, states[part])
            states[part] = [each.state for each in reduced]
            step.append(np.asarray(reduced[0].mean))
        if not compressor.by_layer:
            pieces = zip(np.split(step[0], ends[:-1]), SHAPES, strict=True)
            step = [piece.reshape(shape) for piece, shape in pieces]
        means.append(step)
    return means


@pytest.mark.battery(0, 1)
@pytest.mark.parametrize(
    "algorithm",
    [
        "mpi",
        "ring",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("butterfly", "shared_memory", "tree")),
    ],
)
def test_ranks_get_what_generators_in_lockstep_get_and_nothing_is_lost(
    cluster: Cluster, algorithm: str
) -> None:
    ranks = 3
    told = cluster.call(over_mpi, FAMILY, algorithm, ranks=ranks)
    for number, compressor in enumerate(FAMILY):
        name = f"{type(compressor).__name__} by {algorithm}"
        means, (difference, allowed), calls, seconds = told[0][number]
        for other in told[1:]:
            for mine, theirs in zip(means, other[number][0], strict=True):
                for one, two in zip(mine, theirs, strict=True):
                    assert one.tobytes() == two.tobytes(), name
        for mine, wanted in zip(means, in_lockstep(compressor, ranks), strict=True):
            for one, two in zip(mine, wanted, strict=True):
                # Half-precision values are rounded during the reduction; the order of additions
                # depends on the algorithm.
                half = isinstance(compressor, Float16 | BFloat16)
                np.testing.assert_allclose(one, two, atol=2e-2 if half else 1e-4, err_msg=name)
        if not compressor.votes:
            assert difference <= allowed, name
        assert 1 <= calls <= 2, name
        assert seconds > 0


def test_the_law_is_broken_by_who_forgets_what_was_not_sent(cluster: Cluster) -> None:
    def work(communicator: Any) -> tuple[float, float]:
        import tensorflow as tf

        from labkit.compression import TopK
        from labkit.exchange import Exchange
        from labkit.worker.gradient_log import Audit

        exchange = Exchange(communicator, "mpi", compressor=TopK(ratio=0.1))
        audit = Audit(communicator, remembers=True)
        exchange.watchers.append(
            lambda bucket, layers, seen: audit.observe(
                bucket, layers, type(seen)(seen.given, seen.sent, seen.mean, 0 * seen.given)
            )
        )
        exchange.mean([tf.range(20.0)])
        return audit.difference()

    difference, allowed = cluster.call(work, ranks=2)[0]
    assert difference > 100 * allowed


def test_what_is_not_finite_is_reported_with_layer_and_rank(cluster: Cluster) -> None:
    def work(communicator: Any) -> None:
        import tensorflow as tf

        from labkit.compression import TopK
        from labkit.exchange import Exchange

        gradients = [tf.ones(3), tf.constant([1.0, np.nan if communicator.rank == 1 else 1.0])]
        exchange = Exchange(communicator, "mpi", compressor=TopK())
        exchange.mean(gradients, names=["front/kernel", "back/kernel"])

    with pytest.raises(RankError, match="back/kernel on rank 1 is infinite or NaN"):
        cluster.call(work, ranks=2)


def test_what_a_compressor_makes_infinite_is_reported_with_the_layer(cluster: Cluster) -> None:
    def work(communicator: Any) -> None:
        import tensorflow as tf

        from labkit.exchange import Exchange

        compressor = {"name": "ErrorFeedback", "inner": {"name": "Float16"}}
        exchange = Exchange(communicator, "mpi", compressor=compressor)
        large = 1e30 if communicator.rank == 1 else 1.0
        exchange.mean([tf.ones(3), tf.constant([large, 1.0])], names=["front", "back"])

    with pytest.raises(
        RankError, match="gradient of back is finite, but after compression with ErrorFeedback"
    ):
        cluster.call(work, ranks=2)


def test_an_overflow_under_loss_scaling_is_everyones_and_memory_does_not_keep_it(
    cluster: Cluster,
) -> None:
    def work(communicator: Any) -> list[list[float]]:
        import tensorflow as tf

        from labkit.compression import ErrorFeedback, TopK
        from labkit.exchange import Exchange

        compressor = ErrorFeedback(inner=TopK(ratio=0.5, threshold="exact"))
        exchange = Exchange(communicator, "mpi", compressor=compressor)
        found = []
        # Without the loss scale, the residual of the first step is 1, whatever scale comes later.
        for scale, values in ((8.0, [1.0, 3.0]), (8.0, [1.0, np.inf]), (4.0, [3.0, 0.0])):
            own = values if communicator.rank == 0 or np.isfinite(values[1]) else [1.0, 2.0]
            gradient = tf.constant(own) * scale
            mean = exchange.mean([gradient], scale=tf.constant(scale))[0]
            found.append((mean.numpy() / scale).tolist())
        return found

    first, second = cluster.call(work, ranks=2)
    assert first[0] == second[0] == [0.0, 3.0]
    assert not np.isfinite(first[1]).any()
    assert not np.isfinite(second[1]).any()
    assert first[2] == second[2] == [4.0, 0.0]


def test_ranks_count_by_their_rows(cluster: Cluster) -> None:
    def work(communicator: Any) -> list[float]:
        import tensorflow as tf

        from labkit.compression import Float16
        from labkit.exchange import Exchange

        exchange = Exchange(communicator, "mpi", compressor=Float16())
        own = tf.constant([float(communicator.rank), 4.0])
        return list(exchange.mean([own], tf.constant(1 + 2 * communicator.rank))[0].numpy())

    for mean in cluster.call(work, ranks=2):
        assert mean == [0.75, 4.0]


@pytest.mark.parametrize("schedule", ["overlap", "staggered"])
def test_buckets_keep_memories_of_their_own(cluster: Cluster, schedule: str) -> None:
    def work(communicator: Any, schedule: str) -> list[Any]:
        import tensorflow as tf

        from labkit.compression import ErrorFeedback, TopK
        from labkit.exchange import Exchange
        from labkit.worker.gradient_log import Audit

        compressor = ErrorFeedback(inner=TopK(ratio=0.1))
        exchange = Exchange(communicator, "ring", schedule, 4 * 100, compressor)
        audit = Audit(communicator, remembers=True)
        exchange.watchers.append(audit.observe)
        rng = np.random.default_rng(communicator.rank)
        traced = tf.function(exchange.mean)
        for _ in range(4):
            traced([tf.constant(rng.standard_normal(n).astype("f4")) for n in (150, 70, 10)])
        return [len(exchange.buckets), audit.difference()]

    for buckets, (difference, allowed) in cluster.call(work, schedule, ranks=2):
        assert buckets == (3 if schedule == "overlap" else 1)
        assert difference <= allowed


def test_the_microscope_looks_at_the_step_in_which_gradients_were_packed(cluster: Cluster) -> None:
    """With "priority", a bucket may be served after one rank has begun the next step."""

    def work(communicator: Any) -> list[int]:
        import time

        import tensorflow as tf

        from labkit.exchange import Exchange

        exchange = Exchange(communicator, "ring", "overlap", compressor="Int8")
        steps: list[int] = []
        exchange.watchers.append(lambda bucket, layers, seen: steps.append(seen.step))
        gradient = tf.ones(9)
        exchange.prepare([gradient], ["kernel"])
        for step in range(3):
            exchange.timeline.step = step
            time.sleep(0.05 * communicator.rank)  # no rank is served before this one
            exchange.issue([gradient], tf.constant(1, tf.int64))
            exchange.timeline.step = step + 1
            exchange.wait([0])
        return steps

    assert cluster.call(work, ranks=2) == [[0, 1, 2]] * 2


def test_one_rank_alone_goes_through_the_compressor_too(cluster: Cluster) -> None:
    def work(communicator: Any) -> list[float]:
        import tensorflow as tf

        from labkit.compression import TopK
        from labkit.exchange import Exchange

        exchange = Exchange(communicator, compressor=TopK(ratio=0.5, threshold="exact"))
        return list(exchange.mean([tf.constant([1.0, -3.0])])[0].numpy())

    assert cluster.call(work, ranks=1) == [[0.0, -3.0]]


def test_buckets_that_leave_before_an_overflow_is_known_are_refused(cluster: Cluster) -> None:
    def work(communicator: Any) -> None:
        import tensorflow as tf

        from labkit.compression import TopK
        from labkit.exchange import Exchange

        exchange = Exchange(communicator, "ring", "overlap", compressor=TopK())
        exchange.mean([tf.ones(3)], scale=tf.constant(8.0))

    with pytest.raises(RankError, match=r"loss scaling: .*use schedule='sequential'"):
        cluster.call(work, ranks=2)


def test_each_layer_has_its_own_bits_under_the_microscope(cluster: Cluster) -> None:
    def work(communicator: Any) -> list[Any]:
        import tensorflow as tf

        from labkit.compression import PowerSGD, TopK
        from labkit.exchange import Exchange
        from labkit.exchange.compressed import CompressionStats

        found = []
        for compressor in (PowerSGD(approximation_rank=1), TopK(ratio=0.1, threshold="exact")):
            exchange = Exchange(communicator, "mpi", compressor=compressor)
            microscope = CompressionStats(communicator, 1)
            exchange.watchers.append(microscope.observe)
            exchange.mean([tf.random.normal((20, 30)), 10 * tf.range(60.0)], names=["a", "b"])
            found.append({row["layer"]: row["bits_per_parameter"] for row in microscope.rows})
        return found

    by_layer, flat = cluster.call(work, ranks=2)[0]
    assert by_layer["a"] == pytest.approx(32 * (20 + 30) / 600)
    assert by_layer["b"] == 32
    assert flat["a"] < flat["all layers"] < flat["b"]


def test_books_without_an_entry_do_not_pass(cluster: Cluster) -> None:
    def work(communicator: Any) -> tuple[float, float]:
        from labkit.worker.gradient_log import Audit

        return Audit(communicator, remembers=True).difference()

    difference, allowed = cluster.call(work, ranks=2)[0]
    assert difference > allowed
