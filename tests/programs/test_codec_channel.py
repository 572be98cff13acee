"""Test workers and servers that compress: an answer's loss is added to the next answer."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.compression import QSGD, Compressor, ErrorFeedback, PowerSGD, TopK
from labkit.programs import CodecChannel, Roles, placed

pytestmark = pytest.mark.heavy
SHAPES = [(8, 10), (10,)]


def roles() -> Roles:
    weights = np.random.default_rng(1).normal(size=90)
    return Roles(2, placed(SHAPES, 1, "round_robin"), 5, 1, weights, [0, 1, 2])


@pytest.mark.parametrize(
    "compressor",
    [TopK(ratio=0.1), ErrorFeedback(QSGD(levels=127)), ErrorFeedback(PowerSGD(1))],
    ids=repr,
)
def test_both_ends_know_what_the_worker_has_and_it_comes_to_the_weights(
    compressor: Compressor,
) -> None:
    worker, server = (CodecChannel(compressor, roles(), 0, 2) for _ in range(2))
    weights, apart = np.random.default_rng(2).normal(size=90), []
    for _ in range(60):
        has = worker.answered(server.answer(weights))
        apart.append(float(np.abs(weights - has).max()))
    assert apart[-1] < 1e-9 < apart[0]


def test_gradients_arrive_in_the_end_and_a_rare_one_waits_at_the_worker() -> None:
    compressor = ErrorFeedback(TopK(ratio=0.1, threshold="exact"))
    worker, server = (CodecChannel(compressor, roles(), 0, 2) for _ in range(2))
    gradient = np.arange(1.0, 91.0)
    first = server.pushed(worker.push(gradient))
    assert np.count_nonzero(first) == 9
    rest = sum(server.pushed(worker.push(np.full(90, 1e-9))) for _ in range(20))
    assert np.abs(first + rest - gradient).max() < 1e-6


def test_without_a_compressor_all_goes_as_it_is() -> None:
    talk, values = CodecChannel(None, roles(), 1, 2), np.ones(90)
    for said in (talk.push, talk.pushed, talk.answer, talk.answered):
        assert said(values) is values
