"""Test that a verdict claims no more than its seeds show, and that a target counts all costs."""

from __future__ import annotations

import math
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from sample_compression import STEPS, TOP_K, write_method
from sample_runs import write_run

from labkit.common.errors import InvalidInput
from labkit.records import store
from labkit.records.verdict import accuracies, arrivals, judge, judge_runs

SEEDS = st.lists(st.floats(0.05, 0.95), min_size=1, max_size=8)


@given(SEEDS, st.randoms(use_true_random=False), st.integers(1, 2))
@settings(max_examples=60)
def test_a_candidate_equal_to_its_baseline_has_no_loss(
    baseline: list[float], random: object, times: int
) -> None:
    candidate = baseline * times
    random.shuffle(candidate)  # type: ignore[attr-defined]
    found = judge(candidate, baseline)
    assert found.kind != "loss"
    assert not found.sentence.startswith("a loss")


@given(SEEDS, SEEDS, st.floats(0.001, 0.5))
@settings(max_examples=60)
def test_a_candidate_whose_best_seed_is_below_the_worst_never_has_no_loss(
    candidate: list[float], baseline: list[float], gap: float
) -> None:
    shift = min(baseline) - gap - max(candidate)
    found = judge([each + shift for each in candidate], baseline)
    assert found.kind != "no loss"
    assert not found.sentence.startswith("no loss")


@given(SEEDS, SEEDS)
@settings(max_examples=60)
def test_no_loss_means_an_interval_that_stays_above_the_worst_seed(
    candidate: list[float], baseline: list[float]
) -> None:
    found = judge(candidate, baseline)
    if found.kind == "no loss":
        assert min(baseline) <= found.mean_low <= found.mean_high
        assert found.high >= 0
    if found.kind == "loss":
        assert found.low <= found.difference <= found.high < 0
    if min(len(candidate), len(baseline)) == 1:
        assert found.kind == "none"


def test_the_interval_is_welchs() -> None:
    from scipy import stats

    random = np.random.default_rng(1)
    own, other = random.normal(0.8, 0.02, 5).tolist(), random.normal(0.82, 0.01, 8).tolist()
    found = judge(own, other)
    expected = stats.ttest_ind(own, other, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    alone = stats.ttest_1samp(own, 0.0).confidence_interval(0.95)
    assert (found.mean_low, found.mean_high) == pytest.approx((alone.low, alone.high))


def test_many_close_seeds_are_no_loss_and_few_are_no_verdict() -> None:
    spread = [0.90, 0.92, 0.91, 0.905, 0.915, 0.91, 0.912, 0.908]
    assert judge(spread, spread).kind == "no loss"
    assert judge(spread, spread).sentence.startswith(
        "no loss of accuracy: the 95 % interval of the mean"
    )
    wide = judge(spread[:2], spread[:2])
    assert wide.kind == "none"
    assert "seeds vary too much; accuracy differs by 0 points (95 % interval" in wide.sentence


def test_a_loss_is_said_with_its_interval_and_a_small_one_is_called_so() -> None:
    baseline = [0.90, 0.92] * 10
    found = judge([each - 0.3 for each in baseline], baseline)
    assert "a loss of 30 points of accuracy (95 % interval -31 to -29, 20 agai" in found.sentence
    small = judge([0.901] * 5, baseline)
    assert small.kind == "loss"  # inside the baseline's range, but significant
    assert "less than the range of the baseline's seeds" in small.sentence


def test_a_sure_gain_is_no_loss() -> None:
    assert judge([0.95, 0.951, 0.952], [0.90, 0.91, 0.905]).kind == "no loss"


def test_one_seed_is_no_verdict_and_says_what_would_be() -> None:
    found = judge([0.8], [0.9, 0.91])
    assert math.isnan(found.low)
    assert found.sentence.startswith("no verdict: one seed (80.00% against 90.50%); give repeats=8")
    assert "one seed of the baseline" in judge([0.8, 0.8], [0.9]).sentence
    assert judge([], [0.9]).sentence == "no verdict, because there is no test accuracy"


def test_accuracies_are_those_of_the_seeds_that_completed(tmp_path: Path) -> None:
    run = write_method(tmp_path, [0.9, 0.8, 0.7])
    assert accuracies(run) == {0: 0.9, 1: 0.8, 2: 0.7}
    store.fail(run.seeds[1].path, "RankFailed: rank 1")
    assert accuracies(run) == {0: 0.9, 2: 0.7}
    baseline = write_method(tmp_path, [0.9, 0.91])
    assert judge_runs(run, baseline).candidate == (0.9, 0.7)


def test_a_target_counts_everything_from_step_0_on(tmp_path: Path) -> None:
    run = write_method(
        tmp_path, [0.9, 0.7], codec=1.0, payload=1000, sent=300, workers=2, compressor=TOP_K
    )
    found = arrivals(run, 0.8)
    assert found[1] is None  # this seed's best accuracy is 0.7
    first = found[0]
    assert first is not None
    assert first.step == 2 * STEPS  # accuracy is 0.7 after one epoch, 0.8 after two
    assert first.seconds == run.seeds[0].metrics["epochs"][1]["seconds"]
    assert first.payload_bytes == 2 * STEPS * 2 * 1000  # steps x ranks x bytes
    assert first.wire_bytes == 2 * STEPS * 2 * 300
    assert first.codec_seconds == pytest.approx(2 * STEPS * 1e-3)


def test_a_run_older_than_codecs_has_no_codec_seconds(tmp_path: Path) -> None:
    (only,) = arrivals(write_run(tmp_path), 0.4).values()
    assert only is not None
    assert only.codec_seconds == 0
    assert only.step == STEPS


def test_a_target_may_be_a_loss_and_nothing_else(tmp_path: Path) -> None:
    run = write_run(tmp_path)  # test losses 2.1, 1.05, 0.7
    (found,) = arrivals(run, 1.1, "val_loss").values()
    assert found is not None
    assert found.step == 2 * STEPS
    assert arrivals(run, 0.1, "val_loss") == {0: None}
    with pytest.raises(InvalidInput, match="allowed: val_accuracy, val_loss"):
        arrivals(run, 1.0, "loss")
