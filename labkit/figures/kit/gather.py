"""Many traces of one point as one trace of many points: a browser draws it a hundred times faster.

A trace says whose it is in its `meta`, for the picker and for linked selection: `run`, the key of
the one run that it draws; `runs`, those of the several whose line or band it is; `points`, for each
of its points the keys of the runs that it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.figures.kit.entries import INK

_BY_POINT = {"x", "y", "color", "symbol", "hovertemplate", "array", "arrayminus", "shape"}
_WHISKER = {"color": INK, "thickness": 0.75, "width": 0}  # Plotly knows one look a trace
_DROPPED = {"name", "legendgroup", "meta"}


def gathered(traces: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The traces, those of one run and one point joined with their like; others as they are.

    The legend can no longer hide the runs of joined points, so this is for figures without one.
    """
    others: list[dict[str, Any]] = []
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for trace in traces:
        # A line through the points of several runs would say that they belong together.
        lone = len(trace["x"]) == 1 and "lines" not in (trace.get("mode") or "")
        if lone and "run" in (trace.get("meta") or {}):
            look = (trace.get("type"), trace.get("mode"), *sorted(set(trace) - _DROPPED))
            alike.setdefault(look, []).append(dict(trace))
        else:
            others.append(dict(trace))
    return [*others, *(_joined(group) for group in alike.values())]


def _joined(group: Sequence[dict[str, Any]]) -> dict[str, Any]:
    named = [
        trace | {"hovertemplate": f"{trace.get('hovertemplate', '')}<extra>{trace['name']}</extra>"}
        for trace in group
    ]
    bare = [{k: v for k, v in trace.items() if k not in _DROPPED} for trace in named]
    one: dict[str, Any] = {key: _merged(key, [trace[key] for trace in bare]) for key in bare[0]}
    return one | {"meta": {"points": [[trace["meta"]["run"]] for trace in group]}}


def _merged(key: str, values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        inner = {k: _merged(k, [value[k] for value in values]) for k in first}
        return inner | (_WHISKER if key in ("error_x", "error_y") else {})
    if key in _BY_POINT:
        return [v for value in values for v in (value if isinstance(value, list) else [value])]
    return any(values) if key == "visible" else first
