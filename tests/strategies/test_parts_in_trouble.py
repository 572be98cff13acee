"""Test models in parts when an event happens on one rank only."""

from __future__ import annotations

import math
from typing import Any

import pytest

from labkit import Cluster, Experiment, Pipeline, SpatialParallel, TensorParallel
from labkit.cluster import RankError
from labkit.common.errors import InvalidInput
from labkit.strategies import DelayedGradients, Strategy

SMALL: dict[str, Any] = {
    "dataset": "digits",
    "dataset_options": {"rows": 160, "test_rows": 10},
    "model_options": {"widths": [8]},
    "batch_size": 10,
    "workers": 2,
    "verify": False,
}


def fails_on_rank_1() -> list[Any]:
    import keras
    from mpi4py import MPI

    class Fail(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if MPI.COMM_WORLD.rank == 1 and batch == 2:
                raise ZeroDivisionError("as planned")

    return [Fail()]


def ends_where_the_loss_is_known() -> list[Any]:
    import keras

    class End(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3 and not math.isnan((logs or {}).get("loss", math.nan)):
                self.model.stop_training = True

    return [End()]


def scaled() -> Any:
    """Return a model whose optimizer requires a scaled loss."""
    import keras

    model = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Flatten(), *map(keras.layers.Dense, (8, 8, 10))]
    )
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


def refusals(communicator: Any, experiments: list[Experiment]) -> list[str]:
    from labkit.worker.feed import read
    from labkit.worker.rank_state import restore
    from labkit.worker.session import TrainingSession

    said = []
    for experiment in experiments:
        session = TrainingSession(experiment, communicator, read(experiment, communicator))
        with pytest.raises(InvalidInput) as caught:
            experiment.strategy.train(session)
        said.append(str(caught.value))
        session.close()
        restore()
    return said


def pid_of(communicator: Any) -> int:
    import os

    return os.getpid()


@pytest.mark.parametrize("strategy", [Pipeline(microbatches=2), TensorParallel()], ids=str)
def test_a_failing_rank_is_named_by_those_that_wait_in_its_replica(
    cluster: Cluster, strategy: Strategy
) -> None:
    before = cluster.call(pid_of)
    with pytest.raises(RankError, match="rank 1 failed: ZeroDivisionError: as planned") as caught:
        cluster.run(
            Experiment(**SMALL | {"strategy": strategy, "callbacks": fails_on_rank_1}), show=False
        )
    assert "did not end" not in str(caught.value)  # the waiting ranks were told of the failure
    assert cluster.call(pid_of) == before  # the engines' processes are still the same


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize("strategy", [Pipeline(microbatches=2), DelayedGradients()], ids=str)
def test_a_callback_that_ends_training_on_one_rank_ends_it_on_all_after_the_same_step(
    cluster: Cluster, strategy: Strategy
) -> None:
    fields = {"strategy": strategy, "callbacks": ends_where_the_loss_is_known}
    run = cluster.run(Experiment(**SMALL | fields), show=False)
    assert run.status["state"] == "completed"
    steps = run.history.groupby("rank")["step"].max().to_dict()
    assert steps == {0: 5, 1: 5}  # the stop takes one more step per rank


@pytest.mark.parametrize(
    "strategy",
    [Pipeline(microbatches=2), DelayedGradients(), TensorParallel(), SpatialParallel(grid=(1, 2))],
    ids=lambda strategy: type(strategy).__name__,
)
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"precision": "mixed_float16"}, "use precision='mixed_bfloat16' or 'float32'"),
        ({"optimizer_options": {"use_ema": True}}, "remove use_ema"),
        ({"optimizer_options": {"loss_scale_factor": 8.0}}, "remove loss_scale_factor"),
    ],
)
def test_what_needs_kerass_own_training_step_is_refused(
    strategy: Strategy, fields: dict[str, Any], told: str
) -> None:
    model: dict[str, Any] = {}
    if isinstance(strategy, SpatialParallel):
        model = {"model": "locally_connected", "model_options": {}}
    with pytest.raises(InvalidInput, match=told):
        Experiment(**SMALL | model | fields | {"strategy": strategy})


def test_a_model_that_comes_with_a_scaled_loss_is_refused_by_all_ranks(cluster: Cluster) -> None:
    strategies = [Pipeline(microbatches=2), DelayedGradients(), TensorParallel()]
    fields: dict[str, Any] = SMALL | {"model": scaled, "model_options": {}}
    experiments = [Experiment(**fields | {"strategy": strategy}) for strategy in strategies]
    for said in cluster.call(refusals, experiments, ranks=2):
        assert len(said) == 3
        assert all("compiled with a LossScaleOptimizer" in each for each in said)
