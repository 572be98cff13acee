"""The animation of a pipeline follows the table: work, messages, and what is held."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from labkit.common.errors import InvalidInput
from labkit.figures.schedules.pipeline_steps import pipeline_steps
from labkit.schedules import PIPELINE
from labkit.schedules.pipeline import Table, interleaved
from labkit.schedules.pipeline.stage_memory import in_flight, ticks


def tables() -> list[Table]:
    return [*(make(3, 6) for make in PIPELINE.values()), interleaved(2, 4, 3)]


@pytest.mark.parametrize("table", tables(), ids=lambda table: table.name)
def test_ticks_hold_what_the_memory_formula_counts_and_send_what_the_table_sends(
    table: Table,
) -> None:
    steps = ticks(table)
    held = np.array([[len(each) for each in step.held] for step in steps])
    by_rank = [held[:, rank :: table.ranks].sum(axis=1).max() for rank in range(table.ranks)]
    # After a tick: a backward that ended in it has let go already.
    assert (np.array(by_rank) <= in_flight(table)).all()
    assert max(by_rank) == in_flight(table).max()
    assert not held[-1].any()
    sent = {each for step in steps for each in step.sent}
    rows = {
        (stage, peer, number) for _, stage, action, number, peer in table.rows() if action == "send"
    }
    assert rows <= sent
    assert all(abs(one - other) == 1 for one, other, _ in sent)
    assert sum(len(step.work) for step in steps) == table.computes.sum()


def heads(trace: Any) -> int:
    return int(np.count_nonzero(trace.marker.size)) if trace.marker.size else 0


def test_a_frame_a_tick_with_its_arrows_boxes_and_words() -> None:
    table = PIPELINE["1f1b"](2, 3)
    figure = pipeline_steps(table)
    assert [heads(trace) for trace in figure.frames[4].data[:2]] == [1, 1]
    assert [frame.name for frame in figure.frames] == [str(n + 1) for n in range(8)]
    forth, back, *boxes, held, caption = figure.frames[3].data
    assert (heads(forth), heads(back)) == (0, 0)
    assert [(list(box.x), list(box.text)) for box in boxes] == [
        ([1], ["<b>F1</b>"]),
        ([0], ["<b>B0</b>"]),
    ]
    assert list(held.text) == ["holds x1", "holds x1"]
    assert caption.text[0].startswith("tick 4 of 8: ")
    assert "1f1b, 2 stages, 3 micro-batches" in figure.layout.title.text
    assert "tick 8 of 8" in figure.alt
    table_rows = figure.layout.meta["table"]
    assert table_rows.count("<tr>") == 9
    assert "goes back with 2" in table_rows


def test_what_is_too_large_to_see_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"at most 8 stages and 200 ticks.*pipeline_gantt"):
        pipeline_steps(PIPELINE["gpipe"](9, 2))
    with pytest.raises(InvalidInput, match="at most 8 stages"):
        pipeline_steps(PIPELINE["gpipe"](2, 150))
