"""Test graphs that are drawn top down by device, and joined into fewer nodes without a cycle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.common.errors import InvalidInput
from labkit.figures.graphs.layered import MOST, DrawnNode, Edge, collapsed, layered, layers

DIAMOND = [
    DrawnNode("a", "MatMul", "CPU:0"),
    DrawnNode("b", "Relu", "CPU:1"),
    DrawnNode("c", "Sum", "CPU:0"),
]
DIAMOND += [DrawnNode("d", "AddN", "CPU:0")]
SIDES = [
    Edge("a", "b", 2048),
    Edge("a", "c", 8),
    Edge("b", "d", 2048),
    Edge("c", "d", control=True),
]


def test_a_node_stands_below_all_that_it_needs() -> None:
    names = ["d", "c", "b", "a"]
    assert layers(names, SIDES) == {"a": 0, "b": 1, "c": 1, "d": 2}
    assert layers(names, [*SIDES, Edge("b", "c")])["d"] == 3


def test_a_device_is_a_trace_and_a_copy_carries_its_bytes() -> None:
    figure = layered(DIAMOND, SIDES, "Graph · wall clock", "a remark")
    nodes = {trace.name: trace for trace in figure.data if trace.mode == "markers+text"}
    assert list(nodes["CPU:0"].text) == ["MatMul", "Sum", "AddN"]
    assert list(nodes["CPU:1"].y) == [1]
    copies = [trace for trace in figure.data if trace.mode == "lines+text"]
    assert ["2 KiB" in trace.text for trace in copies] == [True, True]
    assert figure.alt == (
        "Graph · wall clock. a remark. 3 nodes on CPU:0. 1 node on CPU:1. "
        "2 edges between devices, 4 KiB in all."
    )


def test_nodes_of_a_layer_do_not_lie_on_each_other() -> None:
    figure = layered(DIAMOND, SIDES)
    placed = [
        place
        for trace in figure.data
        if trace.mode == "markers+text" and trace.x[0] is not None
        for place in zip(trace.x, trace.y, strict=True)
    ]
    assert len(set(placed)) == 4
    beside = sorted(x for x, y in placed if y == 1)
    assert beside[1] - beside[0] >= 1


@pytest.mark.parametrize(
    ("nodes", "edges", "words"),
    [
        ([], [], "the graph has no nodes"),
        ([DIAMOND[0]] * 2, [], "the same name"),
        (DIAMOND, [Edge("a", "z")], "'z', which is not a node"),
        (DIAMOND, [*SIDES, Edge("d", "a")], "a cycle among a, b, c, d"),
        ([DrawnNode(str(n), "", "") for n in range(MOST + 1)], [], f"allowed are at most {MOST}"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    nodes: list[DrawnNode], edges: list[Edge], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        layered(nodes, edges)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[DrawnNode], list[Edge]]:
    count = draw(st.integers(1, 12))
    devices = draw(st.lists(st.sampled_from("AB"), min_size=count, max_size=count))
    nodes = [DrawnNode(str(n), f"k{n}", device, weight=n % 5) for n, device in enumerate(devices)]
    pairs = [(a, b) for b in range(count) for a in range(b)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return nodes, [Edge(str(a), str(b), 1.0) for a, b in chosen]


@given(graphs())
def test_joining_neighbours_keeps_devices_weights_and_copies_and_makes_no_circle(
    graph: tuple[list[DrawnNode], list[Edge]],
) -> None:
    nodes, edges = graph
    fewer, between = collapsed(nodes, edges, most=1)
    layers([node.name for node in fewer], between)  # raises an error if there is a cycle
    for device in "AB":
        weights = [sum(n.weight for n in each if n.device == device) for each in (nodes, fewer)]
        assert weights[0] == weights[1]
    assert len({node.name for node in fewer}) == len(fewer)
    on = {node.name: node.device for node in nodes}
    crossing = [
        sum(e.bytes for e in each if on[e.source] != on[e.target]) for each in (edges, between)
    ]
    assert crossing[0] == crossing[1]


def test_a_chain_on_one_device_becomes_its_heaviest_node() -> None:
    chain = [DrawnNode("a", "Cast", "CPU:0"), DrawnNode("b", "MatMul", "CPU:0", weight=2.0)]
    (joined,), none = collapsed([*chain], [Edge("a", "b", 4)], most=1)
    assert (joined.name, joined.kind, joined.weight, none) == ("b", "MatMul +1", 2.0, [])
