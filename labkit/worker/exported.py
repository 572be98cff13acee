"""Exports the model, loss and optimizer of an experiment as data for other frameworks."""

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
from labkit.worker.feed import DataSource

if TYPE_CHECKING:
    Configured: TypeAlias = "keras.Layer | keras.losses.Loss | keras.optimizers.Optimizer"


# For each layer class, `EXPORTED_OPTIONS` lists the options that labkit exports. All options of a
# layer that are not exported must have Keras's default values.
EXPORTED_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "Dense": ("units", "activation", "use_bias"),
    "Conv2D": ("filters", "kernel_size", "strides", "activation", "use_bias"),
    "MaxPooling2D": ("pool_size", "strides"),
    "Flatten": (),
}
LOSSES: Mapping[str, Mapping[str, bool]] = {
    "SparseCategoricalCrossentropy": {"from_logits": True},
    "MeanSquaredError": {},
}
# The activations gelu and silu are not exported. Frameworks round the constants of gelu
# differently, by 5e-9 in float64. Some frameworks use another name for silu.
ACTIVATIONS = ("linear", "relu", "tanh", "sigmoid", "elu", "selu", "softplus")
# The options in `_NAMES` do not affect the output of a layer whose weights are given.
_NAMES = ("name", "dtype", "kernel_initializer", "bias_initializer")


def export(
    experiment: Experiment,
    source: DataSource,
    rank: int,
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    loss: object,
    folder: str,
) -> Exported:
    """Write this worker's batches and weights to a folder; return all other settings as data.

    Raises:
        InvalidInput: If other frameworks compute a layer, the loss or the optimizer differently.
    """
    x, y = source.arrays or (None, None)
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
        raise InvalidInput(
            "ExternalFramework requires one array x and one array y; give such a data set"
        )
    exported = Exported(
        rank,
        experiment.workers,
        layers_of(model),
        tuple(model.input_shape[1:]),
        loss_of(loss),
        optimizer_of(optimizer),
        experiment.precision,
        folder,
    )
    shares = experiment.batch_weights or (1.0,) * experiment.workers
    plan = plan_of(experiment, len(x), tuple(shares), source.labels)
    batches = [rows for epoch in range(experiment.epochs) for rows in plan.local(rank, epoch)]
    sizes = [plan.sizes(step) for step in range(plan.steps_per_epoch)] * experiment.epochs
    parts = [sizes_of_step[rank] / sum(sizes_of_step) for sizes_of_step in sizes]
    most = [max(sizes_of_step) for sizes_of_step in sizes]
    exported.write((x, y) if rank == 0 else None, model.get_weights(), batches, parts, most)
    return exported


def layers_of(model: keras.Model) -> list[Layer]:
    """Return the classes of a sequential model's layers, with their options."""
    if not isinstance(model, keras.Sequential):
        raise InvalidInput(
            f"ExternalFramework trains a keras.Sequential model, not a {type(model).__name__}: "
            "other "
            "frameworks receive a list of layers"
        )
    layers = []
    for layer in model.layers:
        kind = type(layer).__name__
        names = EXPORTED_OPTIONS.get(kind)
        if names is None:
            raise InvalidInput(
                f"layer {layer.name!r} is a {kind}; ExternalFramework trains "
                f"{', '.join(EXPORTED_OPTIONS)}, which all frameworks compute alike"
            )
        config = layer.get_config()
        options = {name: config[name] for name in names}
        if (activation := options.get("activation", "linear")) not in ACTIVATIONS:
            raise InvalidInput(
                f"layer {layer.name!r} has activation={short(activation)}, which differs in other "
                f"frameworks; allowed: {', '.join(ACTIVATIONS)}"
            )
        _refuse_more(layer, options, f"layer {layer.name!r}")
        if kind == "Dense" and len(layer.input.shape) != 2:
            raise InvalidInput(
                f"the input of layer {layer.name!r} is not flat; add a Flatten layer"
            )
        layers.append((kind, options))
    return layers


def loss_of(loss: object) -> str:
    """Return the name under which a loss is exported, or raise InvalidInput."""
    kind = type(loss).__name__
    if not isinstance(loss, keras.losses.Loss) or kind not in LOSSES:
        allowed = ", ".join(f"{name}({_text(options)})" for name, options in LOSSES.items())
        given_loss = loss if isinstance(loss, str) else kind
        raise InvalidInput(
            f"loss={given_loss} is not supported by ExternalFramework; allowed keras.losses: "
            f"{allowed}"
        )
    _refuse_more(loss, LOSSES[kind], f"loss {kind}")
    return kind


def optimizer_of(optimizer: keras.optimizers.Optimizer) -> dict[str, float]:
    """Return the settings of SGD with a constant learning rate; refuse every other optimizer."""
    config = optimizer.get_config()
    # The optimizer's class is compared by name, not by identity. The equivalence check uses a
    # subclass of SGD that logs gradients. In the optimizer's config, a learning rate schedule is a
    # dict, and a constant rate is a number.
    if type(optimizer).__name__ != "SGD" or isinstance(config["learning_rate"], dict):
        raise InvalidInput(
            "ExternalFramework trains with SGD at a constant rate: after a change of the rate, "
            "momentum in "
            "Keras differs from that of other frameworks; remove warmup_epochs and "
            "schedules"
        )
    options = {name: config[name] for name in ("learning_rate", "momentum", "nesterov")}
    _refuse_more(optimizer, options, "optimizer SGD")
    if more := beyond_configuration(optimizer):
        raise InvalidInput(
            f"optimizer SGD has {next(iter(more))}, which is not exported; compile without it"
        )
    # Keras first converts Python numbers to float32, even for float64 weights.
    exact = {"learning_rate": float(options["learning_rate"])}
    return options | exact | {"momentum": float(np.float32(options["momentum"]))}


def _refuse_more(configured: Configured, options: Mapping[str, Any], what: str) -> None:
    """Raise InvalidInput if an object's settings outside `options` differ from the defaults."""
    config, plain = configured.get_config(), type(configured)(**options).get_config()
    for name, value in config.items():
        if name not in _NAMES and value != plain.get(name):
            raise InvalidInput(
                f"{what} has {name}={short(value)}, which is not exported; remove it"
            )


def _text(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())
