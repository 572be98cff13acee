"""Test the words for how a process ended, with its name and signal."""

from __future__ import annotations

import pytest

from labkit.records.endings import (
    End,
    Terminated,
    describe_exit,
    ended_rank,
    interruption_text,
    out_of_memory_hint,
)

KILLED = """--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 33128 on node vm exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
EXITED = """terminate called after throwing an instance of 'std::bad_alloc'
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-3128@1,3]
   Exit code:    1
"""


def test_a_rank_is_named_with_the_signal_that_ended_it() -> None:
    end = ended_rank(KILLED)
    assert end is not None
    assert (end.rank, end.signal) == (1, "SIGKILL")
    assert end.message.startswith("rank 1 was ended by SIGKILL")


def test_a_rank_that_ended_by_itself_is_named_with_its_code_and_want_of_memory() -> None:
    end = ended_rank(EXITED)
    assert end is not None
    assert (end.rank, end.signal) == (3, "")
    assert end.message.startswith("rank 3 ended with code 1: memory ran out")


def test_of_silence_nothing_is_known() -> None:
    assert ended_rank("") is None


def test_other_processes_are_no_ranks() -> None:
    assert describe_exit("mpiexec", -15) == End("mpiexec was ended by SIGTERM", None, "SIGTERM")
    assert (
        describe_exit("rank 2", -19).message == "rank 2 is stopped (SIGSTOP) and does not continue"
    )


@pytest.mark.parametrize(
    "said",
    [
        "MemoryError: ",
        "SystemError: <method 'x'> error return without exception set",
        "libtensorflow_framework.so.2: failed to map segment from shared object",
        "[Errno 12] Cannot allocate memory",
    ],
)
def test_want_of_memory_is_told_in_whichever_words_it_comes(said: str) -> None:
    assert "memory ran out" in out_of_memory_hint(said)
    assert out_of_memory_hint("KeyError: 'memories'") == ""


def test_an_interrupt_names_the_user_and_a_signal_itself() -> None:
    assert interruption_text(KeyboardInterrupt(), "stopped") == "stopped by the user"
    assert interruption_text(Terminated("SIGTERM"), "stopped") == "ended by SIGTERM"
