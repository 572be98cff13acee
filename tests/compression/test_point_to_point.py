"""Test compression between two ranks: both know the same bits, and nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.compression import (
    COMPRESSORS,
    DGC,
    QSGD,
    BFloat16,
    Chain,
    Compressor,
    Decoder,
    Encoder,
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

pytestmark = pytest.mark.heavy
SHAPES = [(6, 40), (40,), (3, 2), ()]
SIZE = 240 + 40 + 6 + 1
STEPS = 5
SAID: list[Compressor] = [
    Float16(),
    BFloat16(),
    Int8(),
    Int8(channels=True),
    QSGD(levels=127),
    OneBit(),
    TopK(ratio=0.1, threshold="exact"),
    RandomK(ratio=0.1),
    Threshold(0.5),
    PowerSGD(2),
    Chain(first=TopK(ratio=0.1), second=Float16()),
]
UNSAID: list[Compressor] = [SignSGD(), TernGrad(), QSGD(), DGC(), RandomK(rescale=True)]
every = pytest.mark.parametrize("compressor", SAID, ids=repr)


def vectors(dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.normal(size=SIZE).astype(dtype) for _ in range(STEPS)]


def test_every_compressor_is_said_or_refused() -> None:
    known = {type(each) for each in [*SAID, *UNSAID]} | {ErrorFeedback}
    assert known == set(COMPRESSORS.values())
    assert not any(each.unsupported_reason() for each in SAID)
    assert all(each.unsupported_reason() for each in UNSAID)


@every
def test_all_is_understood_as_it_was_meant_and_what_was_not_said_waits(
    compressor: Compressor,
) -> None:
    speaker = Encoder(ErrorFeedback(compressor), SHAPES)
    listener = Decoder(compressor, SHAPES, "float64")
    given = sent = np.zeros(SIZE)
    for values in vectors("float64"):
        heard = listener.decode(speaker.encode(values))
        assert heard.tobytes() == speaker.sent.tobytes()
        given, sent = given + values, sent + heard
        assert speaker.residual is not None
        assert np.abs(sent + speaker.residual - given).max() < 1e-12
    assert np.abs(given - sent).max() > 1e-9  # something waits


@pytest.mark.parametrize("compressor", [Float16(), TopK(ratio=0.1), PowerSGD(2)], ids=repr)
def test_vectors_of_single_precision_stay_so(compressor: Compressor) -> None:
    speaker, listener = Encoder(compressor, SHAPES), Decoder(compressor, SHAPES, "float32")
    for values in vectors("float32"):
        heard = listener.decode(speaker.encode(values))
        assert heard.dtype == np.float32
        assert heard.tobytes() == speaker.sent.tobytes()
    assert speaker.residual is None


def test_of_nothing_nothing_is_said_and_what_waits_waits_on() -> None:
    speaker = Encoder(ErrorFeedback(TopK(ratio=0.1, threshold="exact")), [(SIZE,)])
    listener = Decoder(TopK(ratio=0.1), [(SIZE,)], "float64")
    (values, *_) = vectors("float64")
    speaker.encode(values)
    waiting = speaker.residual
    said = speaker.encode(np.zeros(SIZE))
    assert said.nbytes == 0
    assert not listener.decode(said).any()
    np.testing.assert_array_equal(speaker.residual, waiting)


def test_bytes_are_those_of_the_payloads() -> None:
    few = TopK(ratio=0.1, threshold="exact")
    said = Encoder(few, [(1000,)]).encode(np.arange(1.0, 1001.0))
    assert said.nbytes == (4 + 100 * 4) + (4 + 100 * 8) + (4 + 4)  # indices, values and length
    low = Encoder(PowerSGD(2), [(60, 40), (40,)]).encode(np.ones(60 * 40 + 40))
    assert low.nbytes == (4 + 8 * 2 * 60) + (4 + 8 * 2 * 40) + (4 + 4) + (4 + 8 * 40)


def test_a_part_without_weights_says_nothing() -> None:
    nothing = np.empty(0, np.float32)
    assert Encoder(Float16(), []).encode(nothing).nbytes == 0
    assert Decoder(Float16(), [], "float32").decode(np.empty(0, np.uint8)).shape == (0,)
