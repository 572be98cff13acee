"""Test what ranks in a grid exchange: all values that are read, nothing else, each once."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from labkit.common.errors import InvalidInput
from labkit.schedules.grid_layers import (
    Grid,
    GridLayer,
    allowed_grids,
    crossing,
    input_boxes,
    owned_boxes,
    squarest_grid,
    validate_grid,
    window,
)

Value = tuple[int, int, int]


@some.composite
def models(draw: Any) -> tuple[list[GridLayer], Grid]:
    """Draw convolutional and dense layers, and a grid over which they can be split."""
    grid = draw(some.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 2)]))
    sizes = [draw(some.integers(machines, machines + 2)) for machines in grid]  # of the last layer
    windows: list[tuple[Any, Any]] = []
    for _ in range(draw(some.integers(0, 2))):
        kernel = [draw(some.integers(1, 3)) for _ in grid]
        strides = [draw(some.integers(1, min(k, 2))) for k in kernel]
        spare = [draw(some.integers(0, s - 1)) for s in strides]  # rows that no kernel reads
        of = zip(sizes, kernel, strides, spare, strict=True)
        sizes = [(size - 1) * s + k + left for size, k, s, left in of]
        windows.insert(0, (tuple(kernel), tuple(strides)))
    layers = [GridLayer("input", "input", (sizes[0], sizes[1], draw(some.integers(1, 2))))]
    for kernel, strides in windows:
        channels, trains = draw(some.integers(1, 2)), draw(some.booleans())
        layers.append(window("places", layers[-1].shape, channels, kernel, strides, trains))
    for _ in range(draw(some.integers(0 if windows else 1, 2))):
        units = draw(some.integers(grid[0] * grid[1], 9))
        layers.append(GridLayer("units", "units", (1, 1, units)))
    return [*layers, GridLayer("loss", "loss", layers[-1].shape, trains=False)], grid


def values_of(shape: tuple[int, int, int]) -> list[Value]:
    return list(product(*map(range, shape)))


def owner(layer: GridLayer, value: Value, grid: Grid) -> int:
    """Return a value's owner: part k of n holds [k length // n, (k + 1) length // n)."""

    def part(place: int, length: int, parts: int) -> int:
        (found,) = (
            k for k in range(parts) if k * length // parts <= place < (k + 1) * length // parts
        )
        return found

    if layer.kind == "units":
        return part(value[2], layer.shape[2], grid[0] * grid[1])
    row = part(value[0], layer.shape[0], grid[0])
    return row * grid[1] + part(value[1], layer.shape[1], grid[1])


def edges(layer: GridLayer, before: GridLayer) -> list[tuple[Value, Value]]:
    """Return every pair (value read, value computed from it) between two layers."""
    if layer.kind != "places":
        return list(product(values_of(before.shape), values_of(layer.shape)))
    (k, m), (s, t) = layer.kernel, layer.strides
    return [
        ((i * s + a, j * t + b, c), (i, j, f))
        for i, j, f in values_of(layer.shape)
        for a, b, c in product(range(k), range(m), range(before.shape[2]))
    ]


@given(models())
def test_what_crosses_is_counted_edge_by_edge(drawn: tuple[list[GridLayer], Grid]) -> None:
    layers, grid = drawn
    expected = set()
    for number in range(2, len(layers)):
        layer, before = layers[number], layers[number - 1]
        for value, reader in edges(layer, before):
            source = owner(before, value, grid)
            destination = 0 if layer.kind == "loss" else owner(layer, reader, grid)
            if source != destination:
                expected.add((number, source, destination, value))
    found = crossing(layers, grid)
    sent = [
        (layer, source, destination, value)
        for (layer, source, destination, _), box in zip(found.rows(), found.box, strict=True)
        for value in product(*(range(first, last) for first, last in box.tolist()))
    ]
    assert len(sent) == len(set(sent))  # each value once for every rank that reads it
    assert set(sent) == expected
    assert found.values.sum() == len(expected)
    trained = [number for number, layer in enumerate(layers) if layer.trains and number]
    back = [number for number, *_ in expected if trained and number > trained[0]]
    assert found.values_back.sum() == len(back)


@given(models())
def test_a_machine_ends_with_exactly_what_its_outputs_read(
    drawn: tuple[list[GridLayer], Grid],
) -> None:
    layers, grid = drawn
    found = crossing(layers, grid)
    for number in range(2, len(layers)):
        before, shape = layers[number - 1], layers[number - 1].shape
        has, wants = owned_boxes(before, grid), input_boxes(layers[number], shape, grid)
        for machine in range(grid[0] * grid[1]):
            there = np.zeros(shape, int)
            mine = tuple(slice(*span) for span in has[machine].tolist())
            wanted = np.zeros(shape, bool)
            wanted[tuple(slice(*span) for span in wants[machine].tolist())] = True
            there[mine] = 1
            there[~wanted] = 0
            rows = (found.layer == number) & (found.destination == machine)
            for box in found.box[rows]:
                there[tuple(slice(*span) for span in box.tolist())] += 1
            np.testing.assert_array_equal(there, wanted)


@given(models())
def test_machines_hold_each_value_once(drawn: tuple[list[GridLayer], Grid]) -> None:
    layers, grid = drawn
    for layer in layers[1:]:
        count = np.zeros(layer.shape, int)
        sizes = []
        for box in owned_boxes(layer, grid):
            count[tuple(slice(*span) for span in box.tolist())] += 1
            sizes.append((box[:, 1] - box[:, 0]).tolist())
        assert (count == 1).all()
        if layer.kind != "loss":
            assert np.ptp(sizes, axis=0).max() <= 1


def test_the_drawing_of_two_machines() -> None:
    layers = [
        GridLayer("input", "input", (1, 6, 1)),
        window("first", (1, 6, 1), 1, (1, 1), (1, 1)),
        window("second", (1, 6, 1), 1, (1, 3), (1, 1)),
    ]
    found = crossing(layers, (1, 2))
    assert found.rows() == [(2, 0, 1, 1), (2, 1, 0, 1)]
    assert found.box[:, 1].tolist() == [[2, 3], [3, 4]]
    assert found.sent(0, 2) == (1, 1)


def test_dense_layers_read_all_and_the_loss_meets_on_machine_0() -> None:
    layers = [
        GridLayer("input", "input", (4, 4, 1)),
        window("tiles", (4, 4, 1), 3, (1, 1), (1, 1)),
        GridLayer("scores", "units", (1, 1, 10)),
        GridLayer("loss", "loss", (1, 1, 10), trains=False),
    ]
    found = crossing(layers, (2, 2))
    assert [row for row in found.rows() if row[0] == 2] == [
        (2, source, destination, 4 * 3)
        for source in range(4)
        for destination in range(4)
        if source != destination
    ]
    assert [row for row in found.rows() if row[0] == 3] == [
        (3, 1, 0, 3),
        (3, 2, 0, 2),
        (3, 3, 0, 3),
    ]


def test_what_no_kernel_reads_is_not_sent() -> None:
    layers = [
        GridLayer("input", "input", (5, 1, 1)),
        window("first", (5, 1, 1), 1, (1, 1), (1, 1)),
        window("pooled", (5, 1, 1), 1, (2, 1), (2, 1)),  # no kernel reads row 4
    ]
    assert crossing(layers, (2, 1)).rows() == []
    assert input_boxes(layers[2], (5, 1, 1), (2, 1))[:, 0].tolist() == [[0, 2], [2, 4]]


def test_gradients_return_only_where_weights_wait_for_them() -> None:
    layers = [
        GridLayer("input", "input", (4, 4, 1)),
        window("pooled", (4, 4, 1), 1, (2, 2), (1, 1), trains=False),
        window("first", (3, 3, 1), 1, (2, 2), (1, 1)),
        GridLayer("loss", "loss", (2, 2, 1), trains=False),
    ]
    found = crossing(layers, (2, 2))
    assert found.values_back[found.layer == 2].sum() == 0 < found.values[found.layer == 2].sum()
    assert found.values_back[found.layer == 3].sum() == 3


def test_grids_that_fit() -> None:
    layers = [
        window("tiles", (4, 6, 1), 1, (3, 3), (1, 1)),
        GridLayer("scores", "units", (1, 1, 5)),
    ]
    assert allowed_grids(layers, 6) == [(1, 1), (1, 2), (2, 1), (1, 3)]
    assert [squarest_grid(n) for n in (1, 2, 4, 6, 7, 12)] == [
        (1, 1),
        (1, 2),
        (2, 2),
        (2, 3),
        (1, 7),
        (3, 4),
    ]
    with pytest.raises(InvalidInput, match=r"grid=\(3, 1\) is larger than layer 'tiles' of 2 × 4"):
        validate_grid((3, 1), 3, layers)
    with pytest.raises(
        InvalidInput, match=r"'scores' of 5 units; allowed: \(1, 3\), \(1, 2\), \(2, 1"
    ):
        validate_grid((2, 3), 6, layers)
    with pytest.raises(
        InvalidInput, match=r"3 machines, .*workers=4 is .*; allowed: \(1, 2\), \(1, 4\), \(2, 2\)"
    ):
        validate_grid((1, 3), 4)


@pytest.mark.parametrize(
    ("kernel", "strides", "sentence"),
    [((5, 1), (1, 1), "5 × 1 does not fit into 4 × 6"), ((2, 2), (1, 3), "skip values")],
)
def test_a_window_that_cannot_be_is_refused(
    kernel: tuple[int, int], strides: tuple[int, int], sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        window("tiles", (4, 6, 1), 1, kernel, strides)
