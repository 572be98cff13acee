"""What models take whose layers are cut: in slices by units, or over a grid of machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from labkit.common.errors import InvalidInput
from labkit.forecast.calibration import LayerCost, Source, StepCost
from labkit.forecast.neighbours import Group, by_link, of_groups, typical
from labkit.forecast.order_statistics import alike, last_of, slowest
from labkit.forecast.query import COMPUTED, Query, StepForecast, trust
from labkit.schedules.grid import Grid, crossing, held

# Of kinds that have slices: which weight, and which of its dimensions, says how many there may be.
DIVIDED = {
    "Dense": (0, -1),
    "Conv2D": (0, -1),
    "Embedding": (0, 0),
    "MultiHeadAttention": (0, 1),
    "GroupedQueryAttention": (2, 1),
}
HEADS = ("MultiHeadAttention", "GroupedQueryAttention")
# What may stand within a pair: what it gives for a unit or channel, it makes of that alone.
WITHIN = (
    *("BatchNormalization", "Activation", "ReLU", "LeakyReLU", "ELU"),
    *("MaxPooling2D", "AveragePooling2D", "ZeroPadding2D", "UpSampling2D"),
)
SCORES = 2  # sums of a number a row by which slices share a loss, behind the largest of each


@dataclass(frozen=True)
class Slice:
    """What one slice of a layer does, a row: its share of the work, and what slices exchange.

    Attributes:
        share: of the layer's time and weights.
        total, gather: bytes that are added up, or gathered, on the way forward.
        back: bytes that are added up on the way back.
        sums: how many sums those are, forward.
    """

    share: float = 1.0
    total: float = 0.0
    gather: float = 0.0
    back: float = 0.0
    sums: int = 1


def sliced(
    layers: Sequence[LayerCost], size: int, shares_scores: bool, value: int = 4
) -> list[Slice]:
    """How each layer of a chain is cut, by the rules of `labkit.model_parallel.tensor`.

    Two layers of one kind, Dense or Conv2D, behind each other are a pair; so is attention by
    itself. A block of several layers of one kind counts as one of these.
    """
    found, share = [Slice() for _ in layers], 1 / size
    first = next((number for number, each in enumerate(layers) if each.weights), len(layers))
    done = -1  # the end of the last pair
    for number, layer in enumerate(layers):
        if number <= done or not _divides(layer, size):
            continue
        before = float(layers[number - 1].out) if first < number else 0.0
        if layer.kind in HEADS:
            found[number] = Slice(share, total=layer.out, back=before)
        elif layer.kind == "Embedding":
            found[number] = Slice(share, total=layer.out)
        elif (row := _behind(layers, number)) is not None:
            found[number:row] = [Slice(share, back=before), *[Slice(share)] * (row - number - 1)]
            found[row] = Slice(share, total=layers[row].out)
            done = row
        elif shares_scores and number == len(layers) - 1:
            found[number] = Slice(share, SCORES * value, size * value, before, SCORES)
        else:
            found[number] = Slice(share, gather=layer.out, back=before)
    return found


def _divides(layer: LayerCost, size: int) -> bool:
    """Whether there is something of it for each slice."""
    if layer.kind not in DIVIDED or not layer.weights:  # those of a frozen one are not known
        return False
    weight, dimension = DIVIDED[layer.kind]
    return layer.weights[weight][dimension] >= size


def _behind(layers: Sequence[LayerCost], number: int) -> int | None:
    """The layer that makes a pair with this one; None: there is none."""
    for other in range(number + 1, len(layers)):
        if layers[other].kind not in WITHIN:
            return other if layers[other].kind == layers[number].kind else None
    return None


@dataclass(frozen=True)
class Cost:
    """Of a slice, s: computing forward and back, the waits for others; bytes sent, and by link."""

    forward: float
    backward: float
    wire: float
    sent: float
    links: Mapping[str, float] = field(default_factory=dict)


def of_slices(
    group: Group, layers: Sequence[LayerCost], step: StepCost, rows: float, algorithm: str = ""
) -> Cost:
    """What ranks take that share these layers, on batches of so many rows."""
    scores = group.experiment.loss is None and bool(layers) and layers[-1] is group.model.layers[-1]
    forward = backward = wire = sent = 0.0
    links: Counter[str] = Counter()
    shared = sliced(layers, group.workers, scores, group.dtype.itemsize)
    for layer, own in zip(layers, shared, strict=True):
        forward += own.share * layer.forward * step.forward.median
        backward += own.share * layer.backward * step.backward.median
        sums = [("sum", own.total / own.sums)] * own.sums
        for kind, nbytes in (*sums, ("gather", own.gather), ("sum", own.back)):
            taken = group.total(nbytes * rows, algorithm, kind)
            wire, sent = wire + taken.seconds.median, sent + taken.sent
            links.update(taken.links)
    return Cost(forward, backward, wire, sent, links)


def of_tensor_parallel(asked: Query, slices: int, algorithm: str) -> StepForecast:
    """The step of `TensorParallel`: slices of all layers, replicas of these."""
    replicas, model = asked.workers // slices, asked.model
    rows = asked.experiment.batch_size / replicas
    step = asked.step(rows)
    group = Group.of(asked, range(slices))
    cost = of_slices(group, model.layers, step, rows, algorithm)
    shared = sliced(model.layers, slices, asked.experiment.loss is None)
    held = sum(s.share * _size(layer) for s, layer in zip(shared, model.layers, strict=True))
    share = held / max(1, sum(map(_size, model.layers)))
    mean = Group.of(asked, range(0, asked.workers, slices)).total(asked.dtype.itemsize * held)
    parts = {
        "forward": cost.forward,
        "backward": cost.backward,
        "other": step.other.median,
        "update": share * step.update.median,
        "wire": cost.wire + mean.seconds.median,
    }
    parts["wait"] = _late(asked, rows, parts)
    whole = asked.memory(rows)
    return StepForecast(
        parts=parts,
        rows=rows,
        spread=typical(asked, step, parts),
        nbytes=of_groups(asked, slices, cost.links, mean.links),
        memory={n: each if n == "activations" else share * each for n, each in whole.items()},
        sources=(
            asked.computing(rows, "by the shares of layers"),
            Source("what slices exchange", "the rules of a chain, by the kinds of layers"),
            *trust(asked),
        ),
        more={"sent": replicas * cost.sent + slices * mean.sent, "held": share},
    )


def of_grid(asked: Query, grid: Grid) -> StepForecast:
    """The step of `LocallyConnected`: tiles of all layers, what crosses before each of them.

    Raises: InvalidInput, for a model of which nobody knows the planes.
    """
    planes, machines = asked.experiment.planes, grid[0] * grid[1]
    if planes is None:
        raise InvalidInput(
            "a grid has a forecast for named models and data sets alone, of which the borders of "
            "tiles are known; give model='locally_connected' or another name"
        )
    replicas = asked.workers // machines
    rows = asked.experiment.batch_size / replicas
    step, group = asked.step(rows), Group.of(asked, range(machines))
    value = asked.dtype.itemsize
    crosses = crossing(planes, grid)
    forward = backward = wire = 0.0
    messages = []
    for number in range(1, len(planes)):
        here = crosses.layer == number
        out = zip(
            *(crosses.source[here].tolist(), crosses.destination[here].tolist()),
            *(crosses.values[here].tolist(), crosses.values_back[here].tolist()),
            strict=True,
        )
        ways = [(a, b, value * rows * n, value * rows * back) for a, b, n, back in out]
        there = [(a, b, n) for a, b, n, _ in ways]
        back = [(b, a, n) for a, b, _, n in ways if n]
        messages += [*there, *back]
        wire += group.exchange(there) + group.exchange(back)
    shares = [*_tiles(asked, grid)]
    forward = sum(each * layer.forward for each, layer in shares) * step.forward.median
    backward = sum(each * layer.backward for each, layer in shares) * step.backward.median
    kernels = sum(value * _size(layer) for _, layer in shares if layer.kind == "Conv2D")
    rest = value * sum(map(_size, asked.model.layers)) - kernels
    kernel = group.total(kernels)
    mean = Group.of(asked, range(0, asked.workers, machines)).total(kernels + rest / machines)
    wire += kernel.seconds.median + mean.seconds.median
    sent = sum(each for *_, each in messages)
    all_messages = [
        (machines * replica + a, machines * replica + b, nbytes)
        for replica in range(replicas)
        for a, b, nbytes in messages
    ]
    share = (kernels + rest / machines) / max(1.0, kernels + rest)
    parts = {
        "forward": forward,
        "backward": backward,
        "other": step.other.median,
        "update": share * step.update.median,
        "wire": wire,
    }
    parts["wait"] = _late(asked, rows, parts)
    return StepForecast(
        parts=parts,
        rows=rows,
        spread=typical(asked, step, parts),
        nbytes=by_link(asked, all_messages),
        memory={
            n: each * (1 / machines if n == "activations" else share)
            for n, each in asked.memory(rows).items()
        },
        sources=(
            asked.computing(rows, "by the largest tile"),
            Source("what crosses", "the messages of the grid, all of a layer at once"),
            *trust(asked),
        ),
        more={"sent": replicas * (sent + kernel.sent) + machines * mean.sent},
    )


def _late(asked: Query, rows: float, parts: Mapping[str, float]) -> float:
    """Seconds that the slowest of all ranks computes longer, for which each layer waits."""
    ranks = alike(asked, [max(1, round(rows))] * asked.workers)
    own = asked.computed(max(1, round(rows))).seconds
    late = last_of(ranks, slowest(ranks)) / own - 1 if own else 0.0
    return late * sum(parts[name] for name in COMPUTED)


def _tiles(asked: Query, grid: Grid) -> Iterator[tuple[float, LayerCost]]:
    """Of each layer: the share of its values that the machine with most of them has."""
    known = {each.name: each for each in asked.experiment.planes}
    for layer in asked.model.layers:
        plane, share = known.get(layer.name), 1 / (grid[0] * grid[1])
        if plane is not None:
            boxes = held(plane, grid)
            most = (boxes[:, :, 1] - boxes[:, :, 0]).prod(axis=1).max()
            share = float(most / prod(plane.shape))
        yield share, layer


def _size(layer: LayerCost) -> int:
    return sum(map(prod, layer.weights))
