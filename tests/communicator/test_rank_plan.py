"""Test plans, each the compiled part of a schedule for one rank, against the interpreter."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.communicator.executor import PlannedMessage, Sum, _add, _receive_buffer, plan
from labkit.schedules import ALLREDUCE, COLLECTIVES
from labkit.schedules.interpreter import final_buffers

SCHEDULES = {**ALLREDUCE, **{name: c.schedule for name, c in COLLECTIVES.items()}}


def finish(step, received, buffer, scratch):
    """Apply the messages that a rank receives in a round to its buffer."""
    for m, values in zip(step.receives, received, strict=True):
        _receive_buffer(m, buffer, scratch)[...] = values
    for m in step.copies:
        buffer[m.first : m.last] = _receive_buffer(m, buffer, scratch)
    for total in step.sums:
        _add(total.first, total.last, total.terms, buffer, scratch)


def carried_out(schedule, size, buffers):
    """Execute the plans of all ranks in lockstep, with copies in place of messages."""
    plans = [plan(schedule(size), rank, buffers.shape[1]) for rank in range(size)]
    after = [row.copy() for row in buffers]
    scratch = [np.zeros(each.scratch, buffers.dtype) for each in plans]
    mail: dict[tuple[int, int], list[np.ndarray]] = {}
    position = [0] * size
    while any(position[r] < len(plans[r].steps) for r in range(size)):
        before = list(position)
        for r in range(size):  # each rank sends the messages of its step only once
            if position[r] < len(plans[r].steps) and (r, position[r]) not in mail:
                mail[r, position[r]] = []
                for m in plans[r].steps[position[r]].sends:
                    mail.setdefault(("to", m.peer, r), []).append(after[r][m.first : m.last].copy())
        for r in range(size):
            if position[r] == len(plans[r].steps):
                continue
            step = plans[r].steps[position[r]]
            if any(not mail.get(("to", r, m.peer)) for m in step.receives):
                continue
            received = [mail["to", r, m.peer].pop(0) for m in step.receives]
            finish(step, received, after[r], scratch[r])
            position[r] += 1
        assert position != before, "the plans wait for each other"
    return np.array(after)


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 9), length=st.integers(0, 40), seed=st.integers(0, 99))
def test_plans_of_all_ranks_do_what_the_schedule_says_bit_for_bit(name, size, length, seed):
    buffers = np.random.default_rng(seed).normal(size=(size, length)).astype(np.float32)
    expected = final_buffers(SCHEDULES[name](size), buffers)
    assert carried_out(SCHEDULES[name], size, buffers).tobytes() == expected.tobytes()


def test_a_ring_plan_of_two_ranks_receives_its_sum_beside_and_its_copy_in_place():
    first, second = plan(ALLREDUCE["ring"](2), rank=0, length=10).steps
    assert first.receives == (PlannedMessage(1, 0, 5, 0),)
    assert first.sums == (Sum(0, 5, (-1, 0)),)
    assert second.receives == (PlannedMessage(1, 5, 10, -1),)
    assert second.sums == ()


def test_a_buffer_shorter_than_the_ranks_sends_no_empty_messages():
    steps = plan(ALLREDUCE["ring"](8), rank=3, length=2).steps
    assert all(m.last > m.first for step in steps for m in (*step.sends, *step.receives))
