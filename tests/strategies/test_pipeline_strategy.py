"""Test models cut over ranks against one process, and stale gradients against a simulation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from labkit import Cluster, DelayedGradients, Experiment, Layerwise, Pipeline
from labkit.common.errors import InvalidInput
from labkit.strategies import AllReduce, Strategy

Weights = list[np.ndarray]
random = np.random.default_rng(0)
ONE_PROCESS: dict[str, Weights] = {}  # each experiment is trained only once
DATA = random.standard_normal((100, 6)), random.standard_normal((100, 3))


def eight_blocks(outputs: int = 3) -> Any:
    import keras

    widths = [6, 7, 5, 8, 5, 6, 4, outputs]
    layers = [keras.layers.Dense(width, "tanh") for width in widths]
    return keras.Sequential([keras.Input((6,)), *layers])


def one_number() -> Any:
    return eight_blocks(1)


# Replicas have data with different labels, and so different targets.
UNLIKE: dict[str, Any] = {
    "model": one_number,
    "dataset": (DATA[0], np.digitize(DATA[1][:, 0], (-0.5, 0.5))),
    "data_partition": "by_label",
}


def with_skips() -> Any:
    import keras

    x = y = keras.Input((6,))
    for _ in range(4):
        inner = keras.layers.Dense(6, "tanh", kernel_regularizer="l2")(y)
        y = keras.layers.Add()([y, inner])
    return keras.Model(x, keras.layers.Dense(3, activity_regularizer="l2")(y))


# Batches have 30, 30, 30 and 10 rows: 20 steps, and no number of micro-batches divides all batches.
BASE: dict[str, Any] = {
    "model": eight_blocks,
    "dataset": DATA,
    "loss": "mean_squared_error",
    "batch_size": 30,
    "epochs": 5,
    "learning_rate": 0.1,
    "precision": "float64",
    "verify": False,
}


def experiment(strategy: Strategy, workers: int, **fields: Any) -> Experiment:
    return Experiment(**BASE | {"strategy": strategy, "workers": workers} | fields)


def train(communicator: Any, experiments: list[Experiment]) -> list[Weights]:
    """Return the trained weights of each experiment on this rank."""
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    found = []
    for each in experiments:
        session = TrainingSession(each, communicator, read(each, communicator))
        each.strategy.train(session)
        found.append([variable.numpy() for variable in session.model.trainable_variables])
    return found


def trained(cluster: Cluster, experiments: list[Experiment]) -> list[Weights]:
    """Return the trained weights of each experiment, and check that all ranks have the same."""
    ranks = cluster.call(train, experiments, ranks=experiments[0].workers)
    for other in ranks[1:]:
        for own, expected in zip(other, ranks[0], strict=True):
            assert_close(own, expected, 0.0)
    first: list[Weights] = ranks[0]
    return first


def assert_close(found: Weights, expected: Weights, tolerance: float = 1e-10) -> None:
    """Check that no weight differs by more than this share of the largest weight."""
    scale = max(np.abs(weight).max() for weight in expected)
    difference = max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True))
    assert difference <= tolerance * scale


def assert_exact(
    cluster: Cluster,
    workers: int,
    strategies: list[Strategy],
    tolerance: float = 1e-10,
    **fields: Any,
) -> None:
    """Check that each strategy ends with the weights of one process."""
    one = experiment(AllReduce(), 1, **fields)
    if one.hash8 not in ONE_PROCESS:
        (ONE_PROCESS[one.hash8],) = trained(cluster, [one])
    found = trained(cluster, [experiment(each, workers, **fields) for each in strategies])
    for weights in found:
        assert_close(weights, ONE_PROCESS[one.hash8], tolerance)


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize(
    ("workers", "strategies"),
    [
        (1, [Pipeline(schedule="interleaved", microbatches=2, virtual_stages_per_rank=2)]),
        (
            2,
            [
                Pipeline(schedule="gpipe", microbatches=3, recompute=True),
                # These schedules have one group of three micro-batches, and fewer micro-batches
                # than ranks.
                Pipeline(schedule="interleaved", microbatches=3, virtual_stages_per_rank=3),
                Pipeline(schedule="interleaved", microbatches=1, virtual_stages_per_rank=2),
                Pipeline(schedule="zero_bubble_h2", microbatches=2),
            ],
        ),
        pytest.param(
            3,
            [
                Layerwise(),
                Pipeline(schedule="1f1b", microbatches=3, partition=(1, 6, 1)),
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            [
                Pipeline(schedule="zero_bubble", microbatches=5),
                # Each of two replicas has 5 rows of the last batch, in 8 micro-batches.
                Pipeline(schedule="1f1b", microbatches=8, stages=2),
            ],
            marks=pytest.mark.slow,
        ),
        # Slices of these stages have different numbers of units of a layer.
        (4, [Pipeline(schedule="1f1b", microbatches=3, tensor_parallel_size=2)]),
        pytest.param(
            4,
            [
                Layerwise(tensor_parallel_size=2),
                Layerwise(tensor_parallel_size=4),
                Pipeline(
                    schedule="gpipe",
                    microbatches=4,
                    stages=2,
                    tensor_parallel_size=2,
                    recompute=True,
                ),
                Pipeline(
                    schedule="zero_bubble", microbatches=4, tensor_parallel_size=2, partition=(3, 5)
                ),
                Pipeline(schedule="zero_bubble_h2", microbatches=3, tensor_parallel_size=2),
                Pipeline(
                    schedule="interleaved",
                    microbatches=4,
                    virtual_stages_per_rank=2,
                    tensor_parallel_size=2,
                ),
                Pipeline(
                    schedule="1f1b", microbatches=4, stages=1, tensor_parallel_size=2
                ),  # replicas
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_exact_schedules_end_with_the_weights_of_one_process(
    cluster: Cluster, workers: int, strategies: list[Strategy]
) -> None:
    assert_exact(cluster, workers, strategies)


@pytest.mark.slow
def test_three_replicas_of_one_stage_divide_unequal_rows(cluster: Cluster) -> None:
    assert_exact(cluster, 3, [Pipeline(microbatches=2, stages=1)])


@pytest.mark.slow
def test_in_float32_to_its_rounding(cluster: Cluster) -> None:
    assert_exact(cluster, 2, [Pipeline(microbatches=8)], 1e-4, precision="float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "adam", "learning_rate": 0.01},
        {"optimizer_options": {"momentum": 0.9, "clipnorm": 0.1}},
    ],
    ids=["adam", "momentum"],
)
def test_skips_and_regularisers_with_optimizers_that_remember(
    cluster: Cluster, fields: dict[str, Any]
) -> None:
    strategies: list[Strategy] = [
        Pipeline(schedule="interleaved", microbatches=4, virtual_stages_per_rank=2)
    ]
    assert_exact(cluster, 2, strategies, model=with_skips, **fields)


def test_callbacks_that_change_the_rate_reach_all_stages(cluster: Cluster) -> None:
    def falling() -> list[Any]:
        import keras

        return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)]

    assert_exact(cluster, 2, [Pipeline(microbatches=3)], callbacks=falling)


def one_step(communicator: Any, question: Experiment) -> dict[str, Any]:
    """Return the predictions of the ranks and the model, and what each stage kept in a step."""
    from contextlib import nullcontext

    from labkit.model_parallel.stages import Batch, Runner
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    session = TrainingSession(question, communicator, read(question, communicator))
    strategy: Any = question.strategy
    table = strategy.table(communicator.size)
    cut = strategy.cut(session, session.optimizer())
    given = cut.inputs, cut.outputs, lambda *row: nullcontext(), cut.losses, cut.parts.takes
    runner = Runner(cut.lane, table, cut.stages, *given)
    x, y = DATA
    loss = runner.step(Batch(x[:23], y[:23]), lambda stage: None)
    predict = strategy.predictor(session.model, cut.lane)
    parts = [found for found, _ in predict([x[:6], x[6:12], x[12:22], x[22:23]])]
    return {
        "ranks": np.concatenate(parts) if parts[0] is not None else None,
        "model": np.asarray(session.model(x[:23])),
        "loss": loss,
        "kept": {number: stage.max_in_flight for number, stage in cut.stages.items()},
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "kept"),
    [
        (Pipeline(schedule="1f1b", microbatches=8), [{0: 3}, {1: 2}, {2: 1}]),
        (Pipeline(schedule="gpipe", microbatches=8), [{0: 8}, {1: 8}, {2: 8}]),
        (
            Pipeline(schedule="interleaved", microbatches=3, virtual_stages_per_rank=2),
            [{0: 3, 3: 3}, {1: 3, 4: 3}, {2: 3, 5: 1}],
        ),
    ],
    ids=lambda value: getattr(value, "schedule", ""),
)
def test_ranks_predict_as_the_model_and_keep_what_the_schedule_promises(
    cluster: Cluster, strategy: Strategy, kept: list[dict[int, int]]
) -> None:
    found = cluster.call(one_step, experiment(strategy, 3), ranks=3)
    assert [each["ranks"] is None for each in found] == [True, True, False]
    np.testing.assert_allclose(found[-1]["ranks"], found[-1]["model"], rtol=1e-12)
    assert [each["kept"] for each in found] == kept
    assert [each["loss"] is None for each in found] == [True, True, False]
    errors = np.square(found[-1]["model"] - DATA[1][:23])
    assert found[-1]["loss"] == pytest.approx(errors.mean())


class OneProcess:
    """A model in one process whose stages are updated with gradients at earlier weights."""

    def __init__(self, model: Any, edges: list[int], rate: float, momentum: float) -> None:
        self.model, self._rate, self._momentum = model, rate, momentum
        self.stages = [model.trainable_variables[2 * a : 2 * b] for a, b in pairwise(edges)]
        self._velocity = [[np.zeros(v.shape) for v in stage] for stage in self.stages]

    def weights(self) -> list[Weights]:
        return [[variable.numpy() for variable in stage] for stage in self.stages]

    def assign(self, weights: list[Weights]) -> None:
        for stage, values in zip(self.stages, weights, strict=True):
            for variable, value in zip(stage, values, strict=True):
                variable.assign(value)

    def gradients(self, weights: list[Weights], x: Any, y: Any) -> list[Weights]:
        import keras
        import tensorflow as tf

        now = self.weights()
        self.assign(weights)
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError()(y, self.model(x, training=True))
        found = tape.gradient(loss, [[v.value for v in stage] for stage in self.stages])
        self.assign(now)
        return [[gradient.numpy() for gradient in stage] for stage in found]

    def change(self, number: int, gradients: Weights) -> None:
        for place, variable in enumerate(self.stages[number]):
            step = self._momentum * self._velocity[number][place] - self._rate * gradients[place]
            self._velocity[number][place] = step
            variable.assign_add(step)


def pipedream_step(one: OneProcess, strategy: Any, replicas: int, x: Any, y: Any) -> None:
    """Take a step in the table's order; each backward uses the weights that its forward used."""
    from labkit.common.rows import cut

    table = strategy.table(len(one.stages))
    cuts = [
        [start + edge for edge in cut(stop - start, [1.0] * table.microbatches)]
        for start, stop in pairwise(cut(len(x), [1.0] * replicas))
    ]
    seen: dict[tuple[int, int], Weights] = {}
    found: dict[int, list[Weights]] = {}
    for _, stage, action, number, _ in sorted(table.rows(), key=lambda row: row[0]):
        if action == "forward":
            seen[stage, number] = one.weights()[stage]
        rows = np.concatenate([np.arange(own[number], own[number + 1]) for own in cuts])
        if action == "backward" and len(rows):
            if number not in found:  # the micro-batch has passed all stages by now
                then = [seen[each, number] for each in range(len(one.stages))]
                found[number] = one.gradients(then, x[rows], y[rows])
            one.change(stage, found[number][stage])


def delayed_step(one: OneProcess, history: list[list[Weights]], x: Any, y: Any) -> None:
    """Take a step in which module k of K uses the gradient of iteration t - K + k."""
    history.append(one.gradients(one.weights(), x, y))
    for number in range(len(one.stages)):
        then = len(history) - len(one.stages) + number
        if then >= 0:
            one.change(number, history[then][number])


def simulate(communicator: Any, question: Experiment, edges: list[int], replicas: int) -> Weights:
    """Return the weights of one process that simulates the same staleness."""
    from labkit.experiment.batches import plan_of
    from labkit.worker.feed import global_batches, read
    from labkit.worker.rank_state import build_model, reset

    reset(question)
    source = read(question, communicator)
    momentum = question.optimizer_options["momentum"]
    one = OneProcess(build_model(question, source), edges, question.learning_rate or 0, momentum)
    history: list[list[Weights]] = []
    plan = plan_of(question, len(DATA[0]), (1.0,) * replicas, source.labels)
    for x, y in global_batches(source, plan, question.epochs):
        if isinstance(question.strategy, Pipeline):
            pipedream_step(one, question.strategy, replicas, x.numpy(), y.numpy())
        else:
            delayed_step(one, history, x, y)
    return [variable.numpy() for variable in one.model.trainable_variables]


@pytest.fixture(scope="module")
def fresh(cluster: Cluster) -> Weights:
    """Return the weights of one process without staleness."""
    question = experiment(AllReduce(), 1, optimizer_options={"momentum": 0.5})
    (weights,) = trained(cluster, [question])
    return weights


@pytest.mark.battery(0, 2)
@pytest.mark.parametrize(
    ("strategy", "workers", "edges"),
    [
        pytest.param(
            Pipeline(schedule="pipedream", microbatches=5, partition=(2, 1, 4, 1)),
            4,
            [0, 2, 3, 7, 8],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Pipeline(schedule="pipedream", microbatches=4, stages=2, partition=(5, 3)),
            4,
            [0, 5, 8],
            marks=pytest.mark.slow,
        ),
        (DelayedGradients(partition=(4, 4)), 2, [0, 4, 8]),
        pytest.param(
            DelayedGradients(partition=(2, 1, 4, 1)), 4, [0, 2, 3, 7, 8], marks=pytest.mark.slow
        ),
        pytest.param(
            DelayedGradients(modules=2, partition=(3, 5)), 4, [0, 3, 8], marks=pytest.mark.slow
        ),
        pytest.param(
            DelayedGradients(tensor_parallel_size=2, partition=(3, 5)),
            4,
            [0, 3, 8],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Pipeline(
                schedule="pipedream", microbatches=4, tensor_parallel_size=2, partition=(5, 3)
            ),
            4,
            [0, 5, 8],
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_stale_ones_equal_a_simulation_of_the_same_staleness(
    cluster: Cluster,
    fresh: Weights,
    strategy: Pipeline | DelayedGradients,
    workers: int,
    edges: list[int],
) -> None:
    assert not strategy.exact
    replicas, momentum = strategy.replicas(workers), {"optimizer_options": {"momentum": 0.5}}
    question = experiment(strategy, workers, **momentum)
    several = replicas > 1 and isinstance(strategy, DelayedGradients)
    unlike = [experiment(strategy, workers, **momentum | UNLIKE)] if several else []
    found, *more = trained(cluster, [question, *unlike])
    for each, weights in zip([question, *unlike], [found, *more], strict=True):
        (expected,) = cluster.call(simulate, each, edges, replicas, ranks=1)
        # Slices add numbers in another order than one process.
        assert_close(weights, expected, 1e-13 if strategy.tensor_parallel_size == 1 else 1e-10)
    scale = max(np.abs(weight).max() for weight in fresh)
    assert max(np.abs(a - b).max() for a, b in zip(found, fresh, strict=True)) > 1e-4 * scale


@pytest.mark.parametrize(
    ("strategy", "fields", "sentence"),
    [
        (
            {"microbatches": 16},
            {},
            "microbatches=16 exceeds the 15 rows per replica.* give at most 15",
        ),
        ({"stages": 3}, {}, "stages=3 does not divide workers=4; allowed: 1, 2, 4"),
        ({"stages": 8}, {}, "stages=8 does not divide workers=4; allowed: 1, 2, 4"),
        ({"schedule": "interleaved", "microbatches": 5}, {}, "give 4 or 6 micro-batches"),
        ({"schedule": "ring"}, {}, "'ring' is not known; allowed: layerwise, gpipe"),
        (
            {"schedule": "gpipe", "virtual_stages_per_rank": 2},
            {},
            "virtual_stages_per_rank=2 applies to schedule='interleaved'",
        ),
        ({"partition": "depth"}, {}, "partition='depth' is not known; allowed: .*'time'"),
        ({"partition": (3, 3, 2)}, {}, r"has 3 stages; give 2 numbers"),
        ({"schedule": "pipedream", "recompute": True}, {}, "use recompute=False"),
        ({}, {"batch_weights": (1, 1, 1, 2)}, "remove both"),
        ({}, {"input_mode": "scatter"}, "remove both"),
        ({}, {"optimizer_options": {"global_clipnorm": 1.0}}, "use clipnorm"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_ranks_start(
    strategy: dict[str, Any], fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        experiment(Pipeline(**{"stages": 2} | strategy), 4, **fields)


def test_modules_that_do_not_divide_workers_are_refused() -> None:
    with pytest.raises(InvalidInput, match="modules=3 does not divide workers=4; allowed: 1, 2, 4"):
        experiment(DelayedGradients(modules=3), 4)
