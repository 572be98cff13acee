"""What a grid of machines wants to know of a named model, before Keras has built it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from labkit.common.errors import InvalidInput
from labkit.common.options import Options
from labkit.datasets import Shapes
from labkit.models.catalogue import check
from labkit.models.locally_connected import LocallyConnectedOptions
from labkit.models.networks import CnnOptions, MlpOptions
from labkit.schedules.grid import Layer, Shape, window


def planes(name: str, options: Mapping[str, object], shapes: Shapes) -> list[Layer]:
    """A model's layers from the input to the loss, as machines in a grid see them.

    Raises: InvalidInput, for a model of which a layer cannot be cut, and as `labkit.models.check`.
    """
    parsed = check(name, options, shapes)
    if name not in _HIDDEN:
        raise InvalidInput(
            f"model {name!r} cannot be cut over a grid of machines; allowed: {', '.join(_HIDDEN)}"
        )
    own = shapes.input_shape
    shape: Shape = (own[0], own[1], own[2]) if len(own) == 3 else (1, 1, prod(own))
    layers = _HIDDEN[name](parsed, [Layer("input", "input", shape, trains=False)])
    layers.append(_dense(layers, shapes.outputs))
    return [*layers, Layer("loss", "loss", layers[-1].shape, trains=False)]


def _linear(options: Options, layers: list[Layer]) -> list[Layer]:
    return layers


def _mlp(options: MlpOptions, layers: list[Layer]) -> list[Layer]:
    if options.dropout:
        raise InvalidInput(
            f"dropout={options.dropout}: machines of a grid would not drop the same units; "
            "use dropout=0"
        )
    for width in options.widths:
        layers = [*layers, _dense(layers, width)]
    return layers


def _cnn(options: CnnOptions, layers: list[Layer]) -> list[Layer]:
    for filters in options.filters:
        layers = [*layers, _window("conv2d", layers, filters, 3, 1)]
    channels = options.filters[-1]
    layers = [*layers, _window("max_pooling2d", layers, channels, 2, 2, trains=False)]
    return [*layers, _dense(layers, options.dense)]


def _locally_connected(options: LocallyConnectedOptions, layers: list[Layer]) -> list[Layer]:
    for filters in options.filters:
        made = _window("locally_connected2d", layers, filters, options.kernel, options.stride)
        layers = [*layers, made]
    return layers


def _window(
    kind: str, layers: Sequence[Layer], channels: int, k: int, s: int, trains: bool = True
) -> Layer:
    return window(_named(kind, layers), layers[-1].shape, channels, (k, k), (s, s), trains)


def _dense(layers: Sequence[Layer], units: int) -> Layer:
    return Layer(_named("dense", layers), "units", (1, 1, units))


def _named(kind: str, layers: Sequence[Layer]) -> str:
    """As Keras names the layers of the first model of a process: dense, dense_1, …"""
    before = sum(each.name.startswith(kind) for each in layers)
    return f"{kind}_{before}" if before else kind


_HIDDEN: dict[str, Callable[[Any, list[Layer]], list[Layer]]] = {
    "locally_connected": _locally_connected,
    "cnn": _cnn,
    "mlp": _mlp,
    "linear": _linear,
}
