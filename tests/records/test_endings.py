"""What a process says of its end becomes words that name who it was, and by which signal."""

from __future__ import annotations

import pytest

from labkit.records.endings import End, Terminated, by_whom, described, of_rank, out_of_memory

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
    end = of_rank(KILLED)
    assert end is not None
    assert (end.rank, end.signal) == (1, "SIGKILL")
    assert end.message.startswith("rank 1 was ended by SIGKILL")


def test_a_rank_that_ended_by_itself_is_named_with_its_code_and_want_of_memory() -> None:
    end = of_rank(EXITED)
    assert end is not None
    assert (end.rank, end.signal) == (3, "")
    assert end.message.startswith("rank 3 ended with code 1: memory ran out")


def test_of_silence_nothing_is_known() -> None:
    assert of_rank("") is None


def test_other_processes_are_no_ranks() -> None:
    assert described("mpiexec", -15) == End("mpiexec was ended by SIGTERM", None, "SIGTERM")
    assert described("rank 2", -19).message == "rank 2 is stopped (SIGSTOP) and does not go on"


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
    assert "memory ran out" in out_of_memory(said)
    assert out_of_memory("KeyError: 'memories'") == ""


def test_an_interrupt_names_the_user_and_a_signal_itself() -> None:
    assert by_whom(KeyboardInterrupt(), "stopped") == "stopped by the user"
    assert by_whom(Terminated("SIGTERM"), "stopped") == "ended by SIGTERM"
