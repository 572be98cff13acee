"""Test that a named model's number of blocks is known before the model is built."""

from __future__ import annotations

from typing import Any

import pytest

from labkit import datasets, models
from labkit.model_parallel.stages import BlockChain
from labkit.models import MODELS

pytestmark = pytest.mark.heavy  # the tests build models

CASES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("linear", {}, "digits", {}),
    ("linear", {}, "adult", {}),
    ("mlp", {}, "digits", {}),
    ("mlp", {"widths": []}, "adult", {}),
    ("mlp", {"widths": [3, 4, 5], "dropout": 0.1}, "synthetic", {}),
    ("cnn", {}, "mnist", {}),
    ("cnn", {"filters": [2], "dense": 3}, "digits", {}),
    ("rnn", {"units": 3}, "digits", {}),
    ("rnn", {"units": 3, "layers": 3}, "digits", {}),
    ("rnn", {"units": 3, "cell": "gru"}, "shakespeare", {"sequence_length": 5}),
    ("transformer", {"width": 8, "feed_forward": 4}, "shakespeare", {"sequence_length": 5}),
    (
        "transformer",
        {"layers": 3, "width": 4, "heads": 2, "dropout": 0.1},
        "shakespeare",
        {"sequence_length": 4},
    ),
    ("locally_connected", {"filters": [2]}, "digits", {}),
    ("locally_connected", {"filters": [2, 1, 2]}, "digits", {}),
]


@pytest.mark.parametrize(("name", "options", "dataset", "rows"), CASES, ids=str)
def test_blocks_known_by_name_are_those_of_the_built_model(
    name: str, options: dict[str, Any], dataset: str, rows: dict[str, Any]
) -> None:
    model = models.build(name, datasets.check(dataset, rows), **options)
    assert models.blocks(name, options) == len(BlockChain(model))


def test_every_small_model_is_held_against_its_chain() -> None:
    known = {name for name in MODELS if models.blocks(name, {}) is not None}
    assert known == {case[0] for case in CASES}
    assert models.blocks("vgg16", {}) is None
