"""Test that experiments refuse impossible values before a start; their content names them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from labkit.common.errors import InvalidInput
from labkit.common.validated import by_position
from labkit.compression import ErrorFeedback, TopK
from labkit.experiment import VirtualClock
from labkit.experiment.experiment import OPTIONAL_FIELDS, Experiment
from labkit.network import ComputeTime, Fault, Network
from labkit.strategies import (
    STRATEGIES,
    AllReduce,
    DelayedGradients,
    Layerwise,
    ParameterServer,
    Pipeline,
    SpatialParallel,
    TensorParallel,
)
from labkit.strategies.validation import OPTIMIZERS

X, Y = np.zeros((4, 3), np.float32), np.arange(4)


class KerasModel:
    """An object that looks like a Keras model, so that Keras need not be imported."""

    count_params = None

    def __call__(self) -> None:
        raise NotImplementedError


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"workers": 0}, "workers=0 is impossible: input should be greater than 0"),
    ({"workers": 1.5}, "workers=1.5 is impossible"),
    ({"threads": -1}, "threads=-1 is impossible"),
    ({"epochs": 0}, "epochs=0 is impossible"),
    ({"steps_per_epoch": 0}, "steps_per_epoch=0 is impossible"),
    ({"batch_size": 0}, "batch_size=0 is impossible"),
    ({"repeats": 0}, "repeats=0 is impossible"),
    ({"seed": -1}, "seed=-1 is impossible"),
    ({"learning_rate": 0.0}, "learning_rate=0.0 is impossible"),
    ({"warmup_epochs": -1}, "warmup_epochs=-1 is impossible"),
    ({"learning_rate_scaling": "cubic"}, "'none', 'linear' or 'sqrt'"),
    ({"precision": "float8"}, "'float32', 'float64', 'mixed_float16' or 'mixed_bfloat16'"),
    ({"input_mode": "push"}, "'shard' or 'scatter'"),
    ({"clock": "sun"}, "'wall' or 'virtual'"),
    ({"clock": "wall", "virtual": VirtualClock()}, "use clock='virtual'"),
    ({"virtual": {"compute_time": -1.0}}, "seconds=-1.0"),
    ({"optimizer": "sgdd"}, "optimizer='sgdd' is not known (did you mean 'sgd'?); allowed: sgd, "),
    ({"model": "mlpp"}, "did you mean 'mlp'"),
    ({"model": 5}, "model=5 is impossible"),
    ({"model": KerasModel()}, "give a function that returns a new model"),
    ({"model": "cnn", "dataset": "adult"}, "does not fit"),
    ({"model_options": {"width": 3}}, "has no option 'width'"),
    ({"dataset": "minst"}, "did you mean 'mnist'"),
    ({"dataset": 3}, "a name, a callable or arrays (x, y), but it is a int"),
    ({"dataset": X}, "arrays (x, y), but it is a ndarray"),
    ({"dataset": (X,)}, "a pair (x, y), but 1 value"),
    ({"dataset": (X, Y[:3])}, "the same number of rows"),
    ({"dataset": (X[:0], Y[:0])}, "at least 1"),
    ({"dataset": (1, 2)}, "x and y must be arrays"),
    ({"dataset": ([[1, 2], [3, 4]], [0, 1])}, "use numpy.asarray"),
    ({"dataset": (X, np.float32(1))}, "x and y must be arrays"),
    ({"validation": (X, Y[:3])}, "the same number of rows"),
    ({"validation": 5}, "arrays (x, y), but it is a int"),
    ({"validation": "mnist"}, "validation='mnist' is impossible"),
    ({"dataset_options": {"row": 5}}, "has no option 'row'"),
    ({"strategy": "AllReducer"}, "unknown strategy 'AllReducer' (did you mean 'AllReduce'?)"),
    ({"strategy": {"name": "AllReduce", "algorithm": "rign"}}, "algorithm='rign'"),
    ({"strategy": 5}, "strategy=5 is impossible"),
    ({"batch_weights": (1.0,), "workers": 2}, "give one number per worker"),
    ({"batch_weights": (1.0, 0.0), "workers": 2}, "greater than 0"),
    (
        {"input_mode": "scatter", "dataset": lambda: None},
        "input_mode='scatter' cannot read a callable",
    ),
    (
        {"data_partition": "by_size"},
        "data_partition='by_size' is not known; allowed: 'iid', 'by_label', or",
    ),
    (
        {"data_partition": "by_label", "dataset": lambda: None},
        "requires all labels before training",
    ),
    (
        {
            "data_partition": "by_label",
            "dataset": "synthetic",
            "dataset_options": {"task": "regression"},
        },
        "a regression task has no class labels",
    ),
    (
        {"data_partition": "by_label", "dataset": "shakespeare", "model": "rnn"},
        "a next character task has no class labels",
    ),
    (
        {"data_partition": "dirichlet(1)", "dataset": (X, X)},
        "y is not a one-dimensional array of integers",
    ),
    (
        {"data_partition": "by_label", "workers": 2, "strategy": Pipeline()},
        "the stages of a pipeline on workers=2 form one replica, which reads all",
    ),
    (
        {"data_partition": "by_label", "workers": 2, "strategy": TensorParallel()},
        "the slices of a model on workers=2 form one",
    ),
    ({"callbacks": "stop"}, "callbacks='stop' is impossible"),
    ({"batchsize": 3}, "Experiment has no 'batchsize'"),
]


@pytest.mark.parametrize(("fields", "told"), IMPOSSIBLE, ids=lambda value: str(value)[:40])
def test_an_impossible_value_is_refused_in_one_line(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Experiment(**fields)
    message = str(caught.value)
    assert told in message
    assert "\n" not in message
    assert len(message) < 800


@pytest.mark.parametrize(
    "fields",
    [
        {"learning_rate": float("inf")},
        {"learning_rate": float("nan")},
        {"warmup_epochs": float("inf")},
        {"workers": 10**11},
        {"threads": 10**11},
        {"epochs": 1e26},
        {"steps_per_epoch": 10**12},
        {"batch_size": 10**12},
        {"seed": 2**32},
        {"repeats": 10**9},
        {"workers": 2, "batch_weights": (1.0, float("inf"))},
    ],
)
def test_absurd_numbers_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="is impossible"):
        Experiment(**fields)


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidInput, match="Experiment cannot have"):
        Experiment(**{"\ud8d5": 1})


def test_the_rows_of_its_data_are_known_where_the_data_are() -> None:
    assert Experiment(dataset="digits").rows == 1437
    assert Experiment(dataset="mnist", dataset_options={"rows": 500}).rows == 500
    assert Experiment(dataset=(X, Y)).rows == len(X)
    assert Experiment(model=model_of_three, dataset=lambda: None).rows is None
    with pytest.raises(InvalidInput, match="microbatches=1438 exceeds the 1437 rows per replica"):
        Experiment(workers=2, batch_size=5000, strategy=Pipeline(microbatches=1438))


@pytest.mark.slow
def test_the_optimizers_are_those_of_the_installed_keras_and_lars() -> None:
    script = """
import inspect, json, keras
print(json.dumps([
    name.lower()
    for name, kind in vars(keras.optimizers).items()
    if inspect.isclass(kind)
    and issubclass(kind, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap")
]))
"""
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert sorted(OPTIMIZERS) == sorted([*json.loads(found.stdout), "lars"])


NAMED = {
    "6cb1a192": Experiment(),
    "f1d155eb": Experiment(
        workers=4,
        dataset="mnist",
        network="1GbE",
        epochs=2,
        strategy=AllReduce("ring", compressor=ErrorFeedback(TopK(0.01))),
    ),
    "cc8831dd": Experiment(
        workers=4,
        batch_size=64,
        model_options={"widths": [8, 8, 8, 8]},
        strategy=Pipeline("gpipe", microbatches=4),
    ),
    "b25cc805": Experiment(workers=2, strategy=Layerwise()),
    "98e9fc71": Experiment(workers=2, strategy=DelayedGradients(2)),
    "ec40a667": Experiment(workers=2, strategy=TensorParallel(2)),
    "fdabf8b5": Experiment(
        workers=4, model="locally_connected", dataset="mnist", strategy=SpatialParallel((2, 2))
    ),
    "1c026350": Experiment(
        workers=2, network=Network(latency=1e-3, bandwidth=1e6, stragglers={1: 2.0})
    ),
}


def test_names_of_experiments_stay_so_that_old_runs_and_gates_are_found_again() -> None:
    assert [each.hash8 for each in NAMED.values()] == list(NAMED)


def test_the_record_is_json_and_says_every_field() -> None:
    experiment = Experiment(
        workers=2,
        steps_per_epoch=3,
        batch_weights=(1, 3),
        optimizer_options={"momentum": 0.9},
        virtual=VirtualClock(
            compute_time=ComputeTime(0.1, distribution="lognormal"),
            message_delays=[(0, 1, 0.5)],
            update_order=[(2, 0, 0)],
            worker_failures={0: 2.5},
        ),
        stragglers={1: 2.0},
        data_partition="by_label",
        faults=[Fault("pause", rank=1, step=2, seconds=1.0)],
        on_nonfinite="stop",
        strategy=ParameterServer(synchronous=False),
    )
    record = json.loads(json.dumps(experiment.to_json()))
    on_ranks = {"replica_check_interval", "checksums"}
    assert set(record) == {"schema", *Experiment.model_fields} - on_ranks
    asked = Experiment(
        workers=2, strategy=AllReduce("ring"), replica_check_interval=5, checksums=True
    )
    assert on_ranks < set(asked.to_json())
    plain = {"schema", *Experiment.model_fields} - set(OPTIONAL_FIELDS)
    assert set(Experiment().to_json()) == plain
    assert record["strategy"] == json.loads(json.dumps(experiment.strategy.to_json()))
    assert record["batch_weights"] == [1.0, 3.0]
    without_schema = {key: value for key, value in record.items() if key != "schema"}
    assert Experiment(**without_schema) == experiment


def test_the_hash_is_of_the_content_and_not_of_the_name() -> None:
    one, same = Experiment(workers=2), Experiment(workers=2, name="mine")
    assert one.hash8 == same.hash8
    assert len(one.hash8) == 8
    int(one.hash8, 16)
    assert Experiment(workers=2, strategy="AllReduce").hash8 == one.hash8
    assert Experiment(workers=2, strategy=AllReduce()).hash8 == one.hash8
    for other in ({"workers": 3}, {"seed": 1}, {"model": "linear"}, {"batch_size": 255}):
        assert one.replace(**other).hash8 != one.hash8


def test_the_hash_is_the_same_in_another_process() -> None:
    script = "from labkit import Experiment; print(Experiment(workers=3, epochs=7).hash8)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout.strip() == Experiment(workers=3, epochs=7).hash8


def test_arrays_enter_the_hash_by_their_values_type_and_shape() -> None:
    hashes = {
        Experiment(dataset=arrays).hash8
        for arrays in [
            (X, Y),
            (X + 1, Y),
            (X.astype(np.float64), Y),
            (X.reshape(4, 3, 1), Y),
            (X, Y[::-1]),
        ]
    }
    assert len(hashes) == 5
    assert Experiment(dataset=(X.copy(), Y.copy())).hash8 == Experiment(dataset=[X, Y]).hash8
    record = Experiment(dataset=(X, Y)).to_json()["dataset"]
    assert record[0]["shape"] == [4, 3]
    assert record[0]["dtype"] == "float32"


def test_a_nest_of_arrays_is_data_too() -> None:
    experiment = Experiment(model=model_of_three, dataset=({"a": X, "b": X}, [Y, Y]))
    json.dumps(experiment.to_json())
    with pytest.raises(InvalidInput, match="same number of rows"):
        experiment.replace(dataset=({"a": X, "b": X[:2]}, [Y, Y]))


def model_of_three() -> Any:
    return 3


def model_of_four() -> Any:
    return 4


def made(text: str) -> Callable[[], Any]:
    """Return a function as if it was typed into an interpreter: it has no source file."""
    space: dict[str, Any] = {}
    exec(text, space)
    function: Callable[[], Any] = space["model"]
    return function


def test_a_callable_enters_by_its_source() -> None:
    three, four = Experiment(model=model_of_three), Experiment(model=model_of_four)
    assert three.hash8 != four.hash8
    assert "return 3" in three.to_json()["model"]["source"]
    json.dumps(three.to_json())
    assert three.label.startswith("model_of_three-digits")


def test_a_callable_without_a_source_file_enters_by_its_code() -> None:
    first, second = "def model():\n    return 3", "def model():\n    return 4"
    hashes = [Experiment(model=made(text)).hash8 for text in (first, first, second)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_two_models_of_one_factory_are_two_experiments() -> None:
    def factory(width: int) -> Callable[[], Any]:
        return lambda: width

    assert Experiment(model=factory(3)).hash8 == Experiment(model=factory(3)).hash8
    assert Experiment(model=factory(3)).hash8 != Experiment(model=factory(4)).hash8


def test_the_label_is_the_name_or_what_runs() -> None:
    assert Experiment(workers=2, dataset="mnist").label == "mlp-mnist-allreduce-w2"
    assert Experiment(name="mine").label == "mine"
    assert Experiment(dataset=(X, Y)).label == "mlp-arrays-allreduce-w1"


def test_an_experiment_is_frozen_and_a_replacement_is_checked() -> None:
    experiment = Experiment(workers=2)
    with pytest.raises(ValueError, match="frozen"):
        experiment.workers = 3  # type: ignore[misc]
    assert experiment.replace(workers=3).workers == 3
    assert experiment.workers == 2
    with pytest.raises(InvalidInput, match="workers=0"):
        experiment.replace(workers=0)


def test_defaults_of_one_experiment_are_not_those_of_another() -> None:
    Experiment().optimizer_options["momentum"] = 0.9
    assert Experiment().optimizer_options == {}


@pytest.mark.parametrize("kind", STRATEGIES.values(), ids=list(STRATEGIES))
def test_a_strategy_says_its_source_and_what_may_be_given_by_position(kind: Any) -> None:
    assert by_position(kind) in kind.model_fields
    assert (
        kind.paper.split(", arXiv ")[-1] in " ".join(kind.__doc__.split()) or "NIPS" in kind.__doc__
    )
