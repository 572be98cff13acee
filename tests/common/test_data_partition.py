"""Test how samples are divided among workers: complete, of given sizes, random or by label."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.common.rows import BatchPlan, partition_samples

kinds = st.one_of(
    st.sampled_from(["iid", "by_label"]),
    st.floats(1e-3, 1e3).map(lambda alpha: f"dirichlet({alpha})"),
)
sizes = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)


def labelled(count: int, classes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, count)


@given(sizes, kinds, st.integers(1, 12), st.integers(0, 2**31))
def test_each_sample_is_in_one_shard_and_shards_are_as_large_as_said(
    sizes: list[int], kind: str, classes: int, seed: int
) -> None:
    labels = labelled(sum(sizes), classes, seed)
    found = partition_samples(labels, sizes, kind, seed)
    assert [len(shard) for shard in found] == sizes
    assert sorted(np.concatenate(found)) == list(range(sum(sizes)))
    again = partition_samples(labels, sizes, kind, seed)
    assert all((one == other).all() for one, other in zip(found, again, strict=True))


def test_another_seed_divides_otherwise() -> None:
    labels = labelled(200, 10, 0)
    for kind in ("iid", "by_label", "dirichlet(0.3)"):
        one, other = (partition_samples(labels, [50] * 4, kind, seed)[0] for seed in (0, 1))
        assert (one != other).any()


@given(sizes, st.integers(1, 12), st.integers(0, 2**31))
def test_by_label_they_are_sorted_and_cut(sizes: list[int], classes: int, seed: int) -> None:
    labels = labelled(sum(sizes), classes, seed)
    found = partition_samples(labels, sizes, "by_label", seed)
    assert (labels[np.concatenate(found)] == np.sort(labels)).all()


def skew(kind: str) -> float:
    """Return the shards' mean total variation distance from the label shares of all samples."""
    labels = np.repeat(np.arange(10), 600)
    found = partition_samples(labels, [600] * 10, kind, 3)
    shares = np.array([np.bincount(labels[shard], minlength=10) / 600 for shard in found])
    return float(abs(shares - 0.1).sum(axis=1).mean() / 2)


def test_the_smaller_the_concentration_the_less_alike_shards_are() -> None:
    """Hsu et al. 2019, figure 1: from nearly equal label shares to one label per shard."""
    alphas = [10_000, 1000, 100, 10, 1]
    skews = [skew(f"dirichlet({alpha})") for alpha in alphas]
    assert skews == sorted(skews)
    assert skews[0] < 0.1
    assert skews[-1] > 0.6
    assert skew("iid") < 0.1
    assert skew("by_label") == pytest.approx(0.9)


def test_the_first_shard_follows_the_concentration() -> None:
    """A share of Dir(α p) has the variance p (1 - p) / (α + 1), also in the first shard."""
    labels = np.repeat(np.arange(2), 5000)
    shares = [
        labels[partition_samples(labels, [1000, 9000], "dirichlet(4)", seed)[0]].mean()
        for seed in range(400)
    ]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.05)
    assert np.var(shares) == pytest.approx(0.25 / 5, rel=0.25)


def test_workers_keep_their_shards_from_epoch_to_epoch() -> None:
    labels = labelled(90, 3, 1)
    plan = BatchPlan(90, 20, (1.0, 2.0), seed=4, owned=True, shards="by_label", labels=labels)
    for epoch in range(2):
        parts = [np.concatenate(plan.local(rank, epoch)) for rank in range(2)]
        assert labels[parts[0]].max() <= labels[parts[1]].min()
        assert [len(step) for step in plan.global_batches(epoch)] == [20, 20, 20, 20, 10]
    first, second = (plan.local(0, epoch)[0].tolist() for epoch in range(2))
    assert first != second


@pytest.mark.parametrize(
    "shards", ["by", "dirichlet", "dirichlet()", "dirichlet(a)", "dirichlet(0)", "dirichlet(inf)"]
)
def test_what_is_no_division_is_refused(shards: str) -> None:
    with pytest.raises(ValueError, match=r"is not known; allowed: 'iid', 'by_label', or"):
        partition_samples(4, [2, 2], shards)
