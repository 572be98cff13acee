"""Test bad input for models cut over ranks: refused in a sentence, if possible before start."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import labkit as lk
from labkit import Cluster, Experiment, InvalidInput
from labkit.cluster import RankError
from labkit.strategies import Strategy

ROWS = np.zeros((20, 6)), np.zeros((20, 3))
SMALL: dict[str, Any] = {"dataset": "digits", "batch_size": 32, "workers": 4}
FOUR = {"model": "mlp", "model_options": {"widths": [5, 5]}}  # blocks


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        # These strategies have more stages than the model has layers.
        (
            {"model": "linear", "strategy": lk.Pipeline()},
            "stages=4 has 4 stages, which need at least one block each, but .* of 2 blocks; "
            "allowed with workers=4: 1 or 2",
        ),
        (
            FOUR | {"workers": 6, "strategy": lk.Layerwise()},
            "stages=6 .* is a chain of 4 blocks; allowed with workers=6: 1 or 2 or 3",
        ),
        (
            {"model": "linear", "strategy": lk.DelayedGradients()},
            "modules=4 .* is a chain of 2 blocks; allowed with workers=4: 1 or 2",
        ),
        (
            FOUR
            | {
                "strategy": lk.Pipeline(
                    schedule="interleaved", microbatches=4, virtual_stages_per_rank=2
                )
            },
            "stages=4 of virtual_stages_per_rank=2 has 8 stages, .* of 4 blocks; allowed with "
            "workers=4: 1 or 2",
        ),
        (
            {
                "model": "linear",
                "strategy": lk.Pipeline(
                    schedule="interleaved", stages=1, microbatches=4, virtual_stages_per_rank=3
                ),
            },
            "allowed with workers=4: none: give fewer virtual stages",
        ),
        # These partitions do not fit the model.
        (
            FOUR | {"strategy": lk.Pipeline(stages=2, partition=(3, 3))},
            r"partition=\[3, 3\] has 6 blocks, but the model has 4; give 2 .* \[2, 2\]",
        ),
        (
            {"model": "cnn", "strategy": lk.Pipeline(partition=(1, 1, 1, 4))},
            r"has 7 blocks, but the model has 6; .* such as \[1, 1, 1, 3\]",
        ),
        (
            FOUR | {"strategy": lk.DelayedGradients(partition=(1, 2, 1))},
            r"partition=\[1, 2, 1\] has 3 stages; give 4 numbers, one per stage",
        ),
        # These strategies have more micro-batches than samples.
        (
            {"strategy": lk.Pipeline(stages=2, microbatches=17)},
            "microbatches=17 exceeds the 16 rows per replica, .* 16, or batch_size=34 or more",
        ),
        (
            {"model": lambda: None, "dataset": ROWS, "strategy": lk.Pipeline(microbatches=21)},
            "microbatches=21 exceeds the 20 rows per replica, .*; give at most 20",
        ),
        (
            {"dataset_options": {"rows": 7}, "strategy": lk.Pipeline(microbatches=8)},
            "microbatches=8 exceeds the 7 rows",
        ),
        # These strategies do not divide the ranks evenly.
        (
            {"workers": 6, "strategy": lk.Pipeline(stages=4)},
            "stages=4 does not divide workers=6; allowed: 1, 2, 3, 6",
        ),
        (
            {"workers": 6, "strategy": lk.TensorParallel(tensor_parallel_size=4)},
            "tensor_parallel_size=4 does not divide workers=6; allowed: 1, 2, 3, 6",
        ),
        (
            {"strategy": lk.DelayedGradients(modules=3)},
            "modules=3 does not divide workers=4; allowed: 1, 2, 4",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_before_ranks_start_with_the_nearest_allowed_values(
    fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence) as refusal:
        Experiment(**SMALL | fields)
    assert "\n" not in str(refusal.value)


def test_what_is_allowed_is_what_the_sentence_said() -> None:
    nearest: list[Strategy] = [
        lk.Pipeline(stages=2, partition=(2, 2)),
        lk.Pipeline(schedule="interleaved", stages=2, microbatches=4, virtual_stages_per_rank=2),
        lk.Pipeline(microbatches=32),
        lk.DelayedGradients(modules=1),
    ]
    for strategy in nearest:
        assert Experiment(**SMALL | FOUR | {"strategy": strategy}).blocks == 4


# --- what only ranks know ------------------------------------------------------------------------


def two_outputs() -> Any:
    import keras

    x = keras.Input((6,))
    return keras.Model(x, [keras.layers.Dense(3)(x), keras.layers.Dense(3)(x)])


def one_block() -> Any:
    import keras

    x = keras.Input((6,))
    y = keras.layers.Dense(6)(keras.layers.Dense(6)(x))
    return keras.Model(x, keras.layers.Dense(3)(keras.layers.Add()([x, y])))


def two_layers() -> Any:
    import keras

    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(6), keras.layers.Dense(3)])


def hidden_layers() -> Any:
    import keras

    return keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(3)])


def of_any_length() -> Any:
    import keras
    from keras.layers import GRU, Reshape

    layers = [Reshape((-1, 1)), keras.layers.Dense(4), GRU(3)]
    return keras.Sequential([keras.Input((None,)), *layers])


REFUSED: list[tuple[Any, Strategy, str]] = [
    (
        two_outputs,
        lk.Pipeline(microbatches=2),
        "stages=4 has 4 stages, .* is a chain of 1 blocks; allowed with workers=4: 1",
    ),
    (hidden_layers, lk.Pipeline(microbatches=2), "layers of a Sequential is unknown; give a keras"),
    (hidden_layers, lk.TensorParallel(), "layers of a Sequential is unknown; give a keras"),
    (
        one_block,
        lk.Pipeline(microbatches=2, stages=2, partition=(1, 2)),
        r"has 3 blocks, but the model has 2; .* such as \[1, 1\]",
    ),
    (
        two_layers,
        lk.DelayedGradients(),
        "modules=4 has 4 stages, .* is a chain of 2 blocks; allowed with workers=4: 1 or 2",
    ),
    (of_any_length, lk.Pipeline(stages=2), r"rows of shape \[None, .*keras.Input a shape of whole"),
]


def refuse(communicator: Any, experiments: list[Experiment]) -> list[str]:
    """Return the error messages of this rank, where no experiment may take a step."""
    from labkit.common.errors import InvalidInput
    from labkit.worker.feed import read
    from labkit.worker.rank_state import restore
    from labkit.worker.session import TrainingSession

    said = []
    for experiment in experiments:
        session = TrainingSession(experiment, communicator, read(experiment, communicator))
        session.loop = None  # type: ignore[assignment,method-assign]
        try:
            experiment.strategy.train(session)
        except InvalidInput as error:
            said.append(str(error))
        restore()
    return said


def of_rows(model: Any, strategy: Strategy) -> Experiment:
    rows = {"dataset": ROWS, "loss": "mean_squared_error", "verify": False}
    return Experiment(**SMALL | rows | {"model": model, "strategy": strategy})


def test_all_ranks_refuse_with_the_same_sentence_before_the_first_step(cluster: Cluster) -> None:
    experiments = [of_rows(model, strategy) for model, strategy, _ in REFUSED]
    ranks = cluster.call(refuse, experiments)
    assert ranks == [ranks[0]] * 4
    for said, (_, _, sentence) in zip(ranks[0], REFUSED, strict=True):
        assert re.search(sentence, said), said
        assert "\n" not in said


def test_the_refusal_of_ranks_reaches_the_user_as_one_and_the_cluster_goes_on(
    cluster: Cluster,
) -> None:
    with pytest.raises(InvalidInput, match=r"^stages=4 has 4 stages") as refusal:
        cluster.run(of_rows(two_outputs, lk.Pipeline(microbatches=2)), show=False)
    assert isinstance(refusal.value, RankError)  # the error includes the rank's traceback
    assert "two_outputs" not in str(refusal.value)
    (record,) = lk.load_runs(".")
    assert record.status["state"] == "failed"
    assert record.status["cause"] == str(refusal.value)
    assert cluster.call(lambda communicator: communicator.rank) == [0, 1, 2, 3]
