"""The message trace of a schedule: who sends what to whom, and what everybody then holds."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from labkit.common.errors import InvalidInput
from labkit.common.units import bytes_text, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.frames import played, table
from labkit.figures.schedules import trace_frames
from labkit.network import Network
from labkit.schedules import ALLREDUCE, IN_NETWORK, named
from labkit.schedules.holdings import Holdings, follow, message_size, span_name, sum_name
from labkit.schedules.interpreter import execute
from labkit.schedules.round import Round, Schedule
from labkit.simulate import simulate

MOST_RANKS = 12
SPOKEN = 40  # the words name every message where there are no more


def message_trace(
    algorithm: str | Schedule,
    size: int,
    network: str | Network | None = None,
    values: ArrayLike | None = None,
    nbytes: float = 2**20,
) -> Figure:
    """An animated figure of a schedule, a frame a round: arrows between ranks, and their chunks.

    Rank 2 starts with a2, b2, … in its chunks; a chunk that holds a0+a2 is the sum of those of
    ranks 0 and 2, and Σa that of all. Play, pause and a slider move through the rounds.

    Args: algorithm: a name of `labkit.schedules`, or size -> rounds; size: ranks, 2 to 12;
    network: lay the schedule out on this network, and simulate when each round's messages are
    delivered for a buffer of `nbytes`; values: numbers to start with in place of names, shape
    (size, chunks).
    Raises: InvalidInput, for another size, or values that do not fit.
    """
    if not 2 <= size <= MOST_RANKS:
        raise InvalidInput(
            f"size={size}: a message trace draws 2 to {MOST_RANKS} ranks; for more ask "
            f"counts_table and link_utilisation"
        )
    world = Network.parse(network)
    schedule = _schedule(algorithm, world)
    holdings = follow(schedule, size)
    name = algorithm if isinstance(algorithm, str) else getattr(algorithm, "__name__", "schedule")
    title = f"{_title(name).capitalize()}, {size} ranks"
    times = None
    if world is not None:
        times = _times(schedule, size, nbytes, world, len(holdings.rounds))
        title += f" · simulation · network {world} · n = {bytes_text(nbytes)}"
    texts = _texts(holdings, None if values is None else np.asarray(values))
    captions = _captions(holdings, times)
    states = [
        trace_frames.state(holdings, number, texts[number], caption)
        for number, caption in enumerate(captions)
    ]
    return played(
        fixed=[trace_frames.ranks(holdings.labels), *trace_frames.LEGEND],
        states=states,
        layout=trace_frames.layout(holdings.names, holdings.chunks),
        title=title,
        alt=_in_words(title, holdings, captions),
        table=_as_table(holdings, texts),
        step="after round ",
        # The first round, not the start: a still picture then has arrows.
        shown=min(1, len(states) - 1),
    )


def _title(name: str) -> str:
    """`ring allreduce`; another collective is called what it is."""
    words = name.replace("_", " ")
    return f"{words} allreduce" if name in ALLREDUCE | IN_NETWORK else words


def _schedule(algorithm: str | Schedule, network: Network | None) -> Schedule:
    if not isinstance(algorithm, str):
        return algorithm
    return named(algorithm) if network is None else network.schedule(algorithm)


def _times(
    schedule: Schedule, size: int, nbytes: float, network: Network, rounds: int
) -> list[tuple[float, float]]:
    """When the first byte of each round leaves and when its last message is delivered, in s."""
    trace = simulate(schedule, size, nbytes, network, trace=True).trace
    assert trace is not None  # for the type checker: a trace was asked for
    places = [trace.round == number for number in range(rounds)]
    return [(float(trace.start[at].min()), float(trace.delivery[at].max())) for at in places]


def _texts(holdings: Holdings, values: np.ndarray | None) -> list[list[list[str]]]:
    """What stands in chunk c of rank r after k rounds, [k][r][c]: a name, or a number."""
    _, size, chunks, _ = holdings.held.shape
    if values is None:
        room = max(4, 76 // chunks)  # letters that fit between the edges of a chunk
        return [
            [[sum_name(held[r, c], c, room) for c in range(chunks)] for r in range(size)]
            for held in holdings.held
        ]
    if values.shape != (size, chunks):
        raise InvalidInput(
            f"values of shape {values.shape}: this schedule divides the buffers of {size} ranks "
            f"into {chunks} chunks; give shape {(size, chunks)}"
        )
    states = [values, *(after for _, after in execute(holdings.rounds, values))]
    return [[[f"{number:.4g}" for number in row] for row in state] for state in states]


def _captions(holdings: Holdings, times: list[tuple[float, float]] | None) -> list[str]:
    """One line a state: what was sent, and when."""
    count = len(holdings.rounds)
    lines = ["the start: every rank has its own values"]
    for number, each in enumerate(holdings.rounds, 1):
        plural = "message" if len(each) == 1 else "messages"
        line = f"round {number} of {count}: {len(each)} {plural} of "
        line += message_size(each, holdings.chunks)
        if times is not None:
            first, last = times[number - 1]
            line += f"<br>{seconds_text(first)} to {seconds_text(last)} on the simulated clock"
        lines.append(line)
    return lines


def _in_words(title: str, holdings: Holdings, captions: Iterable[str]) -> str:
    """The trace for those who do not see it: rounds and messages, and the end."""
    rounds, total = len(holdings.rounds), holdings.messages
    said = [f"Animated message trace. {title}: {rounds} rounds, {total} messages"]
    for each, caption in zip(holdings.rounds, list(captions)[1:], strict=True):
        line = caption.replace("<br>", ", ")
        said.append(f"{line}: {_messages(holdings, each)}" if total <= SPOKEN else line)
    if holdings.complete:
        said.append("At the end every rank holds the sum of every chunk")
    else:
        whole = int((holdings.held[-1] == 1).all(axis=2).sum())
        held = holdings.held[-1][..., 0].size
        said.append(f"At the end {whole} of {held} chunks on the ranks hold the whole sum")
    return ". ".join(said) + "."


def _messages(holdings: Holdings, each: Round) -> str:
    """`0 to 1 adds d, 1 to 2 adds a`"""
    whole, names = holdings.chunks == 1, holdings.labels
    return ", ".join(
        f"{names[source]} to {names[destination]} {'adds' if reduce else 'replaces'}"
        + ("" if whole else f" {span_name(chunk, span)}")
        for source, destination, chunk, span, reduce in each.rows()
    )


def _as_table(holdings: Holdings, texts: list[list[list[str]]]) -> str:
    sent = ["start", *(_messages(holdings, each) for each in holdings.rounds)]
    rows = [
        [str(number), said, *map("  ".join, state)]
        for number, (said, state) in enumerate(zip(sent, texts, strict=True))
    ]
    return table(["round", "messages", *holdings.names], rows)
