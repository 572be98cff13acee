"""Test records of models in stages: where they were cut, what was kept, and what ran when."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from labkit import AllReduce, Cluster, DelayedGradients, Experiment, Layerwise, Pipeline
from labkit.common.errors import InvalidInput
from labkit.figures import pipeline_gantt, pipeline_table, rank_table
from labkit.records.run import Run
from labkit.strategies import Strategy, TensorParallel

WIDTHS = (48, 40, 32, 24)
ROWS, FLOAT = 24, 4
random = np.random.default_rng(0)
DATA = (
    random.standard_normal((96, 16)).astype(np.float32),
    random.standard_normal((96, 3)).astype(np.float32),
)
WEIGHTS = FLOAT * sum(a * b + b for a, b in pairwise((16, *WIDTHS, 3)))


def dense() -> Any:
    import keras

    layers = [keras.layers.Dense(width, "tanh") for width in WIDTHS]
    return keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(3)])


def with_statistics() -> Any:
    import keras

    inner = [
        layer
        for width in WIDTHS
        for layer in (
            keras.layers.Dense(width, "relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
        )
    ]
    return keras.Sequential([keras.Input((16,)), *inner, keras.layers.Dense(3)])


def experiment(strategy: Strategy, workers: int = 2, **fields: Any) -> Experiment:
    base: dict[str, Any] = {
        "model": dense,
        "dataset": DATA,
        "loss": "mean_squared_error",
        "batch_size": ROWS,
        "epochs": 4,
        "optimizer": "adam",
        "verify": False,
    }
    return Experiment(**base | {"strategy": strategy, "workers": workers} | fields)


@pytest.fixture(scope="module")
def runs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    strategies: dict[str, tuple[Strategy, int]] = {
        "one": (AllReduce(), 1),
        "1f1b": (Pipeline(schedule="1f1b", microbatches=4), 2),
        "recomputed": (Pipeline(schedule="gpipe", microbatches=4, recompute=True), 2),
        "pipedream": (Pipeline(schedule="pipedream", microbatches=4), 2),
        "delayed": (DelayedGradients(), 2),
        "slices": (TensorParallel(), 2),
    }
    folder = tmp_path_factory.mktemp("records")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return {k: Run(cluster.run(experiment(*v)).path.resolve()) for k, v in strategies.items()}


def memory(run: Run, which: str, kind: str) -> list[Any]:
    return [part[which][kind] for part in run.metrics["memory"]]


@pytest.mark.battery(1, 2)
@pytest.mark.parametrize("name", ["one", "1f1b", "recomputed", "pipedream", "delayed", "slices"])
def test_weights_gradients_and_optimizer_are_as_predicted(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    for kind in ("weights", "gradients", "optimizer"):
        assert memory(run, "measured", kind) == memory(run, "predicted", kind)
    assert memory(run, "measured", "gradients") == memory(run, "measured", "weights")
    assert {part["whole"] for part in run.metrics["memory"]} == {WEIGHTS}
    if name != "slices":  # each slice holds biases that are added after a sum
        assert sum(memory(run, "measured", "weights")) == WEIGHTS
    adam = [2 * own for own in memory(run, "measured", "gradients")]
    numbers = np.subtract(memory(run, "measured", "optimizer"), adam)
    assert (numbers < 32).all()  # the step count and the learning rate
    table = run.memory
    assert len(table) == 5 * len(run.metrics["memory"])
    own = run.metrics["memory_bytes"]
    assert own["weights"] == max(memory(run, "measured", "weights"))


def test_a_single_step_is_enough_to_know_what_a_rank_holds(cluster: Cluster) -> None:
    def held(communicator: Any, question: Experiment) -> int:
        from labkit.worker.feed import read
        from labkit.worker.session import TrainingSession

        session = TrainingSession(question, communicator, read(question, communicator))
        question.strategy.train(session)
        session.close()
        kept: int = session.memory.measured["weights"]
        return kept

    question = experiment(Pipeline(microbatches=1), epochs=1, steps_per_epoch=1)
    assert sum(cluster.call(held, question, ranks=2)) == WEIGHTS


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("one", 0.1),
        ("1f1b", 0.3),
        ("recomputed", 0.3),
        ("pipedream", 0.3),
        ("delayed", 0.3),
        ("slices", 0.6),
    ],
)
def test_activations_are_nearly_as_predicted(runs: dict[str, Run], name: str, more: float) -> None:
    """Test that dense layers keep inputs and outputs; a loss and sums over slices add a little."""
    found = memory(runs[name], "measured", "activations")
    expected = memory(runs[name], "predicted", "activations")
    assert all(1 <= a / b <= 1 + more for a, b in zip(found, expected, strict=True))


def test_a_pipeline_keeps_less_than_one_process_and_the_last_rank_least(
    runs: dict[str, Run],
) -> None:
    (alone,) = memory(runs["one"], "measured", "activations")
    first, last = memory(runs["1f1b"], "measured", "activations")
    assert last < first < alone
    again = memory(runs["recomputed"], "measured", "activations")
    assert max(again) < alone


@pytest.mark.parametrize("name", ["pipedream", "delayed"])
def test_old_weights_are_kept_where_gradients_are_late(runs: dict[str, Run], name: str) -> None:
    first, last = memory(runs[name], "measured", "versions")
    assert last == 0
    assert 0 < first <= memory(runs[name], "predicted", "versions")[0]
    assert memory(runs["1f1b"], "measured", "versions") == [0, 0]


@pytest.mark.parametrize("name", ["1f1b", "recomputed", "pipedream", "delayed"])
def test_a_step_can_be_drawn_beside_its_prediction(runs: dict[str, Run], name: str) -> None:
    from labkit.figures import measured_pipeline, predicted_pipeline

    run = runs[name]
    found, predicted = measured_pipeline(run), predicted_pipeline(run)
    kinds = [
        sorted(zip(each.table.stage.tolist(), each.table.action.tolist(), strict=True))
        for each in (found, predicted)
    ]
    assert kinds[0] == kinds[1]
    assert (found.stop >= found.start).all()
    assert 0 <= found.bubble_share < 1
    figure = pipeline_gantt([run, predicted])
    assert "wall clock and simulation" in figure.layout.title.text
    assert len([trace for trace in figure.data if trace.type == "bar"]) == 4


def test_the_tables_have_a_row_a_rank_and_a_row_a_run(runs: dict[str, Run]) -> None:
    ranks = rank_table(runs.values())
    assert len(ranks) == 1 + 5 * 2
    assert ((ranks["utilisation"] > 0) & (ranks["utilisation"] <= 1)).all()
    assert (ranks["bytes"] > 0).all()
    table = pipeline_table(runs.values())
    assert len(table) == 4
    assert (table["speedup"] > 0).all()
    assert table["bound"].tolist() == pytest.approx([1.6, 1.6, 2.0, 1.5])


def cut_by_time(communicator: Any, question: Experiment) -> tuple[dict[str, Any], list[Any], int]:
    """Return the record, the trained weights, and the number of communicators left open."""
    from labkit.communicator import Communicator
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    opened: list[Any] = []
    begin, end = Communicator.__init__, Communicator.close

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        opened.append(self)

    def close(self: Any) -> None:
        opened.remove(self)
        end(self)

    Communicator.__init__, Communicator.close = init, close  # type: ignore[method-assign]
    try:
        session = TrainingSession(question, communicator, read(question, communicator))
        question.strategy.train(session)
        session.close()
    finally:
        Communicator.__init__, Communicator.close = begin, end  # type: ignore[method-assign]
    weights = [variable.numpy() for variable in session.model.variables]
    return session.partition, weights, len(opened)


@pytest.mark.slow
def test_a_cut_by_measured_time_is_the_same_on_all_ranks_and_changes_nothing_else(
    cluster: Cluster,
) -> None:
    by_time = Pipeline(microbatches=2, stages=2, partition="time")
    question = experiment(by_time, 4, model=with_statistics)
    found = cluster.call(cut_by_time, question, ranks=4)
    partition = found[0][0]
    assert len(partition["block_seconds"]) == len(partition["blocks"]) == 13
    assert min(partition["block_seconds"]) > 0
    assert all(each[0] == partition for each in found)
    assert [each[2] for each in found] == [0, 0, 0, 0]
    blocks = tuple(b - a for a, b in pairwise(partition["edges"]))
    by_hand = question.replace(strategy=by_time.model_copy(update={"partition": blocks}))
    expected = cluster.call(cut_by_time, by_hand, ranks=4)
    assert expected[0][0] == partition | {"block_seconds": None}
    for (_, own, _), (_, other, _) in zip(found, expected, strict=True):
        for a, b in zip(own, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("strategy", [Pipeline(), Layerwise(), DelayedGradients()], ids=str)
def test_half_precision_is_refused_where_nobody_scales_the_loss(strategy: Strategy) -> None:
    with pytest.raises(InvalidInput, match="use precision='mixed_bfloat16' or 'float32'"):
        experiment(strategy, precision="mixed_float16")


def test_the_clocks_of_one_host_are_one_within_what_is_measured(cluster: Cluster) -> None:
    run = cluster.run(experiment(Pipeline(schedule="gpipe", microbatches=2)))
    clocks = run.metrics["clocks"]
    assert [clock["rank"] for clock in clocks] == [0, 1]
    assert all(abs(clock["offset_s"]) <= clock["within_s"] for clock in clocks)
