"""Test gradients of large tables that are sent as rows: equal to dense ones, but fewer bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from labkit import Cluster
from labkit.exchange.autotune import MIN_TABLE_BYTES

WORDS, WIDTH = MIN_TABLE_BYTES // 64, 8  # shape of the smallest float64 table that is sent as rows
BATCH = 40


def slices(random: np.random.Generator, dtype: str = "float64", words: int = BATCH) -> Any:
    """Return a gradient of some rows of the table; some rows occur twice."""
    import tensorflow as tf

    indices = random.integers(0, WORDS, words)
    indices[words // 2 :] = random.choice(np.array([3, 5, WORDS - 1]), words - words // 2)
    rows = random.standard_normal((words, WIDTH))
    return tf.IndexedSlices(
        tf.constant(rows, dtype), tf.constant(indices), tf.constant((WORDS, WIDTH))
    )


def compare(communicator: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Return means as rows and as dense arrays, what was sent, and whether the result is rows."""
    import tensorflow as tf

    from labkit.exchange import Exchange

    case = {"dtype": "float64", "rows": None, "words": None, "tables": 1} | case
    random = np.random.default_rng(communicator.rank)
    words = BATCH if case["words"] is None else case["words"][communicator.rank]
    tables = [slices(random, case["dtype"], words) for _ in range(case["tables"])]
    count = None if case["rows"] is None else tf.constant(case["rows"][communicator.rank])
    if case["rows"] and case["rows"][communicator.rank] == 0:
        tables = [tf.IndexedSlices(t.values * np.nan, t.indices, t.dense_shape) for t in tables]
    gradients = [tf.constant(random.standard_normal(5)), *tables, None]
    found = []
    for given in (gradients, [g if g is None else tf.convert_to_tensor(g) for g in gradients]):
        exchange = Exchange(communicator, case["algorithm"], case["schedule"])
        step = tf.function(lambda: exchange.mean(given, count))  # noqa: B023
        step()
        before = communicator.traffic.copy()
        means = step()
        spent = communicator.traffic.since(before)
        found.append((means, spent.payload_bytes, spent.wire_bytes))
    (rows, payload, wire), (dense, *whole) = found
    slices_found = [mean for mean in rows if isinstance(mean, tf.IndexedSlices)]
    unique = [mean.indices.numpy() for mean in slices_found]
    pairs = zip(rows[:-1], dense[:-1], strict=True)
    return {
        "slices": [isinstance(mean, tf.IndexedSlices) for mean in rows[:-1]],
        "once": all(np.array_equal(np.unique(each), each) for each in unique),
        "off": max(_off(tf.convert_to_tensor(a).numpy(), b.numpy()) for a, b in pairs),
        "same": len(set(communicator.allgather(b"".join(u.tobytes() for u in unique)))) == 1,
        "bytes": (payload, wire, whole),
        "own": sum(len(np.unique(t.indices.numpy())) for t in tables),
    }


def _off(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.max(np.abs(found - wanted))) / max(1.0, float(np.max(np.abs(wanted))))


CASES: dict[str, dict[str, Any]] = {
    "ring": {"algorithm": "ring", "schedule": "sequential"},
    "the library": {"algorithm": "mpi", "schedule": "sequential"},
    "shared memory": {"algorithm": "shared_memory", "schedule": "sequential"},
    "overlapped": {"algorithm": "shared_memory", "schedule": "overlap"},
    "two tables": {"algorithm": "ring", "schedule": "sequential", "tables": 2},
    "uneven parts": {"algorithm": "ring", "schedule": "sequential", "rows": (3, 8)},
    "uneven parts in shared memory": {
        "algorithm": "shared_memory",
        "schedule": "sequential",
        "rows": (3, 8),
    },
    "an empty part by the library": {"algorithm": "mpi", "schedule": "sequential", "rows": (0, 3)},
    "no words at all": {"algorithm": "mpi", "schedule": "sequential", "words": (0, 0)},
    "more words than the table has": {
        "algorithm": "ring",
        "schedule": "sequential",
        "words": (3 * WORDS, BATCH),
    },
    "more words than the table has, by the library": {
        "algorithm": "mpi",
        "schedule": "overlap",
        "words": (7 * WORDS, 7 * WORDS),
    },
    "single precision": {
        "algorithm": "shared_memory",
        "schedule": "sequential",
        "dtype": "float32",
    },
}


def all_cases(communicator: Any) -> dict[str, dict[str, Any]]:
    return {name: compare(communicator, case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def compared(cluster: Cluster) -> list[dict[str, dict[str, Any]]]:
    """Return the results of all cases on two ranks."""
    return cluster.call(all_cases, ranks=2)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_equal_to_dense(compared: list[dict[str, dict[str, Any]]], name: str) -> None:
    single = CASES[name].get("dtype") == "float32"  # half the bytes: too small to be sent as rows
    for found in (each[name] for each in compared):
        assert found["slices"] == [False, *[not single] * CASES[name].get("tables", 1)]
        assert found["off"] <= (1e-6 if single else 1e-12)
        assert found["once"]
        assert found["same"]


@pytest.mark.parametrize("name", ["ring", "the library", "shared memory"])
def test_bytes_are_those_of_the_rows_and_their_indices(
    compared: list[dict[str, dict[str, Any]]], name: str
) -> None:
    row = 8 * WIDTH + 4  # bytes
    for found in (each[name] for each in compared):
        payload, wire, (dense_payload, dense_wire) = found["bytes"]
        assert payload == found["own"] * row + 8 * 5
        assert dense_payload >= 8 * WORDS * WIDTH + 8 * 5
        if name != "shared memory":
            assert wire < dense_wire / 100


def test_what_ranks_settle_and_what_one_rank_does(cluster: Cluster) -> None:
    def work(communicator: Any) -> Any:
        import tensorflow as tf

        from labkit.communicator import single_rank
        from labkit.exchange import Exchange

        table = slices(np.random.default_rng(0))
        whole = tf.convert_to_tensor(table).numpy()
        found = []
        for compressor in (None, "TopK"):
            exchange = Exchange(communicator, "ring", compressor=compressor)
            mean = exchange.mean([table, tf.constant([1.0])], names=["words", "bias"])[0]
            found.append((isinstance(mean, tf.IndexedSlices), exchange.describe()["rows"]))
        (one,) = Exchange(single_rank()).mean([table])
        indices = one.indices.numpy()
        once = len(set(indices.tolist())) == len(indices) < BATCH
        return found, once, float(np.abs(tf.convert_to_tensor(one).numpy() - whole).max())

    for found, once, off in cluster.call(work, ranks=2):
        assert found == [(True, ["words"]), (False, [])]
        assert once
        assert off <= 1e-12
