"""The pairs of send and receive that stand where a graph was split over devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.common.units import bytes_text, plural
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.records.step_graph import Operation, StepGraph, Transfer

if TYPE_CHECKING:
    import pandas


def transfers_table(graph: StepGraph) -> pandas.DataFrame:
    """A row a pair, in the order in which what they carry was made.

    `made_ms` and `used_ms` are when its source ended and when the first operation that reads it on
    the other device began, `between_ms` what lies between: copying, and waiting in the queue there.
    They are missing where TensorFlow's profiler has no event, as of arguments.
    """
    import pandas as pd

    at = {each.name: each for each in graph.operations}
    rows = [_row(each, graph, at) for each in graph.transfers]
    table = pd.DataFrame(rows, columns=_COLUMNS)
    return table.sort_values("made_ms", na_position="first", ignore_index=True)


_COLUMNS = [
    *("tensor", "from", "to", "send", "receive"),
    *("bytes", "made_ms", "used_ms", "between_ms"),
]


def _row(each: Transfer, graph: StepGraph, at: dict[str, Operation]) -> dict[str, str | float]:
    readers = [
        at[flow.target].start
        for flow in graph.flows
        if flow.source == each.source and at[flow.target].device == each.receiver
    ]
    made = 1e3 * at[each.source].stop
    used = 1e3 * min(readers, default=float("nan"))
    names = (each.tensor_name, each.sender, each.receiver, each.send, each.receive)
    values = (*names, each.bytes, made, used, used - made)
    return dict(zip(_COLUMNS, values, strict=True))


def transfers_reading(graph: StepGraph) -> Markdown:
    """How many pairs there are, what they carry, and how long that took."""
    table = transfers_table(graph)
    if table.empty:
        return sentences([Finding("No edge leaves its device: there is no send and no receive")])
    large = table.loc[table["bytes"].idxmax()]
    ends = int((table["bytes"] == 0).sum())
    found = [
        Finding(
            f"{plural(len(table), 'pair')} of send and receive stand where an edge leaves its "
            "device, and find each other by the name of the tensor"
        ),
        Finding(
            f"The largest is **{large['tensor']}**, {bytes_text(large['bytes'])} from "
            f"{large['from']} to {large['to']}"
        ),
    ]
    if ends:
        said = "carries nothing" if ends == 1 else "carry nothing"
        found.append(Finding(f"{ends} of {len(table)} {said}: a control dependency crosses"))
    timed = table.dropna(subset="between_ms")
    if len(timed):
        longest = timed.loc[timed["between_ms"].idxmax()]
        found.append(
            Finding(
                f"From its source's end to its first reader's start **{longest['tensor']}** took "
                f"longest, {longest['between_ms']:.3g} ms of copying and queueing"
            )
        )
    return sentences(found)
