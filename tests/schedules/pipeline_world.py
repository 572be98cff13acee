"""The reference interpreter of pipeline tables: it runs a table without a model and checks it."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TypeAlias

import numpy as np

from labkit.schedules.interpreter import ScheduleError
from labkit.schedules.pipeline_stages import in_flight
from labkit.schedules.pipeline_table import MESSAGES, Row, ScheduleTable

Value: TypeAlias = tuple[str, int, int]  # activation or gradient, stage that made it, micro-batch


def check(table: ScheduleTable) -> None:
    """Check a pipeline table against what a schedule promises.

    1. Rows make sense: stages and micro-batches exist, nobody sends to itself, and a rank computes
       at most once a tick.
    2. All rows can be carried out: nobody waits for ever, every message is received, in order,
       and all that is computed has what it needs, from an earlier tick.
    3. Each stage does each micro-batch forward once and backward once, both of its parts. So all
       weight parts are there when the weights change, after the last row.
    4. No rank holds more activations than the method promises (`Table.most_in_flight`).

    Raises: ScheduleError, naming the row.
    """
    _check_rows(table)
    done = _World(table).run()
    _check_complete(table, done)
    held, most = in_flight(table), table.most_in_flight()
    for rank in np.flatnonzero(held > most):
        raise ScheduleError(
            f"{table.name}: rank {rank} holds {held[rank]} activations, its bound is {most[rank]}"
        )


class _World:
    """All ranks with the values that they hold and the messages between them, without a clock."""

    def __init__(self, table: ScheduleTable) -> None:
        self.table = table
        self.programs = [table.of_rank(rank).rows() for rank in range(table.ranks)]
        self.values: list[dict[Value, int]] = [{} for _ in self.programs]  # each with its tick
        self.sent: defaultdict[tuple[int, int], deque[tuple[int, int]]] = defaultdict(deque)
        self.done: dict[tuple[str, int, int], int] = {}

    def run(self) -> dict[tuple[str, int, int], int]:
        """Run all rows; return how often each (action, stage, micro-batch) was computed."""
        places = [0] * len(self.programs)
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(self.programs):
                while places[rank] < len(program) and self._do(rank, program[places[rank]]):
                    places[rank] += 1
                    moved = True
        stuck = [
            (program[place][0], rank, program[place])
            for rank, (place, program) in enumerate(zip(places, self.programs, strict=True))
            if place < len(program)
        ]
        if stuck:
            _, rank, row = min(stuck)
            raise self._error(rank, row, "waits for ever")
        lost = {channel: list(queue) for channel, queue in self.sent.items() if queue}
        if lost:
            raise ScheduleError(f"{self.table.name}: sent and never received: {lost}")
        return self.done

    def _do(self, rank: int, row: Row) -> bool:
        """Run a row, or return False if it must wait."""
        tick, stage, action, microbatch, peer = row
        if action == "receive":
            return self._receive(rank, row)
        if action == "send":
            value = ("activation" if peer > stage else "gradient", stage, microbatch)
            self._need(rank, row, value, tick + 1)
            self.sent[stage, peer].append((microbatch, tick))
        else:
            self._compute(rank, row)
        return True

    def _receive(self, rank: int, row: Row) -> bool:
        tick, stage, _, microbatch, peer = row
        queue = self.sent[peer, stage]
        if not queue:
            return False
        arrived, sent = queue.popleft()
        if arrived != microbatch or sent >= tick:
            words = f"gets micro-batch {arrived}, sent in tick {sent}"
            raise self._error(rank, row, words)
        kind = "activation" if peer < stage else "gradient"
        self.values[rank][kind, peer, microbatch] = sent
        return True

    def _compute(self, rank: int, row: Row) -> None:
        tick, stage, action, microbatch, _ = row
        for value in self._needs(row):
            self._need(rank, row, value, tick)
        made = {"forward": "activation", "backward_weight": "weight gradient"}.get(
            action, "gradient"
        )
        self.values[rank][made, stage, microbatch] = tick
        work = (action, stage, microbatch)
        self.done[work] = self.done.get(work, 0) + 1

    def _needs(self, row: Row) -> list[Value]:
        """Return the values that a computation reads."""
        _, stage, action, microbatch, _ = row
        recurrent = self.table.recurrent
        if action == "backward_weight":
            return [("gradient", stage, microbatch)]
        if action == "forward":
            before = [("activation", stage - 1, microbatch)] if stage > 0 else []
            own = [("activation", stage, microbatch - 1)] if recurrent and microbatch > 0 else []
            return before + own
        after = [("activation", stage, microbatch)]
        if stage < self.table.stages - 1:
            after.append(("gradient", stage + 1, microbatch))
        if recurrent and microbatch < self.table.microbatches - 1:
            after.append(("gradient", stage, microbatch + 1))
        return after

    def _need(self, rank: int, row: Row, value: Value, before: int) -> None:
        if self.values[rank].get(value, before) >= before:
            kind, stage, microbatch = value
            words = f"has no {kind} of micro-batch {microbatch} from stage {stage} by then"
            raise self._error(rank, row, words)

    def _error(self, rank: int, row: Row, words: str) -> ScheduleError:
        tick, stage, action, microbatch, _ = row
        return ScheduleError(
            f"{self.table.name}: rank {rank} in tick {tick}, {action} of micro-batch {microbatch} "
            f"at stage {stage}: {words}"
        )


def _check_rows(table: ScheduleTable) -> None:
    for row in table.rows():
        _, stage, action, microbatch, peer = row
        known = 0 <= stage < table.stages and 0 <= microbatch < table.microbatches
        if not known or (action in MESSAGES) != (0 <= peer < table.stages):
            raise ScheduleError(
                f"{table.name}: {row} leaves {table.stages} stages and {table.microbatches} "
                f"micro-batches, or has no peer, or one too many"
            )
        if action in MESSAGES and peer % table.ranks == stage % table.ranks:
            raise ScheduleError(f"{table.name}: a rank sends to itself in {row}")
    for rank in range(table.ranks):
        own = table.of_rank(rank)
        if (np.diff(own.tick) < 0).any() or (np.diff(own.tick[own.computes]) < 1).any():
            raise ScheduleError(f"{table.name}: rank {rank} does not compute once a tick, in order")


def _check_complete(table: ScheduleTable, done: dict[tuple[str, int, int], int]) -> None:
    for stage in range(table.stages):
        for microbatch in range(table.microbatches):
            times = {
                action: done.get((action, stage, microbatch), 0)
                for action in ("forward", "backward", "backward_input", "backward_weight")
            }
            if list(times.values()) not in ([1, 1, 0, 0], [1, 0, 1, 1]):
                raise ScheduleError(
                    f"{table.name}: stage {stage} does micro-batch {microbatch} {times} times, "
                    f"not forward once and backward once"
                )
