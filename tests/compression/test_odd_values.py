"""Test every compressor with extreme floats: finite values stay finite, and NaN is visible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from labkit.compression import (
    QSGD,
    Compressor,
    Encoder,
    Float16,
    Int8,
    PowerSGD,
    RandomK,
    SignSGD,
    TernGrad,
    parse,
    reduce_all,
    samples,
)
from labkit.compression.compressor import compiled

N = 2048
MOST = float(np.finfo("float32").max)
GAUSSIAN = np.random.default_rng(0).standard_normal(N)
SIGNS = np.sign(GAUSSIAN)
PLACES = np.arange(N)

FINITE: dict[str, np.ndarray] = {
    "1e30": GAUSSIAN * 1e30,
    "3e38": SIGNS * 3e38,
    "the greatest": SIGNS * MOST,
    "3e19, whose square is infinite": GAUSSIAN * 3e19,
    "1e-20, whose square is zero": GAUSSIAN * 1e-20,
    "denormal": GAUSSIAN * 1e-40,
    "zero": np.zeros(N),
    "one of 3e38": np.where(PLACES == 7, 3e38, GAUSSIAN),
    "one denormal": np.where(PLACES == 7, 1e-45, 0),
    "mixed": GAUSSIAN * 10.0 ** np.where(PLACES % 2, 30, -38),
    "an element of 1e30": np.array([1e30]),
    "the greatest alone": np.array([MOST]),
    "a denormal alone": np.array([1e-45]),
    "none": np.array([]),
}
BAD: dict[str, np.ndarray] = {
    "one NaN": np.where(PLACES == 9, np.nan, GAUSSIAN),
    "last NaN": np.where(PLACES == N - 1, np.nan, GAUSSIAN),
    "one infinite": np.where(PLACES == 9, np.inf, GAUSSIAN),
    "one minus infinite": np.where(PLACES == 9, -np.inf, GAUSSIAN),
    "all NaN": np.full(N, np.nan),
    "NaN and infinite": np.where(PLACES % 2, np.nan, np.inf),
    "NaN alone": np.array([np.nan]),
}


def parts(compressor: Compressor) -> Iterator[Compressor]:
    """Yield a compressor and all compressors inside it."""
    yield compressor
    for field in type(compressor).model_fields:
        if isinstance(value := getattr(compressor, field), Compressor):
            yield from parts(value)


MORE = [
    *({"name": "TopK", "threshold": "exact"}, {"name": "TopK", "ratio": 0.3}),
    *({"name": "Int8", "block": 64}, {"name": "Int8", "channels": True}),
    *({"name": "QSGD", "levels": 1}, {"name": "QSGD", "levels": 127, "bucket": None}),
    *({"name": "TernGrad", "clip": 2.5}, {"name": "DGC", "clip_norm": 1.0}),
    *({"name": "RandomK", "rescale": True}, {"name": "PowerSGD", "warm_start": False}),
    {"name": "ErrorFeedback", "inner": "OneBit"},
    *({"name": "Chain", "first": "TopK", "second": each} for each in ("QSGD", "Int8", "Float16")),
]
ALL = [*(each for each in samples() if len([*parts(each)]) == 1), *map(parse, MORE)]
each_compressor = pytest.mark.parametrize("compressor", ALL, ids=repr)


def most(compressor: Compressor) -> float:
    """Return the largest size at which elements stay finite, according to the docstrings."""
    names = {type(each).__name__ for each in parts(compressor)}
    rescale = any(getattr(each, "rescale", False) for each in parts(compressor))
    limits = {"Float16": 65504.0, "BFloat16": 3.389e38, "PowerSGD": 1e38}
    return min([limits.get(name, MOST) for name in names]) / (N if rescale else 1)


def through(compressor: Compressor, values: np.ndarray, dtype: str = "float32") -> Any:
    """Return the result of reducing values of a single rank."""
    array = values.astype(dtype)
    array = array.reshape(-1, 32 if len(array) == N else 1) if compressor.by_layer else array
    return reduce_all(compressor, [array], [compressor.start(array.shape)])[0]


def visible(compressor: Compressor, reduced: Any) -> bool:
    """Return whether NaN is visible in the sent values and the mean, or in the residual."""
    waits = compressor.residual(reduced.state)
    seen = not np.isfinite(reduced.sent).all() and not np.isfinite(reduced.mean).all()
    return seen or (waits is not None and not np.isfinite(waits).all())


@each_compressor
def test_finite_values_stay_finite_and_others_are_seen(compressor: Compressor) -> None:
    hidden, spoilt = [], []
    for name, values in FINITE.items():
        if np.abs(values).max(initial=0) <= most(compressor):
            reduced = through(compressor, values)
            if not (np.isfinite(reduced.mean).all() and np.isfinite(reduced.sent).all()):
                spoilt.append(name)
    for name, values in BAD.items():
        if not visible(compressor, through(compressor, values)):
            hidden.append(name)
    # RandomK never looks at an element that it does not draw.
    drawn = any(type(each).__name__ == "RandomK" for each in parts(compressor))
    one = {"one NaN", "last NaN", "one infinite", "one minus infinite"}
    assert (spoilt, set(hidden) - (one if drawn else set())) == ([], set())


@pytest.mark.parametrize("compressor", [Float16(), parse("BFloat16")], ids=repr)
def test_casts_show_what_they_cannot_hold(compressor: Compressor) -> None:
    assert np.isinf(through(compressor, np.array([MOST])).mean).all()


@pytest.mark.parametrize("size", [1e-25, 1e-20, 1e19, 1e30])
@pytest.mark.parametrize(
    "compressor",
    [QSGD(), QSGD(levels=127, bucket=None), TernGrad(), TernGrad(clip=2.5), Int8(), PowerSGD()],
    ids=repr,
)
def test_the_size_of_a_gradient_is_no_matter(compressor: Compressor, size: float) -> None:
    """Relative to the gradient's size, the result equals that of a gradient of size 1."""
    unit = 2.0 ** np.round(np.log2(size))  # multiplication by a power of two is exact
    one = np.asarray(through(compressor, GAUSSIAN).mean, "float64")
    found = np.asarray(through(compressor, GAUSSIAN * unit).mean, "float64") / unit
    np.testing.assert_allclose(found, one, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (lambda: QSGD(), SIGNS * 3e38),
        (lambda: QSGD(levels=1), GAUSSIAN * 1e30),
        (lambda: QSGD(bucket=None), GAUSSIAN * 1e-20),
        (lambda: TernGrad(), SIGNS * 10.0 ** (PLACES % 38)),
    ],
)
def test_the_expectation_is_the_gradient(
    kind: Callable[[], Compressor], values: np.ndarray
) -> None:
    import tensorflow as tf

    compressor, draws = kind(), 100
    there, back = compiled(compressor, "encode"), compiled(compressor, "decode")
    tensor = tf.constant(values.astype("float32"))
    keys = [tf.constant([1, step]) for step in range(draws)]  # a Python list would be traced anew
    found = np.array([back(there(tensor, key)) for key in keys], "float64")
    unit = np.abs(values).max()
    errors = (found - values) / unit
    variance = (errors**2).sum(1).mean()
    assert variance > 0
    assert (errors.mean(0) ** 2).sum() <= 1.2 * variance / draws


@pytest.mark.parametrize("compressor", [QSGD(), TernGrad(clip=2.5), Int8()], ids=repr)
def test_double_precision_has_its_own_limits(compressor: Compressor) -> None:
    for size in (1e-200, 1e200):
        found = np.asarray(through(compressor, GAUSSIAN * size, "float64").mean)
        assert np.isfinite(found).all()
        assert np.abs(found).max() > size


def test_a_vote_with_nan_is_none() -> None:
    votes = [np.float32([1, -1]), np.float32([np.nan, 1]), np.float32([1, 1])]
    states = [SignSGD().start([2], rank) for rank in range(3)]
    assert np.isnan(reduce_all(SignSGD(), votes, states)[0].mean).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_one_end_shows_the_other_that_a_vector_is_no_vector_of_numbers(value: float) -> None:
    speaker = Encoder(RandomK(), [(64, 32)])
    speaker.encode(np.where(PLACES == 9, value, GAUSSIAN).astype("float32"))
    assert np.isnan(speaker.sent).any()
