"""The executor's ready queue as it was in a traced step: animated, as a table, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from labkit.common.errors import InvalidInput
from labkit.common.units import plural, seconds_text
from labkit.figures.dataflow import ready_frames
from labkit.figures.dataflow.step_nodes import CLOCK, nodes_of, short
from labkit.figures.graphs.layered import MOST, layout
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.frames import played, table
from labkit.records.ready_queue import RESOLUTION, Moment, ReadyQueue, ready_queue
from labkit.records.step_graph import StepGraph

if TYPE_CHECKING:
    import pandas

    from labkit.figures.kit.canvas import Figure

NAMED = 4  # operations that a line above the graph names


def ready_animation(graph: StepGraph) -> Figure:
    """An animated figure of a traced step, a frame each time an operation begins or ends.

    A number in a circle says how many dependencies of the operation have not ended; at zero it
    is in the queue, until a thread takes it. Below, the length of the queue, over time as it was.

    Args:
        graph: of at most 60 operations that compute.

    Raises:
        InvalidInput: there are more.
    """
    nodes, edges = nodes_of(graph)
    if len(nodes) > MOST:
        raise InvalidInput(
            f"{len(nodes)} operations cannot be told apart in one figure; allowed: {MOST}; trace "
            "a model with fewer layers"
        )
    queue = ready_queue(graph)
    moments = queue.moments()
    places = layout(nodes, edges)
    lengths = [len(each.queued) for each in moments]
    types = {each.name: short(each.op) for each in graph.operations}
    begun = _begun(moments)
    captions = [
        _caption(moment, [types[name] for name in names], len(types))
        for moment, names in zip(moments, begun, strict=True)
    ]
    states = [
        ready_frames.state(nodes, places, moment, caption, length)
        for moment, caption, length in zip(moments, captions, lengths, strict=True)
    ]
    title = f"Ready queue of one step · {CLOCK}"
    return played(
        fixed=ready_frames.fixed(nodes, places, [1e3 * each.time for each in moments], lengths),
        states=states,
        layout=ready_frames.layout(places, max(lengths)),
        title=title,
        alt=_in_words(title, queue, lengths),
        table=_as_table(moments, begun, types),
        step="moment ",
        first=1,
        # Not the first one: a still picture shows some in each state.
        shown=len(states) // 2,
    )


def queue_table(graph: StepGraph) -> pandas.DataFrame:
    """A row an operation that computes, as they became ready: `ready_ms`, `start_ms`, `stop_ms`.

    `needs` is the count with which it began, and `wait_ms` how long it was in the queue.
    """
    import pandas as pd

    rows = [
        {
            "operation": each.operation.name,
            "type": short(each.operation.op),
            "needs": each.needs,
            "ready_ms": 1e3 * each.ready,
            "start_ms": 1e3 * each.start,
            "stop_ms": 1e3 * each.stop,
            "wait_ms": 1e3 * each.wait,
        }
        for each in ready_queue(graph).served
        if each.timed
    ]
    return pd.DataFrame(rows)


def queue_reading(graph: StepGraph) -> Markdown:
    """Whether the trace keeps the rule, how long the queue was, and who waited longest in it."""
    queue = ready_queue(graph)
    waits, moments = queue.waited, queue.moments()
    early = queue.early()
    longest = waits[0]
    busy = max(len(each.running) for each in moments)
    rule = f"{len(early)} of {len(waits)} operations began before all they wait for had ended"
    found = [
        Finding(rule, verdict="" if early else "each began when its count had fallen to zero"),
        Finding(
            f"At most {max(len(each.queued) for each in moments)} operations were in the queue at "
            f"a time, and at most {busy} ran"
        ),
        Finding(
            f"**{longest.operation.name}** waited longest in it, {1e3 * longest.wait:.3g} ms, "
            f"ready at {1e3 * longest.ready:.4g} ms and begun at {1e3 * longest.start:.4g} ms"
        ),
    ]
    return sentences(found)


def _begun(moments: Sequence[Moment]) -> list[list[str]]:
    """Which operations have begun since the moment before; short ones have ended since."""
    before: set[str] = set()
    found = []
    for each in moments:
        here = {*each.running, *each.done}
        found.append([name for name in each.unresolved if name in here - before])
        before |= here
    return found


def _caption(moment: Moment, begun: Sequence[str], count: int) -> str:
    state = (
        f"{1e3 * moment.time:.3f} ms: in the queue {len(moment.queued)}, running "
        f"{len(moment.running)}, ended {len(moment.done)} of {count}"
    )
    more = f" and {len(begun) - NAMED} more" if len(begun) > NAMED else ""
    return state + (f"<br>begun: {', '.join(begun[:NAMED])}{more}" if begun else "")


def _in_words(title: str, queue: ReadyQueue, lengths: Sequence[int]) -> str:
    waits = [each.wait for each in queue.waited]
    said = [
        f"Animated. {title}",
        f"{plural(len(waits), 'operation')} with times",
        f"the queue holds {max(lengths)} at most",
        f"the longest wait in it is {seconds_text(max(waits[0], 0.0))}",
        f"what happens within {seconds_text(RESOLUTION)} is one frame",
    ]
    return ". ".join(said) + "."


def _as_table(
    moments: Sequence[Moment], begun: Sequence[Sequence[str]], types: dict[str, str]
) -> str:
    def named(names: Sequence[str]) -> str:
        return ", ".join(f"{types[name]} ({name})" for name in names)

    rows = [
        [f"{1e3 * each.time:.3f}", named(names), named(each.queued), named(each.running)]
        for each, names in zip(moments, begun, strict=True)
    ]
    return table(["ms", "begun", "in the queue", "running"], rows)
