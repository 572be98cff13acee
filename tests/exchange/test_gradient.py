"""Test that ranks are told if their gradients, their layers or their exchanges differ."""

from __future__ import annotations

from typing import Any

import pytest

from labkit import Cluster
from labkit.exchange.gradient import renumber_names


def agreements(communicator: Any, cases: dict[str, Any]) -> dict[str, str]:
    """Return the error of each case; its message contains the names and options of both ranks."""
    import tensorflow as tf

    from labkit.communicator import Mismatch
    from labkit.exchange import Exchange

    told = {}
    for case, sides in cases.items():
        names, options = sides[communicator.rank]
        gradients = [
            tf.IndexedSlices(tf.zeros((1, 3)), tf.zeros(1, tf.int32), tf.constant((2**17, 3)))
            if name.startswith("words")
            else tf.zeros(3 if name != "large" else (2**17, 3))
            for name in names
        ]
        try:
            Exchange(communicator, **({"algorithm": "ring"} | options)).mean(gradients, None, names)
        except Mismatch as error:
            told[case] = str(error)
        else:
            told[case] = ""
    return told


AB, BA = ["a/kernel", "b/kernel"], ["b/kernel", "a/kernel"]
CASES: dict[str, tuple[tuple[list[str], dict[str, Any]], tuple[list[str], dict[str, Any]], str]] = {
    "two layers of one shape in another order": (
        *((AB, {}), (BA, {})),
        "rank 1 has the gradient float32[3] for b/kernel, but rank 0 has float32[3] for a/kernel",
    ),
    "two layers that Keras has renumber_names in another order": (
        *((["dense/kernel", "dense_1/kernel"], {}), (["dense_1/kernel", "dense/kernel"], {})),
        "the gradient float32[3] for dense_1/kernel, but rank 0 has float32[3] for dense/kernel",
    ),
    "a process that has made other layers before": (
        *((["dense/kernel", "dense_1/kernel"], {}), (["dense_4/kernel", "dense_11/kernel"], {})),
        "",
    ),
    "rows and a tensor": (
        *((["words"], {}), (["large"], {})),
        "float32[131072, 3] for large, but rank 0 has rows of float32[131072, 3] for words",
    ),
    "another schedule": (
        *((AB, {}), (AB, {"schedule": "overlap"})),
        "rank 1 exchanges gradients with schedule='overlap', but rank 0 with schedule='sequential'",
    ),
    "another algorithm": (
        *((AB, {}), (AB, {"algorithm": "tree"})),
        "rank 1 exchanges gradients with algorithm='tree', but rank 0 with algorithm='ring'",
    ),
    "another size of buckets": (
        *((AB, {}), (AB, {"bucket_bytes": 4})),
        "rank 1 exchanges gradients with bucket_bytes=4, but rank 0 with bucket_bytes=4194304",
    ),
    "another compressor": (
        *((AB, {}), (AB, {"compressor": "TopK"})),
        "rank 1 exchanges gradients with compressor={'name': 'TopK'",
    ),
}


@pytest.fixture(scope="module")
def told(cluster: Cluster) -> list[dict[str, str]]:
    """Return the errors that two ranks get, for all cases."""
    return cluster.call(agreements, {name: case[:2] for name, case in CASES.items()}, ranks=2)


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_are_told_what_differs(told: list[dict[str, str]], case: str) -> None:
    first, second = (found[case] for found in told)
    assert first == second
    assert CASES[case][2] in first
    assert bool(CASES[case][2]) == bool(first)


def test_names_are_those_of_a_process_that_made_no_other_layers() -> None:
    names = ["model_2/dense_9/kernel", "model_2/dense_10/kernel", "model_2/dense_9/bias"]
    assert renumber_names(names) == [
        "model/dense/kernel",
        "model/dense 1/kernel",
        "model/dense/bias",
    ]
    assert renumber_names(["dense/kernel", "dense_1/kernel"]) == renumber_names(
        ["dense_3/kernel", "dense_7/kernel"]
    )
    assert renumber_names(["block_1", "block_0"]) != renumber_names(["block_0", "block_1"])
