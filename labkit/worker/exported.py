"""An experiment's training as data, for processes of other frameworks; what they cannot do is
refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
import numpy as np

from labkit.common.errors import InvalidInput, short
from labkit.experiment import Experiment
from labkit.experiment.batches import plan_of
from labkit.frameworks.exported import Exported, Layer
from labkit.keras import beyond_configuration
from labkit.worker.feed import Source

if TYPE_CHECKING:
    # What says in `get_config` how it was made.
    Configured: TypeAlias = "keras.Layer | keras.losses.Loss | keras.optimizers.Optimizer"

# What is said of a layer; all else must be as Keras has it where nothing is said.
SAID: Mapping[str, tuple[str, ...]] = {
    "Dense": ("units", "activation", "use_bias"),
    "Conv2D": ("filters", "kernel_size", "strides", "activation", "use_bias"),
    "MaxPooling2D": ("pool_size", "strides"),
    "Flatten": (),
}
LOSSES: Mapping[str, Mapping[str, bool]] = {
    "SparseCategoricalCrossentropy": {"from_logits": True},
    "MeanSquaredError": {},
}
# Without gelu and silu: frameworks round gelu's constants differently, in float64 by 5e-9, and
# silu has not this name in all of them.
ACTIVATIONS = ("linear", "relu", "tanh", "sigmoid", "elu", "selu", "softplus")
# Of these it does not depend what is computed from given weights.
_NAMES = ("name", "dtype", "kernel_initializer", "bias_initializer")


def export(
    experiment: Experiment,
    source: Source,
    rank: int,
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    loss: object,
    folder: str,
) -> Exported:
    """Write what this worker trains into a folder, and say the rest.

    Raises:
        InvalidInput: a layer, a loss or an optimizer that other frameworks do not have alike.
    """
    x, y = source.arrays or (None, None)
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
        raise InvalidInput("Peer reads one array x and one array y; give a data set of these")
    told = Exported(
        rank,
        experiment.workers,
        layers_of(model),
        tuple(model.input_shape[1:]),
        loss_of(loss),
        optimizer_of(optimizer),
        experiment.precision,
        folder,
    )
    shares = experiment.capacities or (1.0,) * experiment.workers
    plan = plan_of(experiment, len(x), tuple(shares), source.labels)
    batches = [rows for epoch in range(experiment.epochs) for rows in plan.local(rank, epoch)]
    sizes = [plan.sizes(step) for step in range(plan.steps_per_epoch)] * experiment.epochs
    parts = [each[rank] / sum(each) for each in sizes]
    most = [max(each) for each in sizes]
    told.write((x, y) if rank == 0 else None, model.get_weights(), batches, parts, most)
    return told


def layers_of(model: keras.Model) -> list[Layer]:
    """The layers of a sequential model, as data."""
    if not isinstance(model, keras.Sequential):
        raise InvalidInput(
            f"Peer trains a keras.Sequential model, not a {type(model).__name__}: other "
            "frameworks are told its layers one behind the other"
        )
    found = []
    for layer in model.layers:
        kind = type(layer).__name__
        said = SAID.get(kind)
        if said is None:
            raise InvalidInput(
                f"layer {layer.name!r} is a {kind}; Peer trains {', '.join(SAID)}, which other "
                "frameworks compute alike"
            )
        config = layer.get_config()
        options = {name: config[name] for name in said}
        if (activation := options.get("activation", "linear")) not in ACTIVATIONS:
            raise InvalidInput(
                f"layer {layer.name!r} has activation={short(activation)}, which is not the same "
                f"in other frameworks; Peer has {', '.join(ACTIVATIONS)}"
            )
        _refuse_more(layer, options, f"layer {layer.name!r}")
        if kind == "Dense" and len(layer.input.shape) != 2:
            raise InvalidInput(f"layer {layer.name!r} has no flat input; put a Flatten before it")
        found.append((kind, options))
    return found


def loss_of(loss: object) -> str:
    """Its name."""
    kind = type(loss).__name__
    if not isinstance(loss, keras.losses.Loss) or kind not in LOSSES:
        each = ", ".join(f"{name}({_text(options)})" for name, options in LOSSES.items())
        said = loss if isinstance(loss, str) else kind
        raise InvalidInput(f"loss={said} is not exported; Peer has those of keras.losses: {each}")
    _refuse_more(loss, LOSSES[kind], f"loss {kind}")
    return kind


def optimizer_of(optimizer: keras.optimizers.Optimizer) -> dict[str, float]:
    """Its settings."""
    config = optimizer.get_config()
    # By its name: the gate's is one that writes down what it applies. A schedule is a mapping.
    if type(optimizer).__name__ != "SGD" or isinstance(config["learning_rate"], dict):
        raise InvalidInput(
            "Peer trains with SGD at a rate that stays the same: Keras's momentum remembers steps, "
            "others' gradients, which differ where the rate changes; leave out warmup_epochs and "
            "schedules"
        )
    options = {name: config[name] for name in ("learning_rate", "momentum", "nesterov")}
    _refuse_more(optimizer, options, "optimizer SGD")
    if more := beyond_configuration(optimizer):
        raise InvalidInput(
            f"optimizer SGD has {next(iter(more))}, which is not exported; compile without it"
        )
    # Keras casts a number of Python's by way of float32, also where weights are float64.
    exact = {"learning_rate": float(options["learning_rate"])}
    return options | exact | {"momentum": float(np.float32(options["momentum"]))}


def _refuse_more(made: Configured, options: Mapping[str, Any], what: str) -> None:
    """Refuse what has more settings than these."""
    config, plain = made.get_config(), type(made)(**options).get_config()
    for name, value in config.items():
        if name not in _NAMES and value != plain.get(name):
            raise InvalidInput(f"{what} has {name}={short(value)}, which is not exported; leave it")


def _text(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())
