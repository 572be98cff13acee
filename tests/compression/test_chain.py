"""Test chains of two compressors: their result, their payload size, and refused combinations."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from labkit.common.errors import InvalidInput
from labkit.compression import Compressor, Gather, Mean, Payload, Tensor, nbytes, reduce_all
from labkit.compression.dgc import DGC
from labkit.compression.powersgd import PowerSGD
from labkit.compression.signs import SignSGD
from labkit.compression.sparsification import RandomK, Threshold, TopK
from labkit.compression.wrappers import Chain, ErrorFeedback


class Half(Compressor):
    """A linear compressor that converts values to half precision."""

    linear: ClassVar[bool] = True

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        import tensorflow as tf

        return {"values": tf.cast(tensor, tf.float16)}

    def decode(self, payload: Payload) -> Tensor:
        import tensorflow as tf

        return tf.cast(payload["values"], tf.float32)


class Quarter(Compressor):
    """A compressor to 8 bits; a part of its payload has the same name as one of the first's."""

    unbiased: ClassVar[bool] = True

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        import tensorflow as tf

        scale = tf.reduce_max(tf.abs(tensor), keepdims=True)
        codes = tf.cast(tf.round(tf.math.divide_no_nan(tensor, scale) * 127), tf.int8)
        return {"codes": codes, "length": scale, "key": key}

    def decode(self, payload: Payload) -> Tensor:
        import tensorflow as tf

        return tf.cast(payload["codes"], tf.float32) * payload["length"] / 127


FIRST = [TopK(ratio=0.1), Threshold(value=0.5), RandomK(ratio=0.1)]
SECOND = [Half(), Quarter()]


def gradients(ranks: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((ranks, 1000)).astype("float32")


@pytest.mark.parametrize("second", SECOND, ids=repr)
@pytest.mark.parametrize("first", FIRST, ids=repr)
def test_ranks_get_the_mean_of_what_was_sent_and_that_is_near_the_first_ones(
    first: Compressor, second: Compressor
) -> None:
    chain, tensors = Chain(first=first, second=second), gradients(3)
    states = [chain.start([1000], rank) for rank in range(3)]
    for step in range(2):
        reduced = reduce_all(chain, list(tensors), states)
        states = [each.state for each in reduced]
        sent = np.mean([each.sent for each in reduced], 0)
        for rank, each in enumerate(reduced):
            key = first.start([1000], rank) + np.array([0, step])
            alone = first.decode(first.encode(tensors[rank], key))
            np.testing.assert_allclose(each.sent, alone, atol=0.02)
            np.testing.assert_array_equal(each.mean, reduced[0].mean)
            np.testing.assert_allclose(each.mean, sent, atol=5e-3)  # summed in half precision


def test_only_a_pair_of_linear_ones_is_summed_on_the_way() -> None:
    for first, second in ((f, s) for f in FIRST for s in SECOND):
        chain = Chain(first=first, second=second)
        request = next(chain.reduce(gradients(1)[0], chain.start([1000])))
        linear = isinstance(first, RandomK) and isinstance(second, Half)
        assert chain.linear == linear
        assert isinstance(request, Mean if linear else Gather)


def test_unbiased_only_if_both_are() -> None:
    assert Chain(first=RandomK(rescale=True), second=Quarter()).unbiased
    assert not Chain(first=RandomK(), second=Quarter()).unbiased
    assert not Chain(first=RandomK(rescale=True), second=Half()).unbiased


def test_the_first_ones_choice_is_shared_and_the_second_ones_is_not() -> None:
    chain = Chain(first=RandomK(), second=Quarter())
    keys = [chain.start([10], rank).numpy() for rank in range(2)]
    assert (keys[0][0] == keys[1][0]).all()
    assert (keys[0][1] != keys[1][1]).any()


def test_bytes_are_those_of_both_without_the_values_in_full() -> None:
    chain = Chain(first=TopK(ratio=0.1), second=Half())
    payload = chain.encode(gradients(1)[0], chain.start([1000]))
    assert list(payload) == ["indices", "length", "values"]
    assert nbytes(payload) == 3 * 4 + 4 + 100 * (4 + 2)


def test_parts_of_the_same_name_are_kept_apart() -> None:
    chain = Chain(first=TopK(ratio=0.1), second=Quarter())
    payload = chain.encode(gradients(1)[0], chain.start([1000]))
    assert payload["length"].numpy().tolist() == [1000]
    assert {"values.codes", "values.length", "values.key"} < set(payload)


@pytest.mark.parametrize("n", [0, 1, 7])
@pytest.mark.parametrize("first", FIRST, ids=repr)
def test_short_tensors(first: Compressor, n: int) -> None:
    chain = Chain(first=first, second=Half())
    array = np.full(n, 0.75, "float32")
    decoded = chain.decode(chain.encode(array, chain.start([n]))).numpy()
    assert decoded.shape == (n,)
    assert set(decoded) <= {0, 0.75}
    assert not chain.decode(chain.encode(0 * array, chain.start([n]))).numpy().any()


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (Half(), Quarter(), "Half does not select values that a second compressor"),
        (DGC(), Half(), "DGC does not select values"),
        (ErrorFeedback(inner=TopK()), Half(), "ErrorFeedback does not select values"),
        (Chain(first=TopK(), second=Half()), Half(), "Chain does not select values"),
        (TopK(), RandomK(), "RandomK drops elements"),
        (TopK(), Chain(first=TopK(), second=Half()), "Chain drops elements"),
        (TopK(), ErrorFeedback(inner=Half()), "ErrorFeedback adds unsent elements"),
        (TopK(), PowerSGD(), "PowerSGD needs complete matrices"),
        (TopK(), SignSGD(), "SignSGD counts the votes"),
    ],
    ids=repr,
)
def test_a_pair_without_sense_is_refused_with_the_reason(
    first: Compressor, second: Compressor, reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason):
        Chain(first=first, second=second)
