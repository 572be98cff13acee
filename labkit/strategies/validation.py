"""What no strategy can do that trains parts of a model by steps of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from labkit.common.data_partition import IID
from labkit.common.errors import InvalidInput
from labkit.strategies.strategy import ExperimentSpec

if TYPE_CHECKING:
    import keras

    from labkit.common.canonical_json import JSON

Given = TypeVar("Given")

# By name here, so that a wrong one is refused without importing Keras.
OPTIMIZERS = [
    *("sgd", "rmsprop", "adam", "adamw", "adadelta", "adagrad", "adamax", "adafactor", "nadam"),
    *("ftrl", "lion", "lamb", "lars", "muon", "schedulefreeadamw"),
]
# What Keras does around its own training step, and not in an optimizer's update.
AROUND = ("use_ema", "loss_scale_factor")
# Optimizers that look at a whole variable at once.
WHOLE = ("adafactor", "lamb", "lars", "muon")


def one_of(field: str, value: str, allowed: Iterable[str]) -> str:
    """The value of a field; refuses one that is not allowed, as Pydantic's validators do."""
    if value not in allowed:
        raise ValueError(f"{field}={value!r} is not known; allowed: {', '.join(allowed)}")
    return value


def rows_and_columns(value: Given) -> Given:
    """The value of a grid, as Pydantic's validators take it; refuses what is not two numbers."""
    if value is not None and (not isinstance(value, tuple | list) or len(value) != 2):
        raise ValueError(
            f"grid={value!r} is not rows and columns of machines; give two numbers, such as (2, 2)"
        )
    return value


def refuse_in_parts(experiment: ExperimentSpec) -> None:
    """Refuse what needs Keras's own training step, or all parts to skip one together."""
    if experiment.precision == "mixed_float16":
        raise InvalidInput(
            "precision='mixed_float16' needs a scaled loss, and all ranks to skip the same step; "
            "parts of a model do without: use precision='mixed_bfloat16' or 'float32'"
        )
    refuse_around(experiment.optimizer_options)


def refuse_around(options: Mapping[str, JSON]) -> None:
    """Refuse an optimizer's options that Keras honours outside of its update."""
    for name in AROUND:
        if options.get(name):
            raise InvalidInput(
                f"{name}={options[name]} is what Keras does around its own training step, but "
                f"parts of a model take steps of their own; leave {name} out"
            )


def refuse_given(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse the same of a Keras optimizer, which a compiled model may have come with."""
    import keras

    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise InvalidInput(
            "the model is compiled with a LossScaleOptimizer, which needs a scaled loss, and all "
            "ranks to skip the same step; parts of a model do without: compile it in "
            "'mixed_bfloat16' or 'float32', with a plain optimizer"
        )
    refuse_around({name: getattr(optimizer, name, None) for name in AROUND})


def refuse_shares(experiment: ExperimentSpec, parts: str, replicas: int) -> None:
    """Refuse what divides a batch among ranks that work on the same rows.

    Args:
        experiment: in question.
        parts: what the ranks have, such as "the slices of a model".
        replicas: that divide a batch.
    """
    if replicas == 1 and experiment.shards != IID:
        raise InvalidInput(
            f"shards={experiment.shards!r} divides samples among replicas, but {parts} on "
            f"workers={experiment.workers} make one, which reads them all; leave shards out, or "
            "give more workers than a replica has ranks"
        )
    if experiment.capacities is not None or experiment.feed == "scatter":
        raise InvalidInput(
            "capacities and feed='scatter' divide a batch among all workers, but "
            f"{parts} work on the same rows; leave both out"
        )


def refuse_remainder(field: str, given: int, workers: int, whose: str = "workers") -> None:
    """Refuse a number of parts that does not divide the workers."""
    if workers % given:
        allowed = ", ".join(str(n) for n in range(1, workers + 1) if workers % n == 0)
        raise InvalidInput(f"{field}={given} does not divide {whose}={workers}; allowed: {allowed}")


def refuse_narrow(slices: int, experiment: ExperimentSpec, each: int = 1) -> None:
    """Refuse more slices than the widest layer has units.

    Args:
        slices: of a model, or of each stage.
        experiment: in question.
        each: stages that are sliced.
    """
    widest, workers = experiment.widest, experiment.workers
    if widest is not None and widest < slices:
        allowed = [n for n in range(1, widest + 1) if workers % (n * each) == 0]
        raise InvalidInput(
            f"slices={slices} are more than the {widest} units of the widest layer; "
            f"allowed with workers={workers}: {', '.join(map(str, allowed))}"
        )


def refuse_norms(optimizer: str, options: Mapping[str, JSON], part: str = "slice") -> None:
    """Refuse what looks at whole variables, or at their gradients, where they are cut.

    Args:
        optimizer: its name, in lower case.
        options: its arguments.
        part: what has a part of each variable, in words.
    """
    if optimizer in WHOLE:
        raise InvalidInput(
            f"optimizer={optimizer!r} looks at whole variables, but a {part} has a part of each; "
            "use one that works by element, such as 'sgd' or 'adam'"
        )
    for name in ("clipnorm", "global_clipnorm"):
        if options.get(name) is not None:
            raise InvalidInput(
                f"{name}={options[name]} needs the norm of whole gradients, but a {part} has a "
                "part of each; use clipvalue"
            )


def norms(optimizer: keras.optimizers.Optimizer) -> dict[str, JSON]:
    """What a Keras optimizer has of the options that `refuse_norms` looks at."""
    return {name: getattr(optimizer, name, None) for name in ("clipnorm", "global_clipnorm")}
