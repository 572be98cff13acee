"""Test pipelines: the drawings in docstrings, and common tests of every schedule."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from textwrap import dedent

import numpy as np
import pytest
from pipeline_world import check

from labkit.common.errors import InvalidInput
from labkit.schedules import PIPELINE
from labkit.schedules.interpreter import ScheduleError
from labkit.schedules.pipeline import (
    ScheduleTable,
    interleaved,
    one_forward_one_backward,
    pipedream,
)
from labkit.schedules.pipeline_stages import in_flight, stored_versions, versions
from labkit.schedules.pipeline_table import lay_out

UP_TO = range(1, 17)

DRAWINGS = {
    ("layerwise", 3, 2): """
        F0 ·  ·  ·  ·  B0 F1 ·  ·  ·  ·  B1
        ·  F0 ·  ·  B0 ·  ·  F1 ·  ·  B1
        ·  ·  F0 B0 ·  ·  ·  ·  F1 B1
    """,
    ("gpipe", 3, 4): """
        F0 F1 F2 F3 ·  ·  ·  ·  B3 B2 B1 B0
        ·  F0 F1 F2 F3 ·  ·  B3 B2 B1 B0
        ·  ·  F0 F1 F2 F3 B3 B2 B1 B0
    """,
    ("1f1b", 3, 4): """
        F0 F1 F2 ·  ·  B0 F3 B1 ·  B2 ·  B3
        ·  F0 F1 ·  B0 F2 B1 F3 B2 ·  B3
        ·  ·  F0 B0 F1 B1 F2 B2 F3 B3
    """,
    ("interleaved", 2, 2): """
        F0a F1a F0b F1b ·   B0b ·   B1b B0a B1a
        ·   F0a F1a F0b B0b F1b B1b B0a B1a
    """,
    ("zero_bubble", 3, 4): """
        F0 F1 F2 ·  ·  B0 W0 F3 B1 W1 B2 W2 B3 W3
        ·  F0 F1 ·  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        ·  ·  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
    """,
    ("zero_bubble_h2", 3, 5): """
        F0 F1 F2 F3 F4 B0 W0 B1 W1 B2 W2 B3 W3 B4 W4
        ·  F0 F1 F2 B0 F3 B1 F4 B2 W0 B3 W1 B4 W2 W3 W4
        ·  ·  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 W1 W2 W3 W4
    """,
    ("pipedream", 3, 6): """
        F0 F1 F2 ·  ·  B0 F3 B1 F4 B2 F5 B3 ·  B4 ·  B5
        ·  F0 F1 ·  B0 F2 B1 F3 B2 F4 B3 F5 B4 ·  B5
        ·  ·  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
    """,
    ("wavefront", 3, 4): """
        F0 F1 F2 F3 ·  ·  ·  ·  B3 B2 B1 B0
        ·  F0 F1 F2 F3 ·  ·  B3 B2 B1 B0
        ·  ·  F0 F1 F2 F3 B3 B2 B1 B0
    """,
}


def sizes(name: str, *, chunks: int = 0) -> list[ScheduleTable]:
    """Return the schedule's tables for all allowed p, m ≤ 16."""
    make: Callable[..., ScheduleTable] = PIPELINE[name]
    more = (chunks,) if chunks else ()
    return [
        make(p, m, *more)
        for p in UP_TO
        for m in UP_TO
        if name != "interleaved" or equal_groups(p, m)
    ]


def equal_groups(ranks: int, microbatches: int) -> bool:
    """Return whether PyTorch accepts this number of micro-batches: its rounds divide it."""
    return microbatches % max(1, microbatches // ranks) == 0


@pytest.mark.parametrize("case", DRAWINGS)
def test_each_schedule_draws_its_staircase_in_its_docstring_too(case: tuple[str, int, int]) -> None:
    name, stages, microbatches = case
    lines = dedent(DRAWINGS[case]).strip().splitlines()
    assert str(PIPELINE[name](stages, microbatches)).splitlines() == lines
    said = inspect.getdoc(PIPELINE[name]) or ""
    assert all(line in said for line in lines)


def test_every_schedule_is_drawn() -> None:
    assert {name for name, *_ in DRAWINGS} == set(PIPELINE)


@pytest.mark.parametrize("name", PIPELINE)
def test_no_deadlock_each_micro_batch_once_and_within_the_memory_bound(name: str) -> None:
    for table in sizes(name):
        check(table)


@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_interleaving_works_with_any_number_of_chunks(chunks: int) -> None:
    for table in sizes("interleaved", chunks=chunks):
        check(table)


@pytest.mark.parametrize("name", PIPELINE)
def test_memory_bounds_are_reached_by_the_first_rank(name: str) -> None:
    for table in sizes(name):
        held, bound = in_flight(table), table.most_in_flight()
        assert held[0] == bound[0], (table.ranks, table.microbatches)


def test_1f1b_holds_at_most_p_micro_batches_whatever_m_is() -> None:
    assert in_flight(one_forward_one_backward(4, 16)).tolist() == [4, 3, 2, 1]
    assert in_flight(PIPELINE["gpipe"](4, 16)).tolist() == [16] * 4
    assert in_flight(PIPELINE["zero_bubble"](4, 16)).tolist() == [4] * 4
    assert in_flight(PIPELINE["zero_bubble_h2"](4, 16)).tolist() == [7] * 4


def test_pipedream_computes_with_weights_that_are_p_minus_1_minus_s_updates_old() -> None:
    for table in sizes("pipedream"):
        stage, batch = np.indices((table.stages, table.microbatches))
        late = np.maximum(batch - (table.stages - 1 - stage), 0)
        assert versions(table).tolist() == late.tolist()
        most = table.stages - np.arange(table.stages)
        assert (stored_versions(table) <= np.minimum(most, table.microbatches)).all()
        long = table.microbatches >= 2 * most - 2  # enough micro-batches to fill the pipeline
        assert (stored_versions(table) == most)[long].all()


def test_synchronous_schedules_know_one_version_of_the_weights() -> None:
    for name in set(PIPELINE) - {"pipedream"}:
        table = PIPELINE[name](4, 8)
        assert not versions(table).any()
        assert (stored_versions(table) == 1).all()


@pytest.mark.parametrize("name", PIPELINE)
def test_all_weight_gradients_are_there_before_the_weights_change(name: str) -> None:
    table = PIPELINE[name](4, 8)
    whole = np.isin(table.action, ("backward", "backward_weight"))
    per_stage = np.bincount(table.stage[whole], minlength=table.stages)
    assert (per_stage == table.microbatches).all()


@pytest.mark.parametrize("name", PIPELINE)
def test_schedules_are_pure_and_their_rows_are_in_order(name: str) -> None:
    table = PIPELINE[name](4, 8)
    assert table.rows() == PIPELINE[name](4, 8).rows()
    assert (np.diff(table.tick) >= 0).all()
    assert table.name == name


@pytest.mark.parametrize("name", PIPELINE)
def test_messages_go_to_neighbours_there_and_back(name: str) -> None:
    table = PIPELINE[name](4, 8)
    sent = table.take(table.action == "send")
    assert len(sent) == 2 * (table.stages - 1) * 8
    assert (np.abs(sent.stage - sent.peer) == 1).all()
    assert not PIPELINE[name](1, 8).take(PIPELINE[name](1, 8).action == "send").rows()


def test_formulas_are_those_of_the_papers() -> None:
    seconds = (1.0, 1.25, 0.75)  # F, B, W
    said = {name: PIPELINE[name](4, 8).bubble(*seconds) for name in PIPELINE}
    assert said == {
        "layerwise": 3 * 8 * 3.0,
        "gpipe": 9.0,
        "1f1b": 9.0,
        "interleaved": 4.5,
        "zero_bubble": 3 * (1 + 1.25 - 0.75),
        "zero_bubble_h2": 3 * (1 + 1.25 - 2 * 0.75),
        "pipedream": 0.0,
        "wavefront": 9.0,
    }
    assert PIPELINE["gpipe"](4, 8).bubble_share(*seconds) == pytest.approx(3 / (8 + 3))


def test_where_a_formula_does_not_hold_none_is_given() -> None:
    assert PIPELINE["zero_bubble"](4, 3).bubble(1, 1, 1) is None
    assert PIPELINE["zero_bubble"](4, 4).bubble(1, 2, 1.5) is None
    assert PIPELINE["zero_bubble_h2"](4, 6).bubble_share(1, 1, 1) is None
    with pytest.raises(InvalidInput, match="'mine' has no formula"):
        replace(PIPELINE["gpipe"](2, 2), name="mine", schedule=None).bubble(1, 1, 1)


@pytest.mark.parametrize("name", PIPELINE)
def test_numbers_below_one_are_refused(name: str) -> None:
    for stages, microbatches in [(0, 4), (4, 0), (-1, 4)]:
        with pytest.raises(InvalidInput, match="give one or more of each"):
            PIPELINE[name](stages, microbatches)


# SHA-256 of the lines of `orders` for PyTorch 2.15.0's ScheduleInterleaved1F1B, over its 192 valid
# shapes: 2, 3, 4, 8 ranks, 1 to 4 chunks, 1 to 17 micro-batches.
PYTORCH = "d97dc5ab31297fd5b67b84f81acd15387b02193cd1330ed52b44b775d5b9441b"


def orders(table: ScheduleTable) -> str:
    """Return a line for each rank with its computations; "2F0" is forward of stage 2, batch 0."""
    computed = table.take(table.computes)
    own = (computed.of_rank(rank).rows() for rank in range(table.ranks))
    return "\n".join(" ".join(f"{s}{a[0].upper()}{m}" for _, s, a, m, _ in rows) for rows in own)


def test_interleaved_takes_and_orders_micro_batches_as_pytorch_does() -> None:
    digest, taken, refused = hashlib.sha256(), 0, 0
    for ranks, chunks, microbatches in product((2, 3, 4, 8), range(1, 5), range(1, 18)):
        if not equal_groups(ranks, microbatches):
            with pytest.raises(InvalidInput, match=f"{microbatches} make . unequal groups; give"):
                interleaved(ranks, microbatches, chunks)
            refused += 1
            continue
        table = interleaved(ranks, microbatches, chunks)
        check(table)
        digest.update(f"{orders(table)}\n".encode())
        taken += 1
    assert (taken, refused) == (192, 80)
    assert digest.hexdigest() == PYTORCH


@pytest.mark.parametrize(
    ("ranks", "microbatches", "allowed"), [(4, 9, (8, 10)), (3, 7, (6, 8)), (2, 5, (4, 6))]
)
def test_interleaved_names_the_nearest_numbers_that_it_takes(
    ranks: int, microbatches: int, allowed: tuple[int, int]
) -> None:
    with pytest.raises(InvalidInput, match="give {} or {} micro-batches".format(*allowed)):
        interleaved(ranks, microbatches)
    for number in allowed:
        assert interleaved(ranks, number).microbatches == number


def test_orders_that_wait_for_each_other_are_found_when_they_are_laid_out() -> None:
    def stubborn(stage: int) -> list[tuple[str, int, int]]:
        actions = ["backward", "forward"] if stage == 0 else ["forward", "backward"]
        return [(action, stage, 0) for action in actions]

    with pytest.raises(ScheduleError, match="stubborn: deadlock"):
        lay_out("stubborn", stubborn, 2, 1)  # type: ignore[arg-type]


def row(table: ScheduleTable, action: str, stage: int, microbatch: int) -> int:
    found = (table.action == action) & (table.stage == stage) & (table.microbatch == microbatch)
    return int(np.flatnonzero(found)[0])


def without(table: ScheduleTable, number: int) -> ScheduleTable:
    return table.take(np.delete(np.arange(len(table)), number))


def changed(table: ScheduleTable, column: str, number: int, value: object) -> ScheduleTable:
    values = getattr(table, column).copy()
    values[number] = value
    return replace(table, **{column: values})


SOUND = one_forward_one_backward(3, 4)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (without(SOUND, row(SOUND, "send", 0, 3)), "receive of .* 3 at stage 1: waits for ever"),
        (without(SOUND, row(SOUND, "send", 0, 0)), "gets micro-batch 1, sent in tick 1"),
        (without(SOUND, row(SOUND, "receive", 1, 3)), "has no activation of micro-batch 3"),
        (
            without(SOUND, row(SOUND, "backward", 0, 3)),
            "stage 0 does micro-batch 3 .*'backward': 0",
        ),
        (without(SOUND, row(SOUND, "forward", 0, 0)), "has no activation of micro-batch 0 from"),
        (changed(SOUND, "microbatch", row(SOUND, "forward", 0, 0), 9), "leaves 3 stages and 4"),
        (changed(SOUND, "peer", row(SOUND, "send", 0, 0), 0), "a rank sends to itself"),
        (changed(SOUND, "tick", row(SOUND, "forward", 0, 1), 0), "does not compute once a tick"),
        (
            replace(PIPELINE["gpipe"](3, 4), schedule=PIPELINE["1f1b"]),
            "rank 0 holds 4 activations, its bound is 3",
        ),
        (replace(SOUND, recurrent=True), "has no gradient of micro-batch 1 from stage 2 by then"),
    ],
)
def test_the_checker_finds_tables_that_break_their_promise(
    table: ScheduleTable, words: str
) -> None:
    check(SOUND)
    with pytest.raises(ScheduleError, match=words):
        check(table)


def test_the_checker_finds_a_message_that_nobody_receives() -> None:
    extra = SOUND.take(np.append(np.arange(len(SOUND)), row(SOUND, "send", 1, 3)))
    extra = changed(extra, "tick", len(extra) - 1, 99)
    with pytest.raises(
        ScheduleError, match=r"sent and never received: \{\(1, 2\): \[\(3, 99\)\]\}"
    ):
        check(extra)


def test_a_stage_that_works_twice_is_found() -> None:
    again = pipedream(1, 2)
    twice = again.take(np.append(np.arange(len(again)), 0))
    twice = changed(twice, "tick", len(twice) - 1, 99)
    with pytest.raises(ScheduleError, match="stage 0 does micro-batch 0"):
        check(twice)
