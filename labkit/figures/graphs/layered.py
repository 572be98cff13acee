"""Layered drawings of graphs of operations, with one colour per device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import NamedTuple

from labkit.common.errors import InvalidInput
from labkit.common.units import bytes_text, plural
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import INK, Line, lines, safe_text
from labkit.figures.kit.marks import QUIET
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import sheet

MOST = 60  # nodes that a figure can show; `collapsed` makes fewer of more
SWEEPS = 12  # over the layers, each time ordered by the neighbours in the layer before
LAYER = 42  # pixels from layer to layer
BEND = 0.35  # of a node's width, for an edge that passes a layer
LOOSE = 2.0  # times its width that a layer is stretched at most, so that words have room
COPY = "#D55E00"
# Copies whose bytes stand at the edge; those of more copies are in the hover texts.
NAMED = 14


@dataclass(frozen=True)
class Node:
    """An operation in the picture.

    Attributes:
        name: its own; no two have the same.
        kind: the text beside it, such as its type.
        device: where it ran or would run, such as `CPU:1`.
        details: further hover text.
        weight: seconds, or whatever says how much it matters; for `collapsed`.
    """

    name: str
    kind: str
    device: str
    details: str = ""
    weight: float = 0.0


@dataclass(frozen=True)
class Edge:
    """That a node needs what another one made; control: it only waits for it, nothing is read."""

    source: str
    target: str
    bytes: float = 0.0
    control: bool = False


class Place(NamedTuple):
    """Where something is drawn: its layer from above, and across."""

    layer: float
    across: float


def layered(
    nodes: Sequence[Node],
    edges: Sequence[Edge],
    title: str = "Graph",
    remark: str = "",
) -> Figure:
    """Draw nodes in layers, each below all that it needs; a colour and a symbol a device.

    A thick edge leaves its device, so that its tensor is copied; the bytes stand beside
    it. Dotted edges carry nothing: their end only waits.

    Args:
        nodes: at most `MOST`; more are first made fewer by `collapsed`.
        edges: between them, without a circle.
        title: with the clock, where times are shown.
        remark: a line under the title.

    Raises:
        InvalidInput: there is no node or too many, two have one name, an edge begins or ends at
            none, or the edges form a circle.
    """
    places, met = layout(nodes, edges)
    looks = lines(sorted({node.device for node in nodes}))
    devices = {node.name: node.device for node in nodes}
    crossing = [not each.control and devices[each.source] != devices[each.target] for each in edges]
    copies = [edge for edge, across in zip(edges, crossing, strict=True) if across]
    drawn = [_edge(edge, met[edge], edge in copies, len(copies)) for edge in edges]
    drawn += [_nodes(nodes, places, device, look) for device, look in looks.items()]
    deepest = int(max(place.layer for place in places.values()))
    # Edges, too, go around nodes.
    ends = [each.across for each in chain(places.values(), *met.values())]
    panel = Panel(
        title=f"{plural(len(nodes), 'node')}, {plural(len(copies), 'edge')} between devices\n"
        "what a node needs stands above it",
        x="",
        y="",
        traces=drawn,
        # Room for the words on the right of the last node.
        x_axis={"visible": False, "range": [min(ends) - 0.5, max(ends) + 1.0]},
        y_axis={"visible": False, "range": [deepest + 0.7, -0.7]},
    )
    legend = [*looks.values()]
    if copies:
        legend.append(Line("leaves its device: a copy", COPY, "solid", "line-ew"))
    words = _words(nodes, copies)
    return sheet([[panel]], legend, title, [remark], words, plot=LAYER * (deepest + 2), below=10)


class Layout(NamedTuple):
    """Where a graph is drawn: its nodes by name, and what each edge passes from end to end."""

    nodes: dict[str, Place]
    edges: dict[Edge, list[Place]]


def layout(nodes: Sequence[Node], edges: Sequence[Edge]) -> Layout:
    """Return the places of nodes and edges in the drawing by `layered`, with its errors."""
    _check(nodes, edges)
    depths = layers([node.name for node in nodes], edges)
    ways = _ways(edges, depths)
    places = _places(nodes, depths, ways)
    met = {edge: [places[name] for name in way] for edge, way in ways.items()}
    return Layout({node.name: places[node.name] for node in nodes}, met)


def layers(names: Sequence[str], edges: Sequence[Edge]) -> dict[str, int]:
    """Return the depth of each node: the length of the longest path from a node without inputs.

    Raises:
        InvalidInput: the edges form a circle.
    """
    needs: dict[str, set[str]] = {name: set() for name in names}
    for edge in edges:
        needs[edge.target].add(edge.source)
    depths: dict[str, int] = {}
    while len(depths) < len(needs):
        ready = [n for n, above in needs.items() if n not in depths and above <= depths.keys()]
        if not ready:
            left = ", ".join(sorted(needs.keys() - depths.keys())[:5])
            raise InvalidInput(f"the edges form a circle among {left}: give a graph without one")
        # All at once: one that is ready in this round lies deeper than those of the last one.
        depths |= {name: 1 + max((depths[n] for n in needs[name]), default=-1) for name in ready}
    return depths


def _check(nodes: Sequence[Node], edges: Sequence[Edge]) -> None:
    names = {node.name for node in nodes}
    if not nodes:
        raise InvalidInput("no node to draw: give at least one")
    if len(names) < len(nodes):
        raise InvalidInput("two nodes have the same name: give each a name of its own")
    if len(nodes) > MOST:
        raise InvalidInput(
            f"{len(nodes)} nodes cannot be told apart in one figure; allowed: {MOST}; make them "
            "fewer with labkit.figures.collapsed"
        )
    for edge in edges:
        if lost := {edge.source, edge.target} - names:
            raise InvalidInput(f"an edge names {sorted(lost)[0]!r}, which is no node")


# A way is the places of an edge in all layers that it meets: names of nodes at its ends, and in
# between bends, which take room in their layer as nodes do.
Way = tuple[str, ...]


def _ways(edges: Sequence[Edge], depths: Mapping[str, int]) -> dict[Edge, Way]:
    ways = {}
    for number, edge in enumerate(edges):
        passed = range(depths[edge.source] + 1, depths[edge.target])
        bends = [f"\0{number}\0{layer}" for layer in passed]
        ways[edge] = (edge.source, *bends, edge.target)
    return ways


def _places(
    nodes: Sequence[Node], depths: Mapping[str, int], ways: Mapping[Edge, Way]
) -> dict[str, Place]:
    """Order each layer by the middle of the neighbours above, then below, again and again.

    Source: Sugiyama, Tagawa and Toda 1981, *Methods for visual understanding of hierarchical
    system structures*. Differs from it: no order is kept because it crosses least, the last one is.
    """
    rows: list[list[str]] = [[] for _ in range(max(depths.values()) + 1)]
    for node in sorted(nodes, key=lambda node: node.device):
        rows[depths[node.name]].append(node.name)
    near: dict[str, tuple[list[str], list[str]]] = {n.name: ([], []) for n in nodes}
    for edge, way in ways.items():
        for step, bend in enumerate(way[1:-1], 1):
            rows[depths[edge.source] + step].append(bend)
            near[bend] = ([], [])
        for above, below in pairwise(way):
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
    return {name: Place(layer, across[name]) for layer, row in enumerate(rows) for name in row}


def _widths(row: Sequence[str]) -> list[float]:
    return [BEND if name.startswith("\0") else 1.0 for name in row]


def _spread(row: Sequence[str], widest: float) -> list[float]:
    """Return places of a row around 0; a node takes a width of one, a bend less."""
    group = sum(_widths(row))
    widths = [width * min(LOOSE, widest / group) for width in _widths(row)]
    ends = [sum(widths[: place + 1]) for place in range(len(row))]
    return [end - (width + sum(widths)) / 2 for end, width in zip(ends, widths, strict=True)]


def _edge(edge: Edge, met: Sequence[Place], copied: bool, copies: int) -> Trace:
    size = bytes_text(edge.bytes)
    line = {"color": COPY if copied else INK, "width": 2.5 if copied else 0.8, "shape": "spline"}
    if edge.control:
        line["dash"] = "dot"
    if copied:
        # For its bytes, in the last part: edges that leave one node lie apart there.
        above, below = met[-2:]
        middle = Place((above.layer + below.layer) / 2, (above.across + below.across) / 2)
        met = [*met[:-1], middle, below]
    trace: Trace = {
        "x": [place.across for place in met],
        "y": [place.layer for place in met],
        "mode": "lines",
        "line": line,
        "opacity": 0.9 if copied else 0.6,
    }
    if not copied:
        return trace | QUIET
    if copies <= NAMED:
        texts = [size if place == len(met) - 2 else "" for place in range(len(met))]
        trace |= {"mode": "lines+text", "text": texts, "textposition": "middle right"}
        trace["textfont"] = {"size": 10, "color": COPY}
    return trace | {"showlegend": False, "hovertemplate": _said(edge, size)}


def _said(edge: Edge, size: str) -> str:
    return f"{safe_text(edge.source)}<br>to {safe_text(edge.target)}: {size}<extra>copy</extra>"


def _nodes(nodes: Sequence[Node], places: Mapping[str, Place], device: str, look: Line) -> Trace:
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
        "hovertext": [safe_text(each) for each in hover],
        "hovertemplate": f"%{{hovertext}}<extra>{safe_text(device)}</extra>",
        "showlegend": False,
    } | look.style


def _words(nodes: Sequence[Node], copies: Sequence[Edge]) -> list[str]:
    on: dict[str, int] = {}
    for node in nodes:
        on[node.device] = on.get(node.device, 0) + 1
    texts = [f"{plural(count, 'node')} on {device}" for device, count in sorted(on.items())]
    total = bytes_text(sum(edge.bytes for edge in copies))
    return [*texts, f"{plural(len(copies), 'edge')} between devices, {total} in all"]


def collapsed(
    nodes: Sequence[Node], edges: Sequence[Edge], most: int = MOST
) -> tuple[list[Node], list[Edge]]:
    """Join neighbours on one device, the lightest first, until there are few enough.

    Two are joined only where the first has no other successor or the second no other predecessor:
    then no circle can arise. The heavier one gives its name and kind; weights and bytes add up.
    Where nothing more can be joined so, more nodes than `most` are left.

    Args:
        nodes, edges: as `layered` takes them.
        most: nodes that are wanted.
    """
    kept = {node.name: node for node in nodes}
    inside = Counter({node.name: 1 for node in nodes})
    links: dict[tuple[str, str], Edge] = {}
    for edge in edges:
        _add(links, edge)
    while len(kept) > most and (pair := _lightest(kept, links)) is not None:
        source, target = (kept[name] for name in pair)
        stays, goes = (source, target) if source.weight > target.weight else (target, source)
        del links[pair], kept[goes.name]
        inside[stays.name] += inside.pop(goes.name)
        kept[stays.name] = replace(stays, weight=source.weight + target.weight)
        for ends in [ends for ends in links if goes.name in ends]:
            edge = links.pop(ends)
            named = [stays.name if name == goes.name else name for name in ends]
            _add(links, replace(edge, source=named[0], target=named[1]))
    counted_nodes = [_counted(node, inside[node.name]) for node in kept.values()]
    return counted_nodes, list(links.values())


def _counted(node: Node, count: int) -> Node:
    if count == 1:
        return node
    return replace(
        node, kind=f"{node.kind} +{count - 1}", details=f"{node.details} {count} operations"
    )


def _add(links: dict[tuple[str, str], Edge], edge: Edge) -> None:
    """Merge all edges between two nodes into one with the sum of their bytes."""
    ends = (edge.source, edge.target)
    if (old := links.get(ends)) is not None:
        edge = replace(edge, bytes=edge.bytes + old.bytes, control=edge.control and old.control)
    links[ends] = edge


def _lightest(kept: dict[str, Node], links: dict[tuple[str, str], Edge]) -> tuple[str, str] | None:
    after = Counter(source for source, _ in links)
    before = Counter(target for _, target in links)
    pairs = [
        (min(kept[a].weight, kept[b].weight), (a, b))
        for a, b in links
        if kept[a].device == kept[b].device and (after[a] == 1 or before[b] == 1)
    ]
    return min(pairs, default=(0.0, None))[1]
