"""Test low-rank factors: full rank restores the kernel, and parameters follow the formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit import datasets, models
from labkit.common.errors import InvalidInput
from labkit.deployment import LowRank
from labkit.deployment.low_rank import factors, reduces_parameters

pytestmark = pytest.mark.heavy  # this file builds models

DATA = datasets.load("digits", rows=128, test_rows=64)


def answers(model: Any) -> Any:
    return np.asarray(model(DATA.x_test, training=False))


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4), (1, 7)])
def test_factors_of_full_rank_are_the_kernel(shape: tuple[int, int]) -> None:
    kernel = np.random.default_rng(0).normal(size=shape)
    first, second = factors(kernel, min(shape))
    assert first.shape == (shape[0], min(shape))
    assert first @ second == pytest.approx(kernel, abs=1e-12)


def test_truncated_factors_leave_the_smallest_singular_values() -> None:
    kernel = np.random.default_rng(0).normal(size=(9, 6))
    first, second = factors(kernel, 2)
    left = np.linalg.svd(kernel, compute_uv=False)[2:]
    assert np.linalg.norm(kernel - first @ second) == pytest.approx(np.sqrt((left**2).sum()))


def test_a_kernel_of_that_rank_gives_the_same_outputs() -> None:
    model = models.build("mlp", DATA, widths=[48, 48])
    draw = np.random.default_rng(0)
    for layer in model.layers:
        if hasattr(layer, "kernel"):
            m, n = layer.kernel.shape
            layer.kernel.assign(0.1 * draw.normal(size=(m, 5)) @ draw.normal(size=(5, n)))
    factored = LowRank(approximation_rank=5).apply(model, DATA)
    assert factored.what == "3 of 3 Dense layers are replaced by two factors each"
    assert answers(factored.model) == pytest.approx(answers(model), abs=1e-4)


def test_parameters_follow_the_formula_and_layers_that_would_grow_stay(tmp_path: Path) -> None:
    model = models.build("cnn", DATA, filters=[4], dense=32)  # Dense: 36x32, 32x10
    method = LowRank(approximation_rank=8)
    factored, what = method.apply(model, DATA)
    assert what == "1 of 2 Dense layers are replaced by two factors each"
    assert not reduces_parameters((32, 10), 8)
    assert reduces_parameters((36, 32), 8)
    assert model.count_params() - factored.count_params() == 36 * 32 - 8 * (36 + 32)
    method.write(factored, tmp_path / "low.keras")
    back = method.read(tmp_path / "low.keras")
    assert np.array_equal(answers(back), answers(factored))


def test_training_the_factors_changes_them_and_leaves_no_optimizer() -> None:
    model = models.build("mlp", DATA, widths=[48])
    plain = LowRank(approximation_rank=4).apply(model, DATA).model
    trained = LowRank(approximation_rank=4, epochs=1).apply(model, DATA).model
    assert trained.count_params() == plain.count_params()
    assert not np.array_equal(answers(trained), answers(plain))
    assert not trained.compiled


def test_a_rank_that_saves_nothing_is_refused_with_what_would() -> None:
    model = models.build("mlp", DATA, widths=[48])
    with pytest.raises(InvalidInput, match=r"64x48 \(below 27.43\)"):
        LowRank(approximation_rank=28).apply(model, DATA)
    LowRank(approximation_rank=27).apply(model, DATA)
    with pytest.raises(InvalidInput, match="approximation_rank=0 is impossible"):
        LowRank(approximation_rank=0)
