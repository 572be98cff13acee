"""Test models sliced within layers: which weights a rank holds, and weights that callbacks set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from labkit import (
    AllReduce,
    Cluster,
    Experiment,
    Network,
    Pipeline,
    SpatialParallel,
    TensorParallel,
)

SMALL: dict[str, Any] = {
    "dataset": "digits",
    "dataset_options": {"rows": 100, "test_rows": 10},
    "batch_size": 30,
    "workers": 4,
    "learning_rate": 0.05,
    "precision": "float64",
    "verify": False,
}
MLP = {"model": "mlp", "model_options": {"widths": [7, 6]}}
MAP = {"model": "locally_connected", "model_options": {"filters": [3, 2]}}
IMAGES = {"model": "cnn", "model_options": {"filters": [3, 2], "dense": 6}}


def codes() -> Any:
    """Return sequences of six codes out of eleven, and the code that follows each."""
    found = np.random.default_rng(0).integers(0, 11, (100, 7)).astype("int32")
    return found[:, :-1], found[:, 1:]


def attention() -> Any:
    """Return a transformer whose three heads are divided between two slices."""
    from labkit import models
    from labkit.datasets import Shapes

    options = {"layers": 1, "width": 12, "heads": 3, "feed_forward": 5}
    built = models.build("transformer", Shapes((6,), 11, "next_character"), **options)
    built.compile("sgd", models.task_loss("next_character"))
    built.optimizer.learning_rate = 0.3
    return built


TEXT: dict[str, Any] = {
    "model": attention,
    "model_options": {},
    "dataset": codes(),
    "dataset_options": {},
    "learning_rate": None,
}


def halves() -> list[Any]:
    """Return a callback that halves all weights after each epoch."""
    import keras

    class Half(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.set_weights([weight / 2 for weight in self.model.get_weights()])

    return [Half()]


def sets_weights() -> list[Any]:
    """Return a callback that also sets other weights at the start and after two batches."""
    import keras

    class Set(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            self.other(7)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (self.epoch, batch) in ((0, 3), (1, 1)):  # the epoch's last batch, and one within
                self.other(batch)

        def other(self, number: int) -> None:
            shapes = [weight.shape for weight in self.model.weights]
            sizes = [int(np.prod(shape)) for shape in shapes]
            waves = [0.1 * np.cos(number + np.arange(size)) for size in sizes]
            self.model.set_weights([w.reshape(s) for w, s in zip(waves, shapes, strict=True)])

    return [Set(), *halves()]


def trained(communicator: Any, experiments: list[Experiment]) -> list[Any]:
    """Return each experiment's weights, and its validation losses as a last callback sees them."""
    import keras

    from labkit.worker.feed import read
    from labkit.worker.rank_state import restore
    from labkit.worker.session import TrainingSession

    found = []
    for experiment in experiments:
        session = TrainingSession(experiment, communicator, read(experiment, communicator))
        losses: list[float] = []
        told = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda _, logs, to=losses: to.append(logs.get("val_loss", 0.0))
        )
        session.callbacks.append(told)
        experiment.strategy.train(session)
        session.close()
        found.append((session.model.get_weights(), losses))
        restore()
    return found


BOTH: dict[str, Any] = {"workers": 2, "optimizer": "adam", "callbacks": sets_weights}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "cases",
    [
        [
            BOTH | MLP | {"strategy": TensorParallel()},
            BOTH | MAP | {"strategy": SpatialParallel()},
        ],
        pytest.param(
            [
                BOTH | TEXT | {"strategy": TensorParallel(tensor_parallel_size=2), "workers": 4},
                BOTH | IMAGES | {"strategy": SpatialParallel(grid=(1, 2)), "workers": 4},
                MLP | {"strategy": Pipeline(stages=2, microbatches=3), "callbacks": halves},
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["two ranks", "replicas"],
)
def test_weights_that_callbacks_set_count_as_in_one_process(
    cluster: Cluster, cases: list[dict[str, Any]]
) -> None:
    experiments = [Experiment(**SMALL | case, epochs=3) for case in cases]
    alone = [experiment.replace(workers=1, strategy=AllReduce()) for experiment in experiments]
    one = cluster.call(trained, alone, ranks=1)[0]
    for rank in cluster.call(trained, experiments, ranks=experiments[0].workers):
        for (weights, losses), (expected, right), experiment in zip(
            rank, one, experiments, strict=True
        ):
            for mine, theirs in zip(weights, expected, strict=True):
                np.testing.assert_allclose(
                    mine, theirs, rtol=0, atol=1e-10, err_msg=str(experiment)
                )
            np.testing.assert_allclose(losses, right, rtol=1e-10)
            assert len(losses) == 3


def handed_over(communicator: Any, experiments: list[Experiment]) -> list[bool]:
    """Return whether the slices give back weights that were set, collected or not."""
    from labkit.worker.feed import read
    from labkit.worker.rank_state import restore
    from labkit.worker.session import TrainingSession

    same = []
    for experiment in experiments:
        session = TrainingSession(experiment, communicator, read(experiment, communicator))
        strategy: Any = experiment.strategy
        share, _ = strategy.start(session)
        random = np.random.default_rng(0)
        for away in (False, True):
            if away:
                share.release()
            given = [random.standard_normal(v.shape) for v in session.model.weights]
            session.model.set_weights(given)
            share.release()
            share.collect()
            found = session.model.get_weights()
            same.append(all(map(np.array_equal, given, found)))
        session.close()
        restore()
    return same


@pytest.mark.slow
def test_weights_that_are_set_reach_the_shares(cluster: Cluster) -> None:
    cases = [
        TEXT | {"strategy": TensorParallel(tensor_parallel_size=2)},
        MAP | {"strategy": SpatialParallel(grid=(1, 2))},
        IMAGES | {"strategy": SpatialParallel()},
    ]
    for rank in cluster.call(handed_over, [Experiment(**SMALL | case) for case in cases]):
        assert rank == [True] * 6


def numbers(communicator: Any, experiments: list[Experiment]) -> list[Any]:
    """Return the number of values in the whole model first, after each of two steps, and collected.

    Also return the outputs of the whole model and of the ranks together, before and after.
    """
    from labkit.worker.feed import read
    from labkit.worker.rank_state import restore
    from labkit.worker.session import TrainingSession

    found = []
    for experiment in experiments:
        session = TrainingSession(experiment, communicator, read(experiment, communicator))
        strategy: Any = experiment.strategy
        share, step = strategy.start(session)
        x, y = next(iter(session.feed.train))[:2]

        def count(session: Any = session) -> int:
            return sum(v.numpy().size for v in session.model.variables)

        outputs = [(session.model(x).numpy(), share.predict(x).numpy())]
        counts = [count()]
        for _ in range(2):
            step(x, y, None)
            counts.append(count())
        share.collect()
        outputs.append((session.model(x).numpy(), share.predict(x).numpy()))
        found.append(([*counts, count()], outputs, share.first))
        session.close()
        restore()
    return found


def test_the_whole_weights_of_a_grid_are_away_while_it_trains(cluster: Cluster) -> None:
    strategies = [SpatialParallel(), SpatialParallel(grid=(2, 1))]
    cases = [MAP | {"strategy": strategies[0]}, IMAGES | {"strategy": strategies[1]}]
    wholes = [36 * 10 * 3 + 16 * 28 * 2 + 33 * 10, 30 + 56 + (2 * 2 * 2 + 1) * 6 + 70]
    for rank in cluster.call(numbers, [Experiment(**SMALL | case) for case in cases]):
        for (counts, outputs, first), whole in zip(rank, wholes, strict=True):
            assert counts == [whole, 0, 0, whole]
            if first:
                assert not np.allclose(outputs[0][0], outputs[1][0])
                for alone, together in outputs:
                    np.testing.assert_allclose(together, alone, atol=1e-12)


def validated(communicator: Any, experiment: Experiment) -> Any:
    """Return metrics of the last epoch and of the whole model, and how often it was collected."""
    import keras

    from labkit.worker.feed import read
    from labkit.worker.rank_state import restore
    from labkit.worker.session import TrainingSession

    session = TrainingSession(experiment, communicator, read(experiment, communicator))
    logs: list[dict[str, float]] = []
    told = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, found: logs.append(found))
    session.callbacks.append(told)
    loop, collected = session.loop, []

    def counting(step: Any, collect: Any, predict: Any = None) -> None:
        loop(step, lambda: (collected.append(1), collect()), predict)

    session.loop = counting  # type: ignore[method-assign]
    experiment.strategy.train(session)
    session.close()
    found = logs[-1], session.evaluate(), len(collected)
    restore()
    return found


@pytest.mark.slow
def test_a_grid_validates_in_tiles_and_is_whole_at_the_end_alone(cluster: Cluster) -> None:
    experiment = Experiment(**SMALL | MAP | {"strategy": SpatialParallel(grid=(1, 2))}, epochs=2)
    for logs, metrics, collected in cluster.call(validated, experiment):
        assert sorted(metrics) == ["accuracy", "loss"]
        assert {name: logs[f"val_{name}"] for name in metrics} == pytest.approx(metrics, rel=1e-12)
        assert collected == 1


def normalized() -> Any:
    """Return a model with a layer that keeps moving statistics of the rows."""
    import keras

    layers = [keras.layers.Flatten(), keras.layers.Dense(6), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_replicas_that_saw_other_rows_end_with_the_same_statistics(cluster: Cluster) -> None:
    fields = SMALL | {"learning_rate": None, "workers": 2, "model": normalized}
    ranks = cluster.call(
        trained, [Experiment(**fields, strategy=TensorParallel(tensor_parallel_size=1))], ranks=2
    )
    ((first, _),), ((second, _),) = ranks
    assert all((one == other).all() for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("network", [None, "1GbE"])
def test_what_is_added_up_on_an_emulated_network_has_a_schedule(network: Any) -> None:
    """Test that an emulated network needs a schedule, since MPI's allreduce ignores its links."""
    asked = SimpleNamespace(network=network and Network.parse(network))
    assert TensorParallel().resolved(asked) == ("ring" if network else "mpi")
