"""Test a model over a grid of ranks: it learns as one process does and sends the predicted data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit import Cluster, Experiment, InvalidInput, Run, SpatialParallel
from labkit.figures import grid_traffic, rank_table
from labkit.schedules.grid_layers import crossing

SMALL: dict[str, Any] = {
    "model": "locally_connected",
    "model_options": {"filters": [3, 2]},
    "dataset": "digits",
    "dataset_options": {"rows": 100, "test_rows": 10},
    "batch_size": 30,
    "workers": 4,
    "learning_rate": 0.05,
    "strategy": SpatialParallel(grid=(2, 2)),
}


def pooled() -> Any:
    """Return a model with uneven tiles, strides, pooling, separate activations and dense layers."""
    import keras
    from keras.layers import Activation, AveragePooling2D, Dense, Flatten, MaxPooling2D

    from labkit.models.unshared import LocallyConnected2D

    layers = [
        Activation("tanh"),
        AveragePooling2D((2, 1), strides=1),
        LocallyConnected2D(3, (2, 3), strides=(1, 2), activation="tanh"),
        MaxPooling2D((2, 1)),
        LocallyConnected2D(2, (1, 2), use_bias=False),
        keras.layers.LeakyReLU(),
        Flatten(),
        Activation("softplus"),
        Dense(7, "relu"),
        Dense(10),
    ]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def shared() -> Any:
    """Return a model with convolution kernels that all places share, one of them frozen."""
    import keras
    from keras.layers import Conv2D, Dense, Flatten

    frozen = Conv2D(4, 3, use_bias=False)
    frozen.trainable = False
    layers = [Conv2D(3, 2, activation="relu"), frozen, Conv2D(5, 2), Flatten(), Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


NAMED: dict[str, Any] = {"optimizer": "adam", "batch_size": 31}
CONVOLUTION = {"model": "cnn", "model_options": {"filters": [3, 2], "dense": 6}}
UNEVEN = {"model": pooled, "model_options": {}}
REPLICAS = {"strategy": SpatialParallel(grid=(1, 2))}
UNLIKE = REPLICAS | {"data_partition": "by_label"}  # the replicas have different labels


def verify(communicator: Any, experiments: list[Experiment], cache: str) -> list[dict[str, Any]]:
    from labkit.worker import equivalence
    from labkit.worker.feed import read

    os.environ["LABKIT_CACHE"] = cache
    return [dict(equivalence.verify(e, communicator, read(e, communicator))) for e in experiments]


@pytest.mark.slow
def test_replicas_with_unlike_data_are_exact(cluster: Cluster) -> None:
    cache = str(Path.cwd() / "cache")
    for (verdict,) in cluster.call(verify, [Experiment(**SMALL | UNLIKE)], cache):
        assert verdict["verdict"] == "passed", verdict
        assert verdict["max_abs_difference"] < 1e-10


@pytest.mark.slow
def test_twenty_steps_on_machines_are_those_of_one_process(cluster: Cluster) -> None:
    cases = [NAMED, CONVOLUTION, UNEVEN, UNEVEN | REPLICAS]
    experiments = [Experiment(**SMALL | case) for case in cases]
    for verdicts in cluster.call(verify, experiments, str(Path.cwd() / "cache")):
        for verdict in verdicts:
            assert verdict["verdict"] == "passed", verdict
            assert verdict["max_abs_difference"] < 1e-10
            assert "20 steps" in verdict["reason"]


def first_step(communicator: Any, experiments: list[Experiment]) -> list[dict[str, Any]]:
    """Return gradients of this rank and of the whole model, the loss, and the bytes sent."""
    import tensorflow as tf

    from labkit.model_parallel.losses import Losses, LossTargets
    from labkit.strategies.intra_layer import differentiated
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    found = []
    for experiment in experiments:
        session = TrainingSession(experiment, communicator, read(experiment, communicator))
        strategy: Any = experiment.strategy
        part, _ = strategy.start(session)
        losses = Losses(session.model, session.readers, parts=1)
        objective = strategy.objective(session.model, part, losses)
        gradients_of = differentiated(objective, part.model.trainable_variables)
        x, y = next(iter(session.feed.train))[:2]
        counts = losses.counts([LossTargets(y, None, losses.masks(x))], [1.0])[0]
        with tf.GradientTape() as tape:
            loss = session.model._compile_loss(y, session.model(x))
        model = session.model
        values = [v.value for v in model.trainable_variables]
        gradients = tape.gradient(loss, values)
        by_id = {id(v): g for v, g in zip(model.trainable_variables, gradients, strict=True)}
        own_loss, own = gradients_of(x, y, (None, counts))
        pairs = [(whole, mine, index) for whole, mine, index in part.pairs() if mine.trainable]
        same = [np.array_equal(whole.numpy()[index], mine.numpy()) for whole, mine, index in pairs]
        off = [
            np.abs(by_id[id(whole)].numpy()[index] - gradient.numpy()).max()
            for (whole, _, index), gradient in zip(pairs, own, strict=True)
        ]
        found.append(
            {
                "same": all(same),
                "off": max(off),
                "loss": (float(own_loss), float(loss)),
                "rows": len(x),
                "sent": part.describe(),
                "layers": part.model.planes,
                "weights": sum(int(np.prod(v.shape)) for v in part.model.trainable_variables),
            }
        )
    return found


@pytest.mark.slow
def test_gradients_are_those_of_the_whole_model_and_bytes_those_of_the_data(
    cluster: Cluster,
) -> None:
    cases = [NAMED, CONVOLUTION, UNEVEN | {"strategy": SpatialParallel()}]
    experiments = [Experiment(**SMALL | case | {"precision": "float64"}) for case in cases]
    ranks = cluster.call(first_step, experiments)
    for number, experiment in enumerate(experiments):
        strategy: Any = experiment.strategy
        grid = strategy.grid_of(4)
        machines = grid[0] * grid[1]
        for rank, results in enumerate(ranks):
            found = results[number]
            assert found["same"]
            assert found["off"] < 1e-12
            if rank % machines == 0:
                assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-12)
            data = crossing(found["layers"], grid)
            for place, row in enumerate(found["sent"], 1):
                forward, backward = data.sent(rank % machines, place)
                assert row["forward_bytes"] == 8 * found["rows"] * forward
                assert row["backward_bytes"] == 8 * found["rows"] * backward
                assert row["forward_wire_bytes"] == row["forward_bytes"]
        if isinstance(experiment.model, str):
            planes = experiment.grid_layers
            assert planes is not None
            assert [layer.name for layer in ranks[0][number]["layers"]] == [p.name for p in planes]
            assert ranks[0][number]["layers"] == planes
        kernels = [row["kernels_bytes"] for row in ranks[0][number]["sent"]]
        assert any(kernels) == (experiment.model == "cnn")
    whole = 6 * 6 * (9 + 1) * 3 + 4 * 4 * (27 + 1) * 2 + 10 * 33
    assert sum(results[0]["weights"] for results in ranks) == whole  # no weight is on two ranks


@pytest.fixture(scope="module")
def replicas(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run of two replicas on two ranks each, trained for two epochs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trained"))
        run = cluster.run(Experiment(**SMALL | REPLICAS, epochs=2), show=False)
        return Run(run.path.resolve())


@pytest.mark.slow
def test_a_run_of_two_replicas_is_exact_and_says_what_crossed(replicas: Run) -> None:
    run, planes = replicas, Experiment(**SMALL).grid_layers
    assert run.metrics["equivalence"]["verdict"] == "passed"
    assert run.metrics["equivalence"]["max_abs_difference"] < 1e-10
    assert run.model().count_params() == 6 * 6 * 10 * 3 + 4 * 4 * 28 * 2 + 10 * 33
    layers = run.layers
    assert planes is not None
    data = crossing(planes, (1, 2))
    per_step = 100 / 2 / 4 * 4  # a replica's samples per step in 4 steps, 4 bytes per value
    for rank in range(4):
        rows = layers[layers["rank"] == rank]
        sent = [data.sent(rank % 2, number) for number in range(1, len(planes))]
        assert list(rows["forward_bytes"] / per_step) == [forward for forward, _ in sent]
        assert list(rows["backward_bytes"] / per_step) == [backward for _, backward in sent]
    figure = grid_traffic(planes, (1, 2), run)
    assert "predicted 20 B forward, 20 B back; measured 20 B forward, 20 B back" in figure.alt
    assert "wall clock · network" in figure.layout.title.text


@pytest.mark.slow
def test_a_machine_holds_its_tiles_alone_while_it_trains(replicas: Run) -> None:
    table = rank_table(replicas)
    own = 4 * (18 * 10 * 3 + 8 * 28 * 2 + 33 * 5)  # half of the places and units
    assert list(table["weights_bytes"]) == [own] * 4
    assert list(table["whole_bytes"]) == [2 * own] * 4
    for kind in ("weights", "gradients", "optimizer"):
        assert (table[f"{kind}_bytes"] == table[f"{kind}_predicted"]).all()
    # Values kept per row are the input, the values read, those under each kernel, and outputs; rank
    # 0 of a grid also keeps all scores.
    row = 64 + 18 * (9 + 3) + (6 * 4 * 3 + 8 * (27 + 2)) + (32 + 5)
    expected = [15 * 4 * (row + scores) for scores in (10, 0)] * 2
    assert list(table["activations_predicted"]) == expected
    assert table["activations_error"].between(-0.05, 0).all()  # no layer reads the last outputs


@pytest.mark.slow
def test_ranks_predict_by_the_grid_what_the_whole_model_predicts(
    cluster: Cluster, replicas: Run
) -> None:
    x = np.random.default_rng(0).standard_normal((37, 8, 8, 1)).astype("float32")
    whole = replicas.model().predict(x, verbose=0)
    np.testing.assert_allclose(cluster.predict(replicas, x), whole, rtol=1e-5, atol=1e-6)
    found = cluster.predict(replicas, x, SpatialParallel(), batch_size=10)
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)


def narrow() -> Any:
    import keras
    from keras.layers import Dense, Flatten

    layers = [Flatten(), Dense(3, name="narrow"), Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def starts(communicator: Any, experiment: Experiment) -> None:
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    session = TrainingSession(experiment, communicator, read(experiment, communicator))
    strategy: Any = experiment.strategy
    strategy.start(session)


@pytest.mark.slow
def test_what_only_the_model_tells_is_refused_in_a_sentence(cluster: Cluster) -> None:
    experiment = Experiment(**SMALL | {"model": narrow, "model_options": {}})
    sentence = r"larger than layer 'narrow' of 3 units; allowed: \(1, 2\), \(2, 1\), \(1, 1\)"
    with pytest.raises(Exception, match=sentence):
        cluster.call(starts, experiment)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"workers": 6},
            r"grid=\(2, 2\) has 4 machines, .* workers=6 .*; allowed: \(1, 2\), \(2, 1\), \(2, 3\)",
        ),
        (
            {"strategy": SpatialParallel(grid=(1, 8)), "workers": 8},
            r"larger than layer 'locally_connected2d' of 6 × 6 places; allowed: \(1, 4\), \(2, 4\)",
        ),
        (
            {"strategy": SpatialParallel(grid=(3, 4)), "workers": 12},
            r"larger than layer 'dense' of 10 units; allowed: \(2, 3\), \(3, 2\)",
        ),
        (
            {"model": "rnn", "model_options": {}},
            "'rnn' cannot be divided .*: .*cnn, locally_conn",
        ),
        ({"model": "mlp", "model_options": {"dropout": 0.1}}, "use dropout=0"),
        ({"batch_weights": (1, 2, 1, 1)}, "machines of a grid work on the same rows"),
        ({"input_mode": "scatter"}, "machines of a grid work on the same rows"),
        ({"optimizer_options": {"clipnorm": 1.0}}, "clipnorm=1.0 needs .*; use clipvalue"),
        ({"optimizer": "lamb"}, "optimizer='lamb' needs whole variables"),
        ({"model_options": {"filters": [2] * 4}}, r"images of at least \[9, 9, channels\]"),
        ({"model_options": {"stride": 4}}, "stride=4 is impossible; allowed: distance between"),
        ({"strategy": "SpatialParallel", "workers": 17}, r"grid=\(1, 17\) is larger .*: \(1, 1\)"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_ranks_start(
    fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        Experiment(**SMALL | fields)


@pytest.mark.parametrize(
    ("grid", "sentence"),
    [((2,), "is not a pair of rows and columns"), ((0, 2), r"grid\[0\]=0 is impossible")],
)
def test_a_grid_has_rows_and_columns(grid: Any, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        SpatialParallel(grid=grid)


@pytest.mark.slow
def test_machines_wait_on_an_emulated_network_and_learn_the_same(cluster: Cluster) -> None:
    wired = [
        Experiment(**SMALL | {"network": "1GbE", "workers": 4, "model": model, "model_options": {}})
        for model in (shared, "locally_connected")
    ]
    for verdicts in cluster.call(verify, wired, str(Path.cwd() / "cache"), network="1GbE"):
        assert [verdict["verdict"] for verdict in verdicts] == ["passed", "passed"]
