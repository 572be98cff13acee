"""Forecasts of strategies that divide layers: tensor parallelism, and grids of machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from labkit.common.errors import InvalidInput
from labkit.forecast.calibration import LayerCost, Provenance, StepCost
from labkit.forecast.neighbours import Group, link_bytes, link_bytes_of_groups, typical_interval
from labkit.forecast.query import COMPUTED, Query, StepForecast, network_error_sources
from labkit.forecast.workers import expected_maximum, group_ranks, slowest
from labkit.schedules.grid_layers import Grid, crossing, owned_boxes

# `DIVIDED` contains the Keras layer classes that tensor parallelism can divide into slices. Each
# entry of `DIVIDED` contains the index of a weight and a dimension. The dimension of the weight
# limits the number of slices.
DIVIDED = {
    "Dense": (0, -1),
    "Conv2D": (0, -1),
    "Embedding": (0, 0),
    "MultiHeadAttention": (0, 1),
    "GroupedQueryAttention": (2, 1),
}
HEADS = ("MultiHeadAttention", "GroupedQueryAttention")
# `WITHIN` lists layer classes that may be between two paired layers. Layers in `WITHIN` treat each
# unit or channel separately.
WITHIN = (
    *("BatchNormalization", "Activation", "ReLU", "LeakyReLU", "ELU"),
    *("MaxPooling2D", "AveragePooling2D", "ZeroPadding2D", "UpSampling2D"),
)
# If the scores are divided among ranks, the loss needs two allreduces, each with one value per
# sample.
SCORES = 2


@dataclass(frozen=True)
class SliceWork:
    """One rank's slice of a layer: fraction of the layer's work, and communication per sample.

    Attributes:
        share: Fraction of the layer's time and weights.
        total, gather: Bytes in the forward pass: bytes that an allreduce sums, and bytes that a
            gather collects.
        back: Bytes that an allreduce sums in the backward pass.
        sums: Number of allreduces that together sum the bytes `total`.
    """

    share: float = 1.0
    total: float = 0.0
    gather: float = 0.0
    back: float = 0.0
    sums: int = 1


def sliced(
    layers: Sequence[LayerCost], size: int, shares_scores: bool, value: int = 4
) -> list[SliceWork]:
    """Return one rank's slice of each layer, divided as in `labkit.model_parallel.tensor`.

    Two consecutive layers of one class, Dense or Conv2D, form a pair that needs only one allreduce.
    An attention layer alone counts as a pair. A block of several layers of one class counts as one
    layer.
    """
    slices, share = [SliceWork() for _ in layers], 1 / size
    first = next((number for number, layer in enumerate(layers) if layer.weights), len(layers))
    pair_end = -1  # Layers up to the index `pair_end` are already divided.
    for number, layer in enumerate(layers):
        if number <= pair_end or not _divides(layer, size):
            continue
        input_bytes = float(layers[number - 1].out) if first < number else 0.0
        if layer.kind in HEADS:
            slices[number] = SliceWork(share, total=layer.out, back=input_bytes)
        elif layer.kind == "Embedding":
            slices[number] = SliceWork(share, total=layer.out)
        elif (second := _behind(layers, number)) is not None:
            slices[number:second] = [
                SliceWork(share, back=input_bytes),
                *[SliceWork(share)] * (second - number - 1),
            ]
            slices[second] = SliceWork(share, total=layers[second].out)
            pair_end = second
        elif shares_scores and number == len(layers) - 1:
            slices[number] = SliceWork(share, SCORES * value, size * value, input_bytes, SCORES)
        else:
            slices[number] = SliceWork(share, gather=layer.out, back=input_bytes)
    return slices


def _divides(layer: LayerCost, size: int) -> bool:
    """Return whether a layer can be divided: it has at least one unit per slice."""
    # A frozen layer is not divided, because the calibration lacks the shapes of its weights.
    if layer.kind not in DIVIDED or not layer.weights:
        return False
    weight, dimension = DIVIDED[layer.kind]
    return layer.weights[weight][dimension] >= size


def _behind(layers: Sequence[LayerCost], number: int) -> int | None:
    """Return the number of the later layer that is paired with layer `number`, or None."""
    for other in range(number + 1, len(layers)):
        if layers[other].kind not in WITHIN:
            return other if layers[other].kind == layers[number].kind else None
    return None


@dataclass(frozen=True)
class SliceCost:
    """The cost of a slice: seconds of both passes and of communication, and bytes sent."""

    forward: float
    backward: float
    wire: float
    sent: float
    links: Mapping[str, float] = field(default_factory=dict)


def slice_cost(
    group: Group, layers: Sequence[LayerCost], step: StepCost, rows: float, algorithm: str = ""
) -> SliceCost:
    """Return one rank's cost if a group divides `layers` into slices, for `rows` samples."""
    shares_scores = (
        group.experiment.loss is None and bool(layers) and layers[-1] is group.model.layers[-1]
    )
    forward = backward = wire = sent = 0.0
    links: Counter[str] = Counter()
    layer_slices = sliced(layers, group.workers, shares_scores, group.dtype.itemsize)
    for layer, layer_slice in zip(layers, layer_slices, strict=True):
        forward += layer_slice.share * layer.forward * step.forward.median
        backward += layer_slice.share * layer.backward * step.backward.median
        sums = [("sum", layer_slice.total / layer_slice.sums)] * layer_slice.sums
        for kind, nbytes in (*sums, ("gather", layer_slice.gather), ("sum", layer_slice.back)):
            estimate = group.total(nbytes * rows, algorithm, kind)
            wire, sent = wire + estimate.seconds.median, sent + estimate.sent
            links.update(estimate.links)
    return SliceCost(forward, backward, wire, sent, links)


def of_tensor_parallel(query: Query, slices: int, algorithm: str) -> StepForecast:
    """Return the step forecast of `TensorParallel`: each replica divides its layers into slices."""
    replicas, model = query.workers // slices, query.model
    rows = query.experiment.batch_size / replicas
    step = query.step(rows)
    group = Group.of(query, range(slices))
    cost = slice_cost(group, model.layers, step, rows, algorithm)
    layer_slices = sliced(model.layers, slices, query.experiment.loss is None)
    weights_held = sum(
        layer_slice.share * _size(layer)
        for layer_slice, layer in zip(layer_slices, model.layers, strict=True)
    )
    share = weights_held / max(1, sum(map(_size, model.layers)))
    mean = Group.of(query, range(0, query.workers, slices)).total(
        query.dtype.itemsize * weights_held
    )
    parts = {
        "forward": cost.forward,
        "backward": cost.backward,
        "other": step.other.median,
        "update": share * step.update.median,
        "wire": cost.wire + mean.seconds.median,
    }
    parts["wait"] = _slowest_wait(query, rows, parts)
    memory = query.memory(rows)
    return StepForecast(
        parts=parts,
        rows=rows,
        spread=typical_interval(query, step, parts),
        nbytes=link_bytes_of_groups(query, slices, cost.links, mean.links),
        memory={
            n: nbytes if n == "activations" else share * nbytes for n, nbytes in memory.items()
        },
        sources=(
            query.compute_source(rows, "divided among ranks by the layers' shares"),
            Provenance("what slices exchange", "derived from the classes of the layers"),
            *network_error_sources(query),
        ),
        more={"sent": replicas * cost.sent + slices * mean.sent, "held": share},
    )


def of_grid(query: Query, grid: Grid) -> StepForecast:
    """Return the step forecast of `SpatialParallel`: each replica divides its layers into tiles.

    Raises:
        InvalidInput: The shapes of the model's layers are unknown.
    """
    planes, machines = query.experiment.grid_layers, grid[0] * grid[1]
    if planes is None:
        raise InvalidInput(
            "a grid has a forecast only for named models and data sets, because their tile borders "
            "are known; give a name, such as model='locally_connected'"
        )
    replicas = query.workers // machines
    rows = query.experiment.batch_size / replicas
    step, group = query.step(rows), Group.of(query, range(machines))
    value = query.dtype.itemsize
    crosses = crossing(planes, grid)
    forward = backward = wire = 0.0
    messages = []
    for number in range(1, len(planes)):
        mask = crosses.layer == number
        crossings = zip(
            *(crosses.source[mask].tolist(), crosses.destination[mask].tolist()),
            *(crosses.values[mask].tolist(), crosses.values_back[mask].tolist()),
            strict=True,
        )
        exchanges = [
            (a, b, value * rows * n, value * rows * backward_messages)
            for a, b, n, backward_messages in crossings
        ]
        forward_messages = [(a, b, n) for a, b, n, _ in exchanges]
        backward_messages = [(b, a, n) for a, b, _, n in exchanges if n]
        messages += [*forward_messages, *backward_messages]
        wire += group.exchange(forward_messages) + group.exchange(backward_messages)
    shares = [*_tile_shares(query, grid)]
    forward = sum(share * layer.forward for share, layer in shares) * step.forward.median
    backward = sum(share * layer.backward for share, layer in shares) * step.backward.median
    kernels = sum(value * _size(layer) for _, layer in shares if layer.kind == "Conv2D")
    other_bytes = value * sum(map(_size, query.model.layers)) - kernels
    kernel = group.total(kernels)
    mean = Group.of(query, range(0, query.workers, machines)).total(
        kernels + other_bytes / machines
    )
    wire += kernel.seconds.median + mean.seconds.median
    sent = sum(share for *_, share in messages)
    all_messages = [
        (machines * replica + a, machines * replica + b, nbytes)
        for replica in range(replicas)
        for a, b, nbytes in messages
    ]
    share = (kernels + other_bytes / machines) / max(1.0, kernels + other_bytes)
    parts = {
        "forward": forward,
        "backward": backward,
        "other": step.other.median,
        "update": share * step.update.median,
        "wire": wire,
    }
    parts["wait"] = _slowest_wait(query, rows, parts)
    return StepForecast(
        parts=parts,
        rows=rows,
        spread=typical_interval(query, step, parts),
        nbytes=link_bytes(query, all_messages),
        memory={
            n: nbytes * (1 / machines if n == "activations" else share)
            for n, nbytes in query.memory(rows).items()
        },
        sources=(
            query.compute_source(rows, "for the largest tile"),
            Provenance(
                "what crosses tiles", "the messages of the grid, sent at once in each layer"
            ),
            *network_error_sources(query),
        ),
        more={"sent": replicas * (sent + kernel.sent) + machines * mean.sent},
    )


def _slowest_wait(query: Query, rows: float, parts: Mapping[str, float]) -> float:
    """Return how many seconds all ranks wait for the computation of the slowest rank."""
    groups = group_ranks(query, [max(1, round(rows))] * query.workers)
    compute_seconds = query.compute_step(max(1, round(rows))).seconds
    relative_wait = (
        expected_maximum(groups, slowest(groups)) / compute_seconds - 1 if compute_seconds else 0.0
    )
    return relative_wait * sum(parts[name] for name in COMPUTED)


def _tile_shares(query: Query, grid: Grid) -> Iterator[tuple[float, LayerCost]]:
    """Yield pairs (fraction, layer): the largest fraction of the layer's values on one machine."""
    planes = {grid_plane.name: grid_plane for grid_plane in query.experiment.grid_layers}
    for layer in query.model.layers:
        plane, share = planes.get(layer.name), 1 / (grid[0] * grid[1])
        if plane is not None:
            boxes = owned_boxes(plane, grid)
            largest_tile = (boxes[:, :, 1] - boxes[:, :, 0]).prod(axis=1).max()
            share = float(largest_tile / prod(plane.shape))
        yield share, layer


def _size(layer: LayerCost) -> int:
    return sum(map(prod, layer.weights))
