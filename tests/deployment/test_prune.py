"""Test that exactly the requested share of the smallest weights is pruned, and stays pruned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import datasets, models
from labkit.common.errors import InvalidInput
from labkit.deployment.magnitude import kernels, smallest
from labkit.deployment.prune import Prune

DATA = datasets.load("digits", rows=256, test_rows=64)


def model(name: str = "mlp", seed: int = 0, **options: Any) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    built = models.build(name, DATA, **({"widths": [24, 16]} if name == "mlp" else options))
    for weight in built.trainable_variables:
        if weight.name == "bias":
            weight.assign(0.01 * np.ones(weight.shape))
    return built


def zeros(of: Any) -> list[int]:
    return [int((weight.numpy() == 0).sum()) for weight in kernels(of)]


class Weight:
    """The properties of a variable that `smallest` needs."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values, np.float32)
        self.shape = self.values.shape

    def numpy(self) -> Any:
        return self.values


@settings(max_examples=30)
@given(
    st.lists(
        st.lists(st.integers(-3, 3), min_size=1, max_size=12).map(Weight), min_size=1, max_size=4
    ),
    st.floats(0, 1),
)
def test_exactly_the_share_is_chosen_and_nothing_smaller_is_left(
    weights: list[Any], share: float
) -> None:
    for scope in ("layer", "global"):
        chosen = smallest(weights, share, scope)
        groups = list(zip(weights, chosen, strict=True))
        if scope == "global":
            values = np.concatenate([weight.values for weight in weights])
            groups = [(Weight(values), np.concatenate(chosen))]
        for weight, gone in groups:
            assert gone.sum() == round(share * gone.size)
            if 0 < gone.sum() < gone.size:
                assert abs(weight.values[gone]).max() <= abs(weight.values[~gone]).min()


@pytest.mark.parametrize("name", ["mlp", "cnn", "rnn"])
def test_each_kernel_loses_the_share_and_biases_nothing(name: str) -> None:
    small = {"cnn": {"filters": [4], "dense": 8}, "rnn": {"units": 8}}
    before = model(name, **small.get(name, {}))
    pruned = Prune(sparsity=0.7, scope="layer").apply(before, DATA).model
    sizes = [weight.numpy().size for weight in kernels(before)]
    assert zeros(pruned) == [round(0.7 * size) for size in sizes]
    assert sum(zeros(before)) == 0  # the original model is unchanged
    rest = [w for w in pruned.trainable_variables if not w.name.endswith("kernel")]
    assert all((weight.numpy() != 0).all() for weight in rest)


def test_global_pruning_takes_the_share_of_all_and_more_of_small_kernels() -> None:
    before = model()
    first = kernels(before)[0]
    first.assign(first.numpy() * 0.01)
    pruned = Prune(sparsity=0.8, scope="global").apply(before, DATA)
    assert sum(zeros(pruned.model)) == round(
        0.8 * sum(weight.numpy().size for weight in kernels(before))
    )
    assert zeros(pruned.model)[0] > 0.99 * first.numpy().size
    assert pruned.what.startswith("80.0% ")


def test_masked_weights_stay_zero_through_training_and_the_others_learn() -> None:
    before = model()
    at_once = Prune(sparsity=0.8, scope="layer").apply(before, DATA).model
    trained = Prune(sparsity=0.8, scope="layer", epochs=2, batch_size=64).apply(before, DATA).model
    for old, new in zip(kernels(at_once), kernels(trained), strict=True):
        assert (new.numpy()[old.numpy() == 0] == 0).all()
        assert (new.numpy() != old.numpy()).any()


def test_gradual_pruning_follows_the_cubic_and_reaches_its_target() -> None:
    import keras

    from labkit.deployment.gradual import GradualPruning

    trained = model()
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(sum(zeros(trained)))

    prune = GradualPruning(final=0.9, initial=0.1, begin=2, steps=9, every=3)
    trained.compile("adam", models.task_loss(DATA.task))
    x, y = DATA.x_train, DATA.y_train
    trained.fit(x, y, batch_size=16, verbose=0, callbacks=[prune, Watch()])
    cubic = [0.9 - 0.8 * (1 - (t - 2) / 9) ** 3 for t in (2, 5, 8, 11)]
    assert prune.reached == [
        (t, pytest.approx(s)) for t, s in zip((2, 5, 8, 11), cubic, strict=True)
    ]
    size = sum(weight.numpy().size for weight in kernels(trained))
    wanted = [0, 0] + [round(share * size) for share in cubic[:3] for _ in range(3)]
    assert seen == wanted + [round(0.9 * size)] * (16 - len(wanted))


@pytest.mark.parametrize("rows", [1, 64, 65, 1000])
def test_prune_makes_a_ramp_that_ends_before_training_does(rows: int) -> None:
    steps, every = Prune(schedule="gradual", epochs=3, batch_size=64)._ramp(rows)
    assert every >= 1
    assert steps % every == 0
    assert steps <= 3 * -(-rows // 64) - 1


def test_gradual_prune_ends_at_its_sparsity() -> None:
    pruned = Prune(sparsity=0.75, schedule="gradual", epochs=2, batch_size=32).apply(model(), DATA)
    size = sum(weight.numpy().size for weight in kernels(pruned.model))
    assert sum(zeros(pruned.model)) == round(0.75 * size)
    assert not pruned.model.compiled


def test_impossible_prunings_are_refused() -> None:
    from labkit.deployment.gradual import GradualPruning

    with pytest.raises(InvalidInput, match=r"sparsity=1\.0 is impossible.*less than 1"):
        Prune(sparsity=1.0)
    with pytest.raises(InvalidInput, match="'layer' or 'global'"):
        Prune(scope="all")
    with pytest.raises(InvalidInput, match="epochs of at least 1"):
        Prune(schedule="gradual")
    with pytest.raises(InvalidInput, match="a multiple of every"):
        GradualPruning(final=0.5, steps=7, every=2)
    with pytest.raises(InvalidInput, match="0 <= initial <= final"):
        GradualPruning(final=0.5, initial=0.6)
