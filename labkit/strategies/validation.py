"""Validation of options that many strategies have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from labkit.common.errors import InvalidInput
from labkit.common.nearest import refuse_unknown
from labkit.common.rows import IID
from labkit.strategies.strategy import ExperimentSpec

if TYPE_CHECKING:
    import keras

    from labkit.common.canonical_json import JSON

GridValue = TypeVar("GridValue")

# Names of Keras optimizers are listed here, so that a wrong name can be rejected without importing
# Keras.
OPTIMIZERS = [
    *("sgd", "rmsprop", "adam", "adamw", "adadelta", "adagrad", "adamax", "adafactor", "nadam"),
    *("ftrl", "lion", "lamb", "lars", "muon", "schedulefreeadamw"),
]
# Keras applies the options in `FIT_OPTIONS` in its training step, not in the optimizer's update.
FIT_OPTIONS = ("use_ema", "loss_scale_factor")
# The optimizers in `WHOLE_VARIABLE_OPTIMIZERS` need all values of a variable together.
WHOLE_VARIABLE_OPTIMIZERS = ("adafactor", "lamb", "lars", "muon")


def one_of(field: str, value: str, allowed: Iterable[str]) -> str:
    """Return the value of a field, or raise ValueError (for Pydantic) if it is not allowed."""
    refuse_unknown(field, [value], allowed)
    return value


def rows_and_columns(value: GridValue) -> GridValue:
    """Return a grid unchanged; raise ValueError unless it has two numbers."""
    if value is not None and (not isinstance(value, tuple | list) or len(value) != 2):
        raise ValueError(
            f"grid={value!r} is not a pair of rows and columns of machines; give two numbers, "
            "such as (2, 2)"
        )
    return value


def refuse_keras_step_options(experiment: ExperimentSpec) -> None:
    """Raise InvalidInput for options that only Keras's training step supports."""
    if experiment.precision == "mixed_float16":
        raise InvalidInput(
            "precision='mixed_float16' needs a scaled loss and a common decision of all ranks "
            "to skip a step; this strategy has neither: use precision='mixed_bfloat16' or "
            "'float32'"
        )
    refuse_fit_options(experiment.optimizer_options)


def refuse_fit_options(options: Mapping[str, JSON]) -> None:
    """Raise InvalidInput for optimizer options that Keras applies outside the update itself."""
    for name in FIT_OPTIONS:
        if options.get(name):
            raise InvalidInput(
                f"{name}={options[name]} works only in the training step of Keras, but this "
                f"strategy has its own training step; remove {name}"
            )


def refuse_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Raise InvalidInput if the optimizer of a compiled model needs Keras's training step."""
    import keras

    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise InvalidInput(
            "the model is compiled with a LossScaleOptimizer, which needs a scaled loss and a "
            "common decision of all ranks to skip a step; compile it in 'mixed_bfloat16' or "
            "'float32', with a plain optimizer"
        )
    refuse_fit_options({name: getattr(optimizer, name, None) for name in FIT_OPTIONS})


def refuse_batch_division(experiment: ExperimentSpec, parts: str, replicas: int) -> None:
    """Raise InvalidInput for options that divide a batch among ranks that need the same rows.

    Args:
        experiment: The experiment to check.
        parts: The noun for the parts that ranks store, for the error message. An example of the
            noun is "the slices of a model".
        replicas: The number of replicas among which a batch is divided.
    """
    if replicas == 1 and experiment.data_partition != IID:
        raise InvalidInput(
            f"data_partition={experiment.data_partition!r} divides samples among replicas, but "
            f"{parts} on "
            f"workers={experiment.workers} form one replica, which reads all samples; remove "
            "data_partition, or use more workers than a replica has ranks"
        )
    if experiment.batch_weights is not None or experiment.input_mode == "scatter":
        raise InvalidInput(
            "batch_weights and input_mode='scatter' divide a batch among all workers, but "
            f"{parts} work "
            "on the same rows; remove both"
        )


def refuse_remainder(field: str, count: int, workers: int, total: str = "workers") -> None:
    """Raise InvalidInput if `count`, the value of a field, does not divide the worker count."""
    if workers % count:
        allowed = ", ".join(str(n) for n in range(1, workers + 1) if workers % n == 0)
        raise InvalidInput(f"{field}={count} does not divide {total}={workers}; allowed: {allowed}")


def refuse_narrow(slices: int, experiment: ExperimentSpec, stages: int = 1) -> None:
    """Raise InvalidInput if there are more slices than the widest layer has units.

    Args:
        slices: The number of slices into which the model, or each stage, is divided.
        experiment: The experiment to check.
        stages: The number of stages that are sliced.
    """
    max_slices, workers = experiment.max_slices, experiment.workers
    if max_slices is not None and max_slices < slices:
        allowed = [n for n in range(1, max_slices + 1) if workers % (n * stages) == 0]
        raise InvalidInput(
            f"tensor_parallel_size={slices} exceeds the {max_slices} units of the widest layer; "
            "allowed with "
            f"workers={workers}: {', '.join(map(str, allowed))}"
        )


def refuse_norms(optimizer: str, options: Mapping[str, JSON], part: str = "slice") -> None:
    """Raise InvalidInput if the optimizer needs complete variables or complete gradients.

    Args:
        optimizer: The name of the optimizer, in lower case.
        options: The constructor arguments of the optimizer.
        part: The noun that the error message uses for the owner of a part of each variable.
    """
    if optimizer in WHOLE_VARIABLE_OPTIMIZERS:
        raise InvalidInput(
            f"optimizer={optimizer!r} needs whole variables, but a {part} holds a part of each "
            "variable; use an optimizer that works by element, such as 'sgd' or 'adam'"
        )
    for name in ("clipnorm", "global_clipnorm"):
        if options.get(name) is not None:
            raise InvalidInput(
                f"{name}={options[name]} needs the norm of whole gradients, but a {part} holds "
                "a part of each gradient; use clipvalue"
            )


def norms(optimizer: keras.optimizers.Optimizer) -> dict[str, JSON]:
    """Return the clipping options of a Keras optimizer, in the form that `refuse_norms` expects."""
    return {name: getattr(optimizer, name, None) for name in ("clipnorm", "global_clipnorm")}
