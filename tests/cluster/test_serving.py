"""Test that ranks serve the whole model's answers, and that wrong answers get no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from listening import watched

import labkit as lk
from labkit import Cluster, InvalidInput
from labkit.cluster import serve
from labkit.cluster.serving import OWN_NETWORK, WAYS
from labkit.records.analysis.serving_runs import ONE_PROCESS

X = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
WORKERS, UNDER_WAY = 3, 4  # requests in flight: enough to reach the first rank again
SMALL: dict[str, Any] = {
    "networks": [None, "1GbE"],
    "batch_sizes": [1, 7],
    "repeats": 2,
    "streams": 1,
    "under_way": UNDER_WAY,
}


def written(path: Path) -> Path:
    """Write a model of three blocks as a Keras file, and return its path."""
    import keras
    from keras.layers import Dense

    layers = [Dense(8, "relu"), Dense(9, "tanh"), Dense(4)]
    keras.Sequential([keras.Input((6,)), *layers]).save(path)
    return path


@pytest.mark.slow
def test_replicas_stages_and_slices_answer_batches_and_streams_over_each_network(
    cluster: Cluster, tmp_path: Path
) -> None:
    [file] = cluster.call(lambda _, path: written(path), tmp_path / "model.keras", ranks=1)
    with watched() as open_to_others:
        found = serve(cluster, file, X, workers=WORKERS, **SMALL)
    assert open_to_others == set()
    assert set(found.differences) == set(WAYS)
    assert max(found.differences.values()) <= found.allowed < 1e-3
    table = found.latency()
    assert list(dict.fromkeys(table["way"])) == [ONE_PROCESS, *WAYS]
    assert set(table["network"]) == {OWN_NETWORK, "1GbE"}
    assert (found.times["seconds"] > 0).all()
    streams = found.times[found.times["what"] == "stream"]
    assert set(streams["rows"]) == {UNDER_WAY, 7 * (UNDER_WAY)}
    whole = 4 * (6 * 8 + 8 + 8 * 9 + 9 + 9 * 4 + 4)
    held = found.weights.pivot(index="way", columns="rank", values="weights_bytes")
    assert held.loc["replicas"].tolist() == [whole] * WORKERS
    assert held.loc["stages"].sum() == whole
    assert (held.loc["slices"] < whole).all()


def in_order(communicator: Any, like: Any) -> list[Any]:
    """Return the answers to five different batches on rank 0, in order, for three strategies."""
    import keras

    from labkit.worker.answering import inference_server

    keras.utils.set_random_seed(0)
    strategies = (lk.AllReduce(), lk.Pipeline(), lk.TensorParallel())
    batches = [like + number for number in range(5)]
    answers = []
    for strategy in strategies:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(8), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        true = [np.asarray(model(x)) for x in batches]
        found = inference_server(communicator, model, strategy, true[0]).stream(batches)
        if communicator.rank == 0:
            answers.append(max(np.abs(y - t).max() for y, t in zip(found, true, strict=True)))
    return answers


def test_a_stream_is_answered_in_its_order(cluster: Cluster) -> None:
    first, *others = cluster.call(in_order, X, ranks=WORKERS)
    assert len(first) == 3
    assert max(first) < 1e-5
    assert others == [[]] * (WORKERS - 1)


def test_what_cannot_be_measured_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "model.keras"
    with pytest.raises(InvalidInput, match="repeats=0 is impossible"):
        serve(cluster, file, X, repeats=0)
    with pytest.raises(InvalidInput, match="requires at least two ranks"):
        serve(cluster, file, X, workers=1)
    with pytest.raises(InvalidInput, match="no measurement was requested"):
        serve(cluster, file, X, ways={})
    with pytest.raises(InvalidInput, match="has no model file"):
        serve(cluster, file, X)
    with pytest.raises(InvalidInput, match="batch_size=0 is impossible"):
        serve(cluster, file, X, batch_sizes=[0])
