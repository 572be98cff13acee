"""Test means of values near their type's limit, on every path, and refused types of values."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from labkit import Cluster
from labkit.communicator import ALGORITHMS

LARGE = {"float16": 6e4, "bfloat16": 3e38, "float32": 3e38, "float64": 1.5e308}
KINDS = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in LARGE}


def means(communicator: Any) -> dict[tuple[str, str], Any]:
    """Return means by algorithm and type: equal or unequal weights, private or shared memory."""
    found: dict[tuple[str, str], Any] = {}
    for algorithm in ALGORITHMS:
        for name, kind in KINDS.items():
            ends = []
            for weight in (1.0, float(communicator.rank + 1)):
                for buffer in (np.empty(5, kind), communicator.allocate(5, kind)):
                    buffer[...] = LARGE[name]
                    buffer[0] = -LARGE[name]
                    communicator.mean(buffer, weight, algorithm)
                    ends.append(buffer.astype(np.float64).tolist())
            found[algorithm, name] = ends
    return found


def test_a_mean_of_large_values_is_their_mean_by_every_algorithm(cluster: Cluster) -> None:
    for found in cluster.call(means, ranks=3):
        for (algorithm, name), ends in found.items():
            large = float(np.array(LARGE[name], KINDS[name]))
            for mean in ends:
                wanted = [-large, *[large] * 4]
                tolerance = 4 * float(ml_dtypes.finfo(KINDS[name]).eps)
                np.testing.assert_allclose(
                    mean, wanted, rtol=tolerance, err_msg=f"{algorithm} of {name}"
                )


def errors(communicator: Any) -> dict[str, float]:
    """Return the largest errors of float16 means, in units in the last place of the mean."""
    random = np.random.default_rng(communicator.rank)
    own = random.standard_normal(2000).astype(np.float16)
    exact = np.mean(communicator.allgather(own.astype(np.float64)), axis=0)
    found = {}
    for algorithm in ("mpi", "shared_memory"):
        buffer = own.copy()
        communicator.mean(buffer, 1.0, algorithm)
        found[algorithm] = float(np.max(np.abs(buffer - exact) / np.spacing(np.abs(buffer))))
    return found


def test_half_floats_are_averaged_in_single_and_rounded_once(cluster: Cluster) -> None:
    for found in cluster.call(errors, ranks=3):
        assert max(found.values()) < 0.51


def refusals(communicator: Any) -> dict[str, str]:
    from labkit.common.errors import InvalidInput

    flags, places = np.zeros(4, bool), np.arange(4, dtype="<i4")
    calls = {
        f"{algorithm} {name}": call
        for algorithm in ALGORITHMS
        for name, call in {
            "sum": lambda a: communicator.allreduce(flags, a),
            "mean": lambda a: communicator.mean(flags, 1.0, a),
            "sparse": lambda a: communicator.sparse_sum(places, flags, 9, a),
            "rows": lambda a: communicator.sum_rows(places, flags[:, None], 9, a),
            "mean of integers": lambda a: communicator.mean(places, 1.0, a),
        }.items()
    }
    told = {}
    for name, call in calls.items():
        try:
            call(name.split()[0])
        except InvalidInput as error:
            told[name] = str(error)
        else:
            told[name] = "nothing"
    return told


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_cannot_be_added_is_refused_in_words_on_every_path(
    cluster: Cluster, ranks: int
) -> None:
    for told in cluster.call(refusals, ranks=ranks):
        for name, text in told.items():
            given = "int32" if "integers" in name else "bool"
            verb = "averaged" if "mean" in name else "summed"
            assert f"a buffer of dtype {given} cannot be {verb}; allowed: float16" in text, name
            assert "astype" in text, name
