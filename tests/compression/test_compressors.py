"""Test all compressors alike: payload bytes, errors, means and variances."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.common.errors import InvalidInput
from labkit.compression import (
    COMPRESSORS,
    QSGD,
    BFloat16,
    Compressor,
    Float16,
    Int8,
    OneBit,
    SignSGD,
    TernGrad,
    from_bytes,
    nbytes,
    parse,
    reduce_all,
    to_bytes,
)
from labkit.compression.compressor import compiled
from labkit.programs.virtual_allreduce import handed

LENGTHS = [0, 1, 7, 8, 1000, 1001]
DTYPES = ["float32", "float64"]


@dataclass(frozen=True)
class Case:
    """A compressor and its known properties.

    payload_bytes: Number of bytes of n encoded elements of this size. error: Largest ‖ĝ - g‖; None:
        unlimited.
    variance: Largest E‖ĝ - g‖² of an unbiased compressor.
    """

    compressor: Compressor
    payload_bytes: Callable[[int, int], int]
    error: Callable[[np.ndarray], float] | None = None
    variance: Callable[[np.ndarray], float] | None = None


def norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.astype("float64")))


def greatest(array: np.ndarray) -> float:
    return float(np.abs(array).max(initial=0))


def blocks(array: np.ndarray, size: int | None) -> list[np.ndarray]:
    return [array] if size is None else [array[i : i + size] for i in range(0, len(array), size)]


def int8(block: int | None) -> Case:
    def error(array: np.ndarray) -> float:
        rounded = sum(len(part) * greatest(part) ** 2 for part in blocks(array, block))
        return 1.0001 * sqrt(rounded) / 254

    scales = (lambda n: 1) if block is None else (lambda n: ceil(n / block))
    return Case(Int8(block=block), lambda n, size: 4 + n + 4 + size * scales(n), error)


def qsgd(s: int, bucket: int | None, packed: Callable[[int], int]) -> Case:
    def variance(array: np.ndarray) -> float:
        parts = blocks(array, bucket)
        return sum(min(len(p) / s**2, sqrt(len(p)) / s) * norm(p) ** 2 for p in parts)

    def error(array: np.ndarray) -> float:
        parts = blocks(array, bucket)
        return 1.0001 * sqrt(sum(len(part) * norm(part) ** 2 for part in parts)) / s

    norms = (lambda n: 1) if bucket is None else (lambda n: ceil(n / bucket))
    return Case(
        QSGD(levels=s, bucket=bucket),
        lambda n, size: 4 + packed(n) + 4 + size * norms(n) + 8,
        error,
        variance,
    )


def terngrad_variance(array: np.ndarray) -> float:
    return 1.0001 * (greatest(array) * float(np.abs(array).sum()) - norm(array) ** 2)


CASES = {
    "float16": Case(
        Float16(), lambda n, _: 4 + 2 * n, lambda a: 2**-11 * norm(a) + 2**-25 * sqrt(len(a))
    ),
    "bfloat16": Case(BFloat16(), lambda n, _: 4 + 2 * n, lambda a: 2**-8 * norm(a)),
    "int8": int8(None),
    "int8 in blocks": int8(64),
    "qsgd 2 bits": qsgd(1, 512, lambda n: ceil(n / 4)),
    "qsgd 3 bits": qsgd(3, 100, lambda n: ceil(n / 4) + ceil(n / 8)),
    "qsgd 4 bits": qsgd(7, None, lambda n: ceil(n / 2)),
    "qsgd 8 bits": qsgd(127, 512, lambda n: n),
    "terngrad": Case(
        TernGrad(),
        lambda n, size: 4 + ceil(n / 4) + 4 + size + 8,
        lambda a: 1.0001 * sqrt(len(a)) * greatest(a),
        terngrad_variance,
    ),
    "terngrad clipped": Case(
        TernGrad(clip=2.5),
        lambda n, size: 4 + ceil(n / 4) + 4 + size + 8,
        lambda a: 1.0001 * sqrt(len(a)) * greatest(a),
    ),
    "onebit": Case(
        OneBit(),
        lambda n, size: 4 + ceil(n / 8) + 4 + 2 * size + 8,
        lambda a: 1.0001 * norm(a),
    ),
    "signmajority": Case(SignSGD(scale=0.1), lambda n, size: 4 + ceil(n / 8) + 4 + size + 8),
}

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def gaussian(n: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(dtype)


def encode(compressor: Compressor, array: np.ndarray, seed: int = 0) -> dict[str, Any]:
    import tensorflow as tf

    return dict(compressor.encode(tf.constant(array), key_of(compressor, seed=seed)))


def key_of(compressor: Compressor, rank: int = 0, seed: int = 0, step: int = 0) -> Any:
    """Return the random key of a training step."""
    import tensorflow as tf

    return tf.add(compressor.start([0], rank, seed), [0, step])


def decode(compressor: Compressor, payload: Any) -> np.ndarray:
    return np.asarray(compressor.decode(payload))


@each_dtype
@pytest.mark.parametrize("n", LENGTHS)
@each_case
def test_a_payload_takes_what_its_formula_says_and_comes_back_within_the_bound(
    case: Case, n: int, dtype: str
) -> None:
    import tensorflow as tf

    array = gaussian(n, dtype=dtype)
    payload = encode(case.compressor, array)
    data = to_bytes(payload)
    assert data.nbytes == nbytes(payload) == case.payload_bytes(n, array.itemsize)

    found, end = from_bytes(data, payload)
    assert end == data.nbytes
    decoded = decode(case.compressor, {name: tf.constant(part) for name, part in found.items()})
    np.testing.assert_array_equal(decoded, decode(case.compressor, payload))
    assert decoded.shape == (n,)
    assert decoded.dtype == (
        "float32" if isinstance(case.compressor, Float16 | BFloat16) else dtype
    )
    if case.error:
        assert norm(decoded - array) <= case.error(array)


@each_dtype
@pytest.mark.parametrize("shape", [(7,), (1, 1), (5, 3), (0, 3), (3, 3, 2, 4)], ids=str)
def test_int8_has_a_scale_for_each_output_channel(shape: tuple[int, ...], dtype: str) -> None:
    compressor = Int8(channels=True)
    channels = shape[-1] if len(shape) > 1 else 1  # a bias has one channel
    # The channels have very different sizes: a single scale would lose all but the last channel.
    array = gaussian(int(np.prod(shape)), dtype=dtype).reshape(-1, channels) * 1000.0 ** np.arange(
        channels, dtype=dtype
    )
    payload = encode(compressor, array.reshape(shape).astype(dtype))
    assert nbytes(payload) == 4 + array.size + 4 + array.itemsize * channels
    found = decode(compressor, payload).reshape(-1, channels)
    bound = 1.0001 * np.abs(array).max(0, initial=0) / 254
    assert (np.abs(found - array) <= bound).all()
    zeros = decode(compressor, encode(compressor, np.zeros(shape, dtype)))
    assert not zeros.any()


@pytest.mark.parametrize("n", [0, 1001])
@each_case
def test_compiled_it_says_the_same(case: Case, n: int) -> None:
    import tensorflow as tf

    array = gaussian(n)
    payload = compiled(case.compressor, "encode")(tf.constant(array), key_of(case.compressor))
    assert nbytes(payload) == case.payload_bytes(n, 4)
    found, _ = from_bytes(to_bytes(payload), payload)  # NumPy arrays, as received from other ranks
    decoded = np.asarray(compiled(case.compressor, "decode")(found))
    np.testing.assert_allclose(decoded, decode(case.compressor, payload), rtol=1e-6)
    if case.error:
        assert norm(decoded - array) <= case.error(array)


@each_dtype
@pytest.mark.parametrize("n", [0, 1, 1001])
@each_case
def test_zero_stays_zero(case: Case, n: int, dtype: str) -> None:
    zeros = np.zeros(n, dtype)
    assert not decode(case.compressor, encode(case.compressor, zeros)).any()
    assert not decode(case.compressor, encode(case.compressor, -zeros)).any()


FLOATS = st.floats(-(2.0**15), 2.0**15, width=32, allow_subnormal=False)


@settings(max_examples=15)
@given(values=st.lists(FLOATS, max_size=40), seed=st.integers(0, 5))
@each_case
def test_no_vector_comes_back_with_more_error_than_the_bound(
    case: Case, values: list[float], seed: int
) -> None:
    array = np.array(values, np.float32)
    decoded = decode(case.compressor, encode(case.compressor, array, seed))
    assert np.isfinite(decoded).all()
    if case.error:
        assert norm(decoded - array) <= case.error(array) + 1e-18  # floats have no smaller squares


@each_case
def test_unbiased_ones_have_the_published_mean_and_variance(case: Case) -> None:
    import tensorflow as tf

    if not case.compressor.unbiased:
        assert case.variance is None
        return
    assert case.variance
    array, draws = gaussian(1001), 200
    there, back = compiled(case.compressor, "encode"), compiled(case.compressor, "decode")
    keys = [key_of(case.compressor, step=step) for step in range(draws)]
    found = np.array([back(there(tf.constant(array), key)) for key in keys])
    errors = found.astype("float64") - array
    variance = float((errors**2).sum(1).mean())
    assert 0 < variance <= 1.02 * case.variance(array)
    # The mean of the draws deviates from g by chance only: E‖mean - g‖² = variance / draws.
    assert norm(errors.mean(0)) ** 2 <= 1.2 * variance / draws


@each_dtype
@each_case
def test_all_ranks_receive_the_mean_of_what_they_sent(case: Case, dtype: str) -> None:
    import tensorflow as tf

    compressor = case.compressor
    arrays = [gaussian(1001, rank, dtype) for rank in range(3)]
    states = [compressor.start([1001], rank) for rank in range(3)]
    done = reduce_all(compressor, [tf.constant(array) for array in arrays], states)
    for reduced, state in zip(done, states, strict=True):
        np.testing.assert_array_equal(reduced.mean, done[0].mean)
        assert not np.array_equal(reduced.state, state)
    if not compressor.votes:
        exact = np.mean([np.asarray(reduced.sent, "float64") for reduced in done], axis=0)
        # Half-precision values are summed in half precision, so a sum of 3 values is rounded twice.
        rounding = {"Float16": 2**-10, "BFloat16": 2**-7}.get(type(compressor).__name__, 1e-6)
        np.testing.assert_allclose(done[0].mean, exact, rtol=0, atol=3 * rounding * greatest(exact))


@each_case
def test_linear_payloads_may_be_averaged_before_they_are_decoded(case: Case) -> None:
    if not case.compressor.linear:
        return
    payloads = [encode(case.compressor, gaussian(1001, rank)) for rank in range(4)]
    early = sum(payload["values"] for payload in payloads) / 4
    late = np.mean([decode(case.compressor, payload) for payload in payloads], axis=0)
    rounding = 2**-10 if isinstance(case.compressor, Float16) else 2**-7
    np.testing.assert_allclose(
        decode(case.compressor, {**payloads[0], "values": early}), late, rtol=0, atol=4 * rounding
    )


@each_case
def test_a_compressor_is_its_name_and_fields(case: Case) -> None:
    text = json.loads(json.dumps(case.compressor.to_json()))
    assert text["name"] == type(case.compressor).__name__
    assert parse(text) == case.compressor


@pytest.mark.parametrize("kind", COMPRESSORS.values(), ids=list(COMPRESSORS))
def test_a_compressor_names_the_paper_that_its_docstring_cites_in_full(
    kind: type[Compressor],
) -> None:
    said = " ".join((kind.__doc__ or "").split())
    author, year = kind.paper.split(", ")[0].rsplit(" ", 1)
    assert author in said
    assert year in said
    assert kind.paper.split(", ")[1] in said


def test_random_choices_differ_between_ranks_and_steps_and_repeat_with_the_seed() -> None:
    import tensorflow as tf

    compressor, tensor = TernGrad(), tf.constant(gaussian(1001))

    def codes(rank: int, step: int) -> bytes:
        key = key_of(compressor, rank, 3, step)
        return bytes(compressor.encode(tensor, key)["codes"].numpy())

    assert codes(0, 0) == codes(0, 0)
    assert len({codes(rank, step) for rank in (0, 1) for step in (0, 1)}) == 4


def test_one_bit_says_the_means_of_both_sides() -> None:
    array = np.array([1, 3, -2, 0, 0, -4], np.float32)
    expected = [2, 2, -1.5, -1.5, -1.5, -1.5]
    np.testing.assert_array_equal(decode(OneBit(), encode(OneBit(), array)), expected)


def test_a_clipped_outlier_does_not_set_the_scale() -> None:
    array = gaussian(1000)
    array[0] = 1e3
    assert encode(TernGrad(), array)["scale"] == 1e3
    limit = 2.5 * array.std()
    np.testing.assert_allclose(encode(TernGrad(clip=2.5), array)["scale"], limit, rtol=1e-5)


def vote(arrays: list[list[float]], scale: float = 0.1, step: int = 0) -> list[float]:
    import tensorflow as tf

    compressor = SignSGD(scale=scale)
    states = [key_of(compressor, rank, step=step) for rank in range(len(arrays))]
    tensors = [tf.constant(array, tf.float32) for array in arrays]
    return list(reduce_all(compressor, tensors, states)[0].mean.numpy() / np.float32(scale))


def test_the_majority_wins_and_a_tie_gives_zero() -> None:
    three = [[1, 1, -1, 5], [9, -2, -1, -1], [1, -3, -1, -1]]
    assert vote(three) == [1, -1, -1, -1]
    assert vote([*three, [-8, 1, -1, -9]]) == [1, 0, -1, -1]
    six = [[1, -1, 1, 1]] * 3 + [[-1, 1, 1, 1]] * 3
    assert vote(six) == [0, 0, 1, 1]  # a tie, although 3 · 0.1 - 3 · 0.1 is not 0 in floats


def test_zeros_of_an_even_number_of_ranks_cancel_and_of_an_odd_one_alternate() -> None:
    rank = [[0, 0, 1, -1]]
    assert vote(rank * 4) == [0, 0, 1, -1]
    first, second = vote(rank * 3), vote(rank * 3, step=1)
    assert first[0] + second[0] == first[1] + second[1] == 0
    assert first[2:] == second[2:] == [1, -1]


def test_who_has_nothing_to_say_abstains() -> None:
    assert vote([[0, 0, 0, 0], [1, -1, 1, -1]]) == [1, -1, 1, -1]


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        (QSGD, {"levels": 128}, "levels=128 is impossible: input should be less than or equal"),
        (QSGD, {"bucket": 0}, "bucket=0 is impossible"),
        (Int8, {"block": 0}, "block=0 is impossible"),
        (TernGrad, {"clip": 0.0}, "clip=0.0 is impossible: input should be greater than 0"),
        (SignSGD, {"scale": -1.0}, "scale=-1.0 is impossible"),
        (OneBit, {"bits": 1}, "OneBit has no 'bits'; it has: no fields"),
    ],
)
def test_impossible_fields_are_refused(
    kind: type[Compressor], fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidInput, match=told):
        kind(**fields)


ASKS: list[Any] = [
    *("Float16", "RandomK", "OneBit", "TopK", "DGC", "PowerSGD"),
    {"name": "ErrorFeedback", "inner": "PowerSGD"},
    {"name": "Chain", "first": "TopK", "second": "QSGD"},
]


def test_what_it_asks_for_is_known_without_tensors() -> None:
    shape = (64, 48)
    values = np.random.default_rng(0).normal(size=shape).astype("float32")
    for compressor in map(parse, ASKS):
        given = values if compressor.by_layer else values.reshape(-1)
        state = compressor.start(given.shape, 0, 0, 2)
        seen: list[tuple[type, float]] = []
        reduce_all(
            compressor,
            [given, given],
            [state, compressor.start(given.shape, 1, 0, 2)],
            lambda requests: seen.append((type(requests[0]), handed(requests[0]))),  # noqa: B023
        )
        told = compressor.collectives(given.shape, seen[0][1])
        assert [kind for kind, _ in told] == [kind for kind, _ in seen], compressor
        assert [size for _, size in told] == pytest.approx([size for _, size in seen]), compressor
