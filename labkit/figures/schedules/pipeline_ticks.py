"""What happens in each tick of a pipeline schedule: work, messages, what stages hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from labkit.schedules.pipeline import Table
from labkit.schedules.pipeline.table import Row


class Tick(NamedTuple):
    """What happens in one tick, and what stages hold after it.

    work: (action, micro-batch) of the stages that compute; sent: (source, destination,
    micro-batch), also between stages of one rank; held: the micro-batches of each stage whose
    activations wait for their backward.
    """

    work: dict[int, tuple[str, int]]
    sent: list[tuple[int, int, int]]
    held: list[tuple[int, ...]]


def follow(table: Table) -> list[Tick]:
    """The ticks of a schedule in their order."""
    rows = [row for row in table.rows() if row[4] < 0]
    held: list[set[int]] = [set() for _ in range(table.stages)]
    found = []
    for tick in range(int(table.tick.max(initial=-1)) + 1):
        now = [row for row in rows if row[0] == tick]
        for _, stage, action, number, _ in now:
            if action == "forward":
                held[stage].add(number)
            elif action != "backward_input":
                held[stage].discard(number)
        work: dict[int, tuple[str, int]] = {
            stage: (action, number) for _, stage, action, number, _ in now
        }
        after = [tuple(sorted(each)) for each in held]
        found.append(Tick(work, list(_passed(now, table.stages)), after))
    return found


def value_name(source: int, destination: int, number: int) -> str:
    """`x3` goes to the right, `∂3` to the left."""
    return f"{'x' if destination > source else '∂'}{number}"


def _passed(rows: Iterable[Row], stages: int) -> Iterable[tuple[int, int, int]]:
    for _, stage, action, number, _ in rows:
        onward = {"forward": 1, "backward": -1, "backward_input": -1}.get(action, 0)
        if onward and 0 <= stage + onward < stages:
            yield stage, stage + onward, number
