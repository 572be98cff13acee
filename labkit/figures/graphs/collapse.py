"""Fewer nodes of the same graph: what is cheap is drawn inside its neighbour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from labkit.figures.graphs.layered import MOST, Edge, Node


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
    found = [_counted(node, inside[node.name]) for node in kept.values()]
    return found, list(links.values())


def _counted(node: Node, count: int) -> Node:
    if count == 1:
        return node
    return replace(node, kind=f"{node.kind} +{count - 1}", said=f"{node.said} {count} operations")


def _add(links: dict[tuple[str, str], Edge], edge: Edge) -> None:
    """One edge for all between two nodes; it carries what any of them does."""
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
