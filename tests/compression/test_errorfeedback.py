"""Test that error feedback loses nothing with any compressor inside, or refuses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labkit.common.errors import InvalidInput
from labkit.compression import COMPRESSORS, QSGD, Compressor, Int8, TernGrad, reduce_all
from labkit.compression.dgc import DGC
from labkit.compression.powersgd import PowerSGD
from labkit.compression.signs import SignSGD
from labkit.compression.sparsification import RandomK, Threshold, TopK
from labkit.compression.wrappers import Chain, ErrorFeedback

QUANTIZERS = [
    *(
        kind()
        for kind in COMPRESSORS.values()
        if kind not in (Chain, QSGD, TernGrad)
        and not (kind.sparse or kind.memory or kind.votes or kind is PowerSGD)
    ),
    QSGD(levels=127),
]
SPARSE = [TopK(ratio=0.1), TopK(ratio=0.1, threshold="exact"), Threshold(value=1), RandomK()]
INNER = [
    *SPARSE,
    PowerSGD(),
    Int8(channels=True),
    *QUANTIZERS,
    *(Chain(first=TopK(ratio=0.2), second=second) for second in QUANTIZERS),
    *(Chain(first=RandomK(ratio=0.2), second=second) for second in QUANTIZERS),
]


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Run functions without compilation; compiling them for each length would take minutes."""
    import tensorflow as tf

    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


def check_conservation(inner: Compressor, steps: list[list[np.ndarray]]) -> None:
    """Check for each rank and step that sent + residual = gradient + old residual."""
    import tensorflow as tf

    compressor = ErrorFeedback(inner=inner)
    shape = steps[0][0].shape
    ranks = len(steps[0])
    states = [compressor.start(shape, rank, ranks=ranks) for rank in range(ranks)]
    for gradients in steps:
        old = [compressor.residual(state).numpy() for state in states]
        reduced = reduce_all(compressor, [tf.constant(g) for g in gradients], states)
        states = [each.state for each in reduced]
        for each, gradient, before in zip(reduced, gradients, old, strict=True):
            after, sent = compressor.residual(each.state).numpy(), each.sent.numpy()
            assert after.dtype == gradient.dtype
            largest = max(np.abs(part).max(initial=0) for part in (sent, after, gradient, before))
            kind = np.finfo(gradient.dtype)
            limit = 4 * kind.eps * largest + 16 * kind.tiny  # TensorFlow rounds tiny values to 0
            np.testing.assert_allclose(sent + after, gradient + before, rtol=0, atol=limit)
            np.testing.assert_array_equal(each.mean, reduced[0].mean)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("inner", INNER, ids=repr)
@given(
    n=st.sampled_from([0, 1, 2, 7, 33]),
    dtype=st.sampled_from(["float32", "float64"]),
    values=st.lists(st.floats(-100, 100, width=32, allow_subnormal=False), min_size=1, max_size=20),
)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_is_lost(inner: Compressor, n: int, dtype: str, values: list[float]) -> None:
    drawn = np.resize(np.array(values, dtype), (2, 2, n))
    check_conservation(inner, [list(step) for step in drawn])


@pytest.mark.parametrize("inner", INNER, ids=repr)
def test_nothing_is_lost_by_compiled_functions(inner: Compressor) -> None:
    shape = (12, 10) if inner.by_layer else (120,)
    drawn = np.random.default_rng(0).standard_normal((2, 3, *shape)).astype("float32")
    check_conservation(inner, [list(step) for step in drawn])


def test_elements_that_wait_are_sent_in_the_end() -> None:
    gradient = np.linspace(0.5, 1, 20)
    compressor = ErrorFeedback(inner=TopK(ratio=0.1))
    state, total = compressor.start([20]), np.zeros(20)
    for _ in range(200):
        reduced = reduce_all(compressor, [gradient], [state])[0]
        state, total = reduced.state, total + reduced.mean.numpy()
    np.testing.assert_allclose(total / 200, gradient, rtol=0.1)


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (DGC(), "already adds unsent values to the next step"),
        (ErrorFeedback(inner=TopK()), "already adds unsent values to the next step"),
        (SignSGD(), "not the mean of the sent tensors"),
        (RandomK(rescale=True), "residual would grow"),
        (QSGD(), "residual would grow"),
        (QSGD(levels=127, bucket=None), "residual would grow"),
        (TernGrad(clip=2.5), "residual would grow"),
        (Chain(first=TopK(), second=QSGD()), "residual would grow"),
        (3, "3 is not a compressor"),
    ],
    ids=repr,
)
def test_what_cannot_be_inside_is_refused_with_the_reason(inner: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        ErrorFeedback(inner=inner)


@pytest.mark.parametrize(
    "inner",
    [
        pytest.param(one, marks=pytest.mark.slow if isinstance(one, Chain) else ())
        for one in INNER
        if not one.by_layer
    ],
    ids=repr,
)
def test_the_residual_does_not_grow_for_ever(inner: Compressor) -> None:
    random = np.random.default_rng(0)
    compressor = ErrorFeedback(inner=inner)
    state, norms = compressor.start([600]), []
    for _ in range(120):
        gradient = random.standard_normal(600).astype("float32")
        state = reduce_all(compressor, [gradient], [state])[0].state
        norms.append(float(np.linalg.norm(compressor.residual(state))))
    # With top 10 %, an element waits ten steps; with random 1 %, it waits a hundred. Thus the
    # residual's norm levels off, and does not double later.
    assert max(norms[60:]) <= 2.5 * max(max(norms[:60]), 1e-6)


def test_by_layer_follows_the_inner_one() -> None:
    assert ErrorFeedback(inner=PowerSGD()).by_layer
    assert not ErrorFeedback(inner=TopK()).by_layer


def test_json_nests_and_comes_back() -> None:
    compressor = ErrorFeedback(inner=TopK(ratio=0.5))
    record = compressor.to_json()
    inner = {"name": "TopK", "ratio": 0.5, "threshold": "sampled"}
    assert record == {"name": "ErrorFeedback", "inner": inner}
    assert ErrorFeedback(inner=record["inner"]) == compressor
    assert ErrorFeedback(inner="TopK").inner == TopK()
    assert hash(ErrorFeedback(inner=inner)) == hash(compressor)


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(InvalidInput, match=r"unknown compressor 'Topk' .did you mean 'TopK'"):
        ErrorFeedback(inner="Topk")
    with pytest.raises(InvalidInput, match="TopK has no 'ration'"):
        ErrorFeedback(inner={"name": "TopK", "ration": 0.1})
