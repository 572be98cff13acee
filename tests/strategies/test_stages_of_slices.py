"""Test replicas x stages × slices: what they learn, hold, send and predict, and refusals."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit import Cluster, DelayedGradients, Experiment, InvalidInput, Layerwise, Pipeline
from labkit.figures import measured_pipeline, pipeline_table, predicted_pipeline, rank_table
from labkit.strategies import Strategy

FLOAT = 4
SMALL: dict[str, Any] = {
    "dataset": "digits",
    "dataset_options": {"rows": 100, "test_rows": 30},
    "batch_size": 30,
    "workers": 4,
    "verify": False,
}


# --- what they learn -----------------------------------------------------------------------------


def narrow() -> Any:
    """Return a model whose second stage has no layer to slice."""
    import keras
    from keras.layers import Dense, Flatten

    layers = [Flatten(), Dense(5, "tanh"), Dense(3, "tanh"), Dense(1), Dense(10, use_bias=False)]
    layers[-1].kernel_regularizer = keras.regularizers.L2(0.01)
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def branches() -> Any:
    """Return a model with sliced layers side by side, whose sums may arrive in any order."""
    import keras
    from keras.layers import Add, Dense, Flatten, LayerNormalization

    inputs = keras.Input((8, 8, 1))
    x = Dense(6)(Flatten()(inputs))
    for _ in range(2):
        sides = [Dense(6)(Dense(width, "gelu")(LayerNormalization()(x))) for width in (5, 7, 9)]
        x = Add()([x, *sides, Dense(6, activity_regularizer="l2")(x)])
    return keras.Model(inputs, Dense(10)(x))


def transformer() -> Any:
    """Return a transformer with SGD: Adam in one process squares each part of a word's gradient."""
    from labkit import models
    from labkit.datasets import Shapes

    options = {"layers": 2, "width": 12, "heads": 3, "feed_forward": 10}
    found: Any = models.build("transformer", Shapes((6,), 11, "next_character"), **options)
    found.compile("sgd", models.task_loss("next_character"), metrics=["accuracy"])
    found.optimizer.learning_rate = 0.3
    return found


def codes() -> Any:
    """Return sequences of six codes out of eleven, and the code that follows each."""
    found = np.random.default_rng(0).integers(0, 11, (90, 7)).astype("int32")
    return found[:, :-1], found[:, 1:]


def verify(communicator: Any, experiments: list[Experiment], cache: str) -> list[dict[str, Any]]:
    from labkit.worker import equivalence
    from labkit.worker.feed import read

    os.environ["LABKIT_CACHE"] = cache
    return [dict(equivalence.verify(e, communicator, read(e, communicator))) for e in experiments]


def assert_exact(cluster: Cluster, *experiments: dict[str, Any]) -> None:
    """Check that each experiment ends 20 steps with the weights of one process."""
    asked = [Experiment(**SMALL | {"verify": True} | fields) for fields in experiments]
    cache = str(Path.cwd() / "cache")
    (first, *_) = cluster.call(verify, asked, cache, ranks=asked[0].workers)
    for verdict in first:
        assert verdict["verdict"] == "passed", verdict
        assert verdict["max_abs_difference"] < 1e-10
        assert "20 steps" in verdict["reason"]


@pytest.mark.slow
def test_a_stage_without_anything_to_cut_is_whole_on_its_slices(cluster: Cluster) -> None:
    strategy = Pipeline(microbatches=4, tensor_parallel_size=2, partition=(3, 2))
    assert_exact(cluster, {"model": narrow, "strategy": strategy, "optimizer": "adam"})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_branches_and_transformers_in_stages_of_slices(cluster: Cluster) -> None:
    assert_exact(
        cluster,
        {
            "model": branches,
            "strategy": Pipeline(schedule="zero_bubble", microbatches=3, tensor_parallel_size=2),
        },
        *(
            {"model": transformer, "dataset": codes(), "dataset_options": {}, "strategy": each}
            for each in (
                Pipeline(microbatches=4, tensor_parallel_size=2),
                Layerwise(stages=1, tensor_parallel_size=2),
            )
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)  # eight processes that import TensorFlow
def test_two_replicas_of_two_stages_of_two_slices(own_folders: Path) -> None:
    strategy = Pipeline(microbatches=3, stages=2, tensor_parallel_size=2)
    fields = {"model_options": {"widths": [7, 6, 5]}, "workers": 8, "strategy": strategy}
    with Cluster(workers=8, timeout=200) as eight:
        assert_exact(eight, fields)


# --- what they hold and send ---------------------------------------------------------------------


def with_state() -> Any:
    """Return a model in which unsliced layers draw random numbers or keep statistics."""
    import keras
    from keras.layers import BatchNormalization, Dense, Dropout, Flatten, LayerNormalization

    layers = [
        Flatten(),
        Dense(12, "relu", name="in_1"),
        Dense(8, name="out_1"),
        Dropout(0.4),
        BatchNormalization(),
        Dense(12, "relu", name="in_2"),
        Dense(8, name="out_2"),
        LayerNormalization(),
        Dropout(0.4),
        Dense(10, name="scores"),
    ]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def train(communicator: Any, experiment: Experiment) -> dict[str, Any]:
    """Return what this rank holds while it trains, its record, and the weights before and after."""
    from labkit.model_parallel.weights import has_value
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    session = TrainingSession(experiment, communicator, read(experiment, communicator))
    begin = [variable.numpy() for variable in session.model.variables]
    held: dict[str, Any] = {}
    loop = session.loop

    def look(step: Any, collect: Any, predict: Any) -> None:
        def both() -> None:
            held.update({v.path: v.numpy() for v in session.model.variables if has_value(v)})
            collect()

        loop(step, both, predict)

    session.loop = look  # type: ignore[method-assign]
    experiment.strategy.train(session)
    end = {variable.path: variable.numpy() for variable in session.model.variables}
    found = {"held": held, "begin": begin, "end": end}
    found |= {"layers": session.layers, "memory": session.memory}
    session.close()
    return found


@pytest.mark.slow
def test_what_is_whole_on_slices_stays_the_same_on_them_and_the_rest_is_cut(
    cluster: Cluster,
) -> None:
    strategy = Pipeline(microbatches=4, stages=2, tensor_parallel_size=2, partition=(5, 5))
    fields = {"model": with_state, "strategy": strategy, "optimizer": "adam", "epochs": 2}
    ranks = cluster.call(train, Experiment(**SMALL | fields))
    assert not ranks[0]["held"].keys() & ranks[2]["held"].keys()
    for one, other in (ranks[:2], ranks[2:]):
        assert one["held"].keys() == other["held"].keys()
        for path, value in one["held"].items():  # the state of dropout is among them
            np.testing.assert_array_equal(value, other["held"][path], err_msg=path)
    for rank in ranks:
        for path, value in rank["end"].items():
            np.testing.assert_array_equal(value, ranks[0]["end"][path], err_msg=path)
    pairs = zip(ranks[0]["begin"], ranks[0]["end"].values(), strict=True)
    assert all((before != after).any() for before, after in pairs)

    kinds = [{row["layer"]: row["slices"] for row in rank["layers"]} for rank in ranks]
    assert kinds[0] == kinds[1]
    assert kinds[2] == kinds[3]
    assert [kinds[0][name] for name in ("in_1", "out_1")] == ["outputs", "inputs"]
    assert kinds[2] | {"in_2": "outputs", "out_2": "inputs"} == kinds[2]
    assert kinds[2]["scores"] == "outputs, gathered"
    rows = 25.0  # mean number of rows in a batch
    sent = {row["layer"]: row["forward_bytes"] for rank in ranks for row in rank["layers"]}
    assert sent["out_1"] == sent["out_2"] == rows * 8 * FLOAT
    assert sent["scores"] == rows * 10 * FLOAT / 2  # bytes sent for validation do not count
    for rank in ranks:
        for kind in ("weights", "gradients", "optimizer"):
            assert rank["memory"].measured[kind] == rank["memory"].predicted[kind]
        found = rank["memory"].measured["activations"]
        assert 0.8 <= found / rank["memory"].predicted["activations"] <= 1.8
    cut, whole = 64 * 12 + 12 + 12 * 8, 8 + 2 * 8  # weights of the first stage
    assert ranks[0]["memory"].measured["gradients"] == FLOAT * (cut // 2 + whole)


# --- what they record and predict ----------------------------------------------------------------


@pytest.mark.battery(0, 1)
@pytest.mark.parametrize(
    "strategy",
    [
        Pipeline(microbatches=4, stages=2, tensor_parallel_size=2),
        pytest.param(DelayedGradients(modules=2, tensor_parallel_size=2), marks=pytest.mark.slow),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_a_run_is_recorded_drawn_and_asked_as_others_are(
    cluster: Cluster, strategy: Strategy
) -> None:
    fields = {"model_options": {"widths": [12, 8]}, "epochs": 4, "strategy": strategy}
    run = cluster.run(Experiment(**SMALL | fields), show=False)
    x = np.random.default_rng(0).standard_normal((37, 8, 8, 1)).astype(np.float32)
    whole = run.model().predict(x, verbose=0)
    np.testing.assert_allclose(cluster.predict(run, x, batch_size=9), whole, rtol=1e-4, atol=1e-5)
    assert [sorted(part["stages"]) for part in run.metrics["memory"]] == [[0], [0], [1], [1]]
    assert sorted(run.layers["rank"].unique()) == [0, 1, 2, 3]
    assert run.layers["forward_bytes"].max() > 0
    epoch = run.metrics["epochs"][-1]
    for metric in ("loss", "accuracy"):  # measured by stages of slices, and by the whole model
        assert epoch[f"val_{metric}"] == pytest.approx(run.metrics[f"test_{metric}"], rel=1e-4)
    found, predicted = measured_pipeline(run), predicted_pipeline(run)
    assert found.table.ranks == predicted.table.ranks == 2
    assert len(found.table) == len(predicted.table)
    (row,) = pipeline_table([run]).to_dict("records")
    assert (row["ranks"], row["slices"]) == (2, 2)
    assert len(rank_table([run])) == 4
    # Only one rank knows the loss of a batch.
    known = run.history.groupby("rank")["loss"].apply(lambda loss: loss.notna().any())
    assert known.tolist() == [False, False, True, False]


# --- what is refused -----------------------------------------------------------------------------


def pipeline(**fields: Any) -> Pipeline:
    return Pipeline(**{"microbatches": 2, "tensor_parallel_size": 2} | fields)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"strategy": pipeline(tensor_parallel_size=3)},
            "tensor_parallel_size=3 does not divide workers=4; allowed: 1, 2, 4",
        ),
        (
            {"strategy": pipeline(stages=4)},
            "stages=4 does not divide workers/tensor_parallel_size=4/2=2; allowed: 1, 2",
        ),
        (
            {"strategy": DelayedGradients(modules=4, tensor_parallel_size=2)},
            "modules=4 does not divide workers/tensor_parallel_size=4/2=2; allowed: 1, 2",
        ),
        (
            {"workers": 8, "strategy": pipeline(tensor_parallel_size=2), "model": "linear"},
            "stages=4 .* chain of 2 blocks; allowed with workers=8: 1 or 2",
        ),
        (
            {
                "workers": 24,
                "strategy": pipeline(stages=2, tensor_parallel_size=12),
                "model": "linear",
            },
            "tensor_parallel_size=12 exceeds the 10 units of the widest layer; .*: 1, 2, 3, 4, 6$",
        ),
        (
            {"strategy": pipeline(schedule="wavefront"), "model": "rnn"},
            "recurrent layers, which cannot be divided; give tensor_parallel_size=1",
        ),
        (
            {"strategy": pipeline(), "optimizer_options": {"clipnorm": 1.0}},
            "clipnorm=1.0 needs the norm of whole gradients.*use clipvalue",
        ),
        ({"strategy": pipeline(), "optimizer": "lamb"}, "'lamb' needs whole variables"),
        (
            {"strategy": pipeline(), "batch_weights": (1, 1, 1, 2)},
            "stages of a pipeline work on the",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_ranks_start(
    fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        Experiment(**SMALL | fields)


def test_what_is_allowed_with_slices_is_allowed() -> None:
    clipped = {"optimizer_options": {"clipvalue": 1.0}}
    assert Experiment(**SMALL | clipped | {"strategy": pipeline()}).workers == 4
    by_variable = {"optimizer_options": {"clipnorm": 1.0}}
    assert Experiment(
        **SMALL | by_variable | {"strategy": pipeline(tensor_parallel_size=1, stages=2)}
    )


def uncut() -> Any:
    import keras
    from keras.layers import Dense, Flatten

    layers = [Flatten(), Dense(1, name="one"), Dense(1, name="other")]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def refuse(communicator: Any, experiment: Experiment) -> list[str]:
    """Return the error messages of training and predicting, which must not take a step."""
    from labkit.common.errors import InvalidInput
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    session = TrainingSession(experiment, communicator, read(experiment, communicator))
    strategy, said = experiment.strategy, []
    for ask in (lambda: strategy.train(session), lambda: strategy.predictor(uncut(), communicator)):
        try:
            ask()
        except InvalidInput as error:
            said.append(str(error))
    return said


def test_a_model_without_anything_to_cut_is_refused_by_all_ranks(cluster: Cluster) -> None:
    said = cluster.call(refuse, Experiment(**SMALL | {"model": uncut, "strategy": pipeline()}))
    sentence = (
        "no layer can be divided into 2 slices (one: units=1 for 2 slices; other: units=1 for 2 "
    )
    assert said == [said[0]] * 4
    assert len(said[0]) == 2
    assert all(
        each.startswith(sentence) and each.endswith("give tensor_parallel_size=1")
        for each in said[0]
    )
