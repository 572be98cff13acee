"""Layered drawings of operation graphs, with a colour and a symbol for each device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import NamedTuple

from labkit.common.errors import InvalidInput
from labkit.common.units import bytes_text, plural
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import INK, LineStyle, lines, safe_text
from labkit.figures.kit.marks import QUIET
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import sheet

MOST = 60  # maximum number of nodes in a figure; `collapsed` reduces larger graphs
SWEEPS = 12  # number of passes over all layers that reorder their nodes
LAYER = 42  # vertical distance between two layers, in pixels
BEND = 0.35  # In each layer that an edge crosses, the edge takes this fraction of a node's width.
LOOSE = 2.0  # maximum factor by which a layer with few nodes is widened, to make room for texts
COPY = "#D55E00"
# With more than `NAMED` copies between devices, only hover texts show a copy's bytes.
NAMED = 14


@dataclass(frozen=True)
class DrawnNode:
    """An operation in a drawing of an operation graph.

    Attributes:
        name: The node's name, which is unique in the graph.
        kind: Text that is drawn beside the node, such as the operation type.
        device: Device that executes the operation, such as `CPU:1`.
        details: Text that follows the name in the hover text.
        weight: Seconds, or another measure of importance; `collapsed` merges nodes of low weight
            first.
    """

    name: str
    kind: str
    device: str
    details: str = ""
    weight: float = 0.0


@dataclass(frozen=True)
class Edge:
    """A dependency of the target node on the source node; a control edge transfers no data."""

    source: str
    target: str
    bytes: float = 0.0
    control: bool = False


class DrawnPosition(NamedTuple):
    """Position of a node, or of a bend in an edge: layer from the top, and x coordinate."""

    layer: float
    across: float


def layered(
    nodes: Sequence[DrawnNode],
    edges: Sequence[Edge],
    title: str = "Graph",
    remark: str = "",
) -> Figure:
    """Draw nodes in layers, each below its dependencies; colour and symbol show the device.

    A thick edge connects two devices, so its tensor is copied; the text beside it shows the bytes.
    Dotted edges are control dependencies, which transfer no data.

    Args:
        nodes: Nodes of the graph, at most `MOST`; the function `collapsed` reduces larger graphs.
        edges: Edges between the nodes, without cycles.
        title: Title of the figure. If the figure shows times, the title must name the clock.
        remark: Subtitle.

    Raises:
        InvalidInput: The graph has no nodes, too many nodes, or two nodes of the same name.
            `InvalidInput` is also raised if an edge refers to an unknown node. A cycle of edges
            also raises `InvalidInput`.
    """
    places, paths = layout(nodes, edges)
    looks = lines(sorted({node.device for node in nodes}))
    devices = {node.name: node.device for node in nodes}
    crossing = [not edge.control and devices[edge.source] != devices[edge.target] for edge in edges]
    copies = [edge for edge, across in zip(edges, crossing, strict=True) if across]
    drawn = [_edge(edge, paths[edge], edge in copies, len(copies)) for edge in edges]
    drawn += [_nodes(nodes, places, device, look) for device, look in looks.items()]
    deepest = int(max(place.layer for place in places.values()))
    # The axis range includes the bends of edges, because bends may lie outside all nodes.
    ends = [place.across for place in chain(places.values(), *paths.values())]
    panel = Panel(
        title=f"{plural(len(nodes), 'node')}, {plural(len(copies), 'edge')} between "
        "devices\neach node is drawn below the nodes that it depends on",
        x="",
        y="",
        traces=drawn,
        # The right margin leaves room for the text beside the last node.
        x_axis={"visible": False, "range": [min(ends) - 0.5, max(ends) + 1.0]},
        y_axis={"visible": False, "range": [deepest + 0.7, -0.7]},
    )
    legend = [*looks.values()]
    if copies:
        legend.append(LineStyle("copy between devices", COPY, "solid", "line-ew"))
    words = _words(nodes, copies)
    return sheet([[panel]], legend, title, [remark], words, plot=LAYER * (deepest + 2), below=10)


class GraphLayout(NamedTuple):
    """Layout of a drawing: the position of each named node, and the points of each edge."""

    nodes: dict[str, DrawnPosition]
    edges: dict[Edge, list[DrawnPosition]]


def layout(nodes: Sequence[DrawnNode], edges: Sequence[Edge]) -> GraphLayout:
    """Return the positions of nodes and edges, or raise the errors of `layered`."""
    _validate_graph(nodes, edges)
    depths = layers([node.name for node in nodes], edges)
    name_paths = _edge_paths(edges, depths)
    places = _places(nodes, depths, name_paths)
    paths = {edge: [places[name] for name in path] for edge, path in name_paths.items()}
    return GraphLayout({node.name: places[node.name] for node in nodes}, paths)


def layers(names: Sequence[str], edges: Sequence[Edge]) -> dict[str, int]:
    """Return the depth of each node: the length of the longest path from a node without inputs.

    Raises:
        InvalidInput: The edges form a cycle.
    """
    needs: dict[str, set[str]] = {name: set() for name in names}
    for edge in edges:
        needs[edge.target].add(edge.source)
    depths: dict[str, int] = {}
    while len(depths) < len(needs):
        ready = [n for n, above in needs.items() if n not in depths and above <= depths.keys()]
        if not ready:
            remaining = ", ".join(sorted(needs.keys() - depths.keys())[:5])
            raise InvalidInput(
                f"the edges form a cycle among {remaining}: give a graph without cycles"
            )
        depths |= {name: 1 + max((depths[n] for n in needs[name]), default=-1) for name in ready}
    return depths


def _validate_graph(nodes: Sequence[DrawnNode], edges: Sequence[Edge]) -> None:
    names = {node.name for node in nodes}
    if not nodes:
        raise InvalidInput("the graph has no nodes: give at least one node")
    if len(names) < len(nodes):
        raise InvalidInput("two nodes have the same name: give each node a unique name")
    if len(nodes) > MOST:
        raise InvalidInput(
            f"{len(nodes)} nodes are too many for one figure; allowed are at most {MOST}: merge "
            "nodes with labkit.figures.collapsed"
        )
    for edge in edges:
        if unknown := {edge.source, edge.target} - names:
            raise InvalidInput(
                f"an edge refers to {sorted(unknown)[0]!r}, which is not a node of the "
                "graph: add the node, or remove the edge"
            )


# A path starts and ends with the names of an edge's two nodes. Between the two nodes, the path
# names one bend in each crossed layer. The bend of an edge needs room in its layer, like a node.
Path = tuple[str, ...]


def _edge_paths(edges: Sequence[Edge], depths: Mapping[str, int]) -> dict[Edge, Path]:
    paths = {}
    for number, edge in enumerate(edges):
        passed = range(depths[edge.source] + 1, depths[edge.target])
        bends = [f"\0{number}\0{layer}" for layer in passed]
        paths[edge] = (edge.source, *bends, edge.target)
    return paths


def _places(
    nodes: Sequence[DrawnNode], depths: Mapping[str, int], paths: Mapping[Edge, Path]
) -> dict[str, DrawnPosition]:
    """Order nodes by the mean position of neighbours above and below, in alternating passes.

    Source: Sugiyama, Tagawa and Toda 1981, *Methods for visual understanding of hierarchical system
    structures*. Difference: the result is the order after the last pass, not the order with the
    fewest crossings.
    """
    rows: list[list[str]] = [[] for _ in range(max(depths.values()) + 1)]
    for node in sorted(nodes, key=lambda node: node.device):
        rows[depths[node.name]].append(node.name)
    near: dict[str, tuple[list[str], list[str]]] = {n.name: ([], []) for n in nodes}
    for edge, path in paths.items():
        for step, bend in enumerate(path[1:-1], 1):
            rows[depths[edge.source] + step].append(bend)
            near[bend] = ([], [])
        for above, below in pairwise(path):
            near[above][1].append(below)
            near[below][0].append(above)
    widest = max(sum(_widths(row)) for row in rows)
    across: dict[str, float] = {}
    for row in rows:
        across |= zip(row, _spread(row, widest), strict=True)
    for sweep in range(SWEEPS):
        side = sweep % 2
        for row in rows if side == 0 else rows[::-1]:
            middle = {
                name: sum(across[n] for n in near[name][side]) / len(near[name][side])
                if near[name][side]
                else across[name]
                for name in row
            }
            row.sort(key=lambda name: middle[name])
            across |= zip(row, _spread(row, widest), strict=True)
    return {
        name: DrawnPosition(layer, across[name]) for layer, row in enumerate(rows) for name in row
    }


def _widths(row: Sequence[str]) -> list[float]:
    return [BEND if name.startswith("\0") else 1.0 for name in row]


def _spread(row: Sequence[str], widest: float) -> list[float]:
    """Return x positions in one layer, centred at 0; bends of edges need less room than nodes."""
    group = sum(_widths(row))
    widths = [width * min(LOOSE, widest / group) for width in _widths(row)]
    ends = [sum(widths[: place + 1]) for place in range(len(row))]
    return [end - (width + sum(widths)) / 2 for end, width in zip(ends, widths, strict=True)]


def _edge(edge: Edge, path: Sequence[DrawnPosition], copied: bool, copies: int) -> Trace:
    size = bytes_text(edge.bytes)
    line = {"color": COPY if copied else INK, "width": 2.5 if copied else 0.8, "shape": "spline"}
    if edge.control:
        line["dash"] = "dot"
    if copied:
        # The bytes are shown on the last segment of an edge. Edges from the same node are far apart
        # on their last segments.
        above, below = path[-2:]
        middle = DrawnPosition((above.layer + below.layer) / 2, (above.across + below.across) / 2)
        path = [*path[:-1], middle, below]
    trace: Trace = {
        "x": [place.across for place in path],
        "y": [place.layer for place in path],
        "mode": "lines",
        "line": line,
        "opacity": 0.9 if copied else 0.6,
    }
    if not copied:
        return trace | QUIET
    if copies <= NAMED:
        texts = [size if place == len(path) - 2 else "" for place in range(len(path))]
        trace |= {"mode": "lines+text", "text": texts, "textposition": "middle right"}
        trace["textfont"] = {"size": 10, "color": COPY}
    return trace | {"showlegend": False, "hovertemplate": _hover_text(edge, size)}


def _hover_text(edge: Edge, size: str) -> str:
    return (
        f"{safe_text(edge.source)}<br>to {safe_text(edge.target)}: {size}<extra>copy between "
        "devices</extra>"
    )


def _nodes(
    nodes: Sequence[DrawnNode], places: Mapping[str, DrawnPosition], device: str, look: LineStyle
) -> Trace:
    group = [node for node in nodes if node.device == device]
    hover = [" · ".join(filter(None, (node.name, node.details))) for node in group]
    return {
        "x": [places[node.name].across for node in group],
        "y": [places[node.name].layer for node in group],
        "mode": "markers+text",
        "marker": {"color": look.color, "symbol": look.symbol, "size": 12},
        "text": [safe_text(node.kind) for node in group],
        "textposition": "middle right",
        "textfont": {"size": 10, "color": INK},
        "hovertext": [safe_text(text) for text in hover],
        "hovertemplate": f"%{{hovertext}}<extra>{safe_text(device)}</extra>",
        "showlegend": False,
    } | look.style


def _words(nodes: Sequence[DrawnNode], copies: Sequence[Edge]) -> list[str]:
    counts: dict[str, int] = {}
    for node in nodes:
        counts[node.device] = counts.get(node.device, 0) + 1
    texts = [f"{plural(count, 'node')} on {device}" for device, count in sorted(counts.items())]
    total = bytes_text(sum(edge.bytes for edge in copies))
    return [*texts, f"{plural(len(copies), 'edge')} between devices, {total} in all"]


def collapsed(
    nodes: Sequence[DrawnNode], edges: Sequence[Edge], most: int = MOST
) -> tuple[list[DrawnNode], list[Edge]]:
    """Merge neighbours on the same device, lowest weight first, until `most` nodes remain.

    Two nodes are merged if the first node has no other successor. Two nodes are also merged if the
    second node has no other predecessor. Other merges could create cycles in the graph. The merged
    node keeps the name and kind of the heavier node. The weight of the merged node is the sum of
    both weights. The edges of the merged node have summed bytes. If no further pair can be merged,
    more than `most` nodes remain.

    Args:
        nodes, edges: Nodes and edges of the graph, as in `layered`.
        most: Number of nodes at which merging stops.
    """
    remaining = {node.name: node for node in nodes}
    merged_counts = Counter({node.name: 1 for node in nodes})
    links: dict[tuple[str, str], Edge] = {}
    for edge in edges:
        _merge_edge(links, edge)
    while len(remaining) > most and (pair := _lightest_pair(remaining, links)) is not None:
        source, target = (remaining[name] for name in pair)
        survivor, merged = (source, target) if source.weight > target.weight else (target, source)
        del links[pair], remaining[merged.name]
        merged_counts[survivor.name] += merged_counts.pop(merged.name)
        remaining[survivor.name] = replace(survivor, weight=source.weight + target.weight)
        for ends in [ends for ends in links if merged.name in ends]:
            edge = links.pop(ends)
            named = [survivor.name if name == merged.name else name for name in ends]
            _merge_edge(links, replace(edge, source=named[0], target=named[1]))
    counted_nodes = [_with_count(node, merged_counts[node.name]) for node in remaining.values()]
    return counted_nodes, list(links.values())


def _with_count(node: DrawnNode, count: int) -> DrawnNode:
    if count == 1:
        return node
    return replace(
        node, kind=f"{node.kind} +{count - 1}", details=f"{node.details} {count} operations"
    )


def _merge_edge(links: dict[tuple[str, str], Edge], edge: Edge) -> None:
    """Add an edge to `links`; if `links` has an edge between the same nodes, only add the bytes."""
    ends = (edge.source, edge.target)
    if (old := links.get(ends)) is not None:
        edge = replace(edge, bytes=edge.bytes + old.bytes, control=edge.control and old.control)
    links[ends] = edge


def _lightest_pair(
    remaining: dict[str, DrawnNode], links: dict[tuple[str, str], Edge]
) -> tuple[str, str] | None:
    after = Counter(source for source, _ in links)
    before = Counter(target for _, target in links)
    pairs = [
        (min(remaining[a].weight, remaining[b].weight), (a, b))
        for a, b in links
        if remaining[a].device == remaining[b].device and (after[a] == 1 or before[b] == 1)
    ]
    return min(pairs, default=(0.0, None))[1]
