"""Test how the submitting process handles an experiment, without ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from labkit import Experiment
from labkit.cluster.calls import RankError
from labkit.cluster.launch import NotStarted
from labkit.cluster.restart_policy import TRIES, RestartPolicy
from labkit.cluster.run_handle import RunHandle
from labkit.cluster.submission import SubmittedRun
from labkit.common.errors import InvalidInput
from labkit.records import stream
from labkit.records.stream import FOLDER, StreamReader, encode_lines

QUESTION = Experiment(model="mlp", dataset="digits")


class Sent(SubmittedRun):
    """A submitted run whose calls succeed or fail as the test specifies.

    Args:
        directory: Folder of the run.
        ends: Results or errors of the successive calls.
        tolerant: Whether the cluster is fault-tolerant.
    """

    def __init__(self, directory: Path, *ends: Any, tolerant: bool = True) -> None:
        RunHandle.__init__(self, QUESTION, directory)
        self._ends, self._why, self._read_rows = list(ends), None, []
        self._cluster: Any = SimpleNamespace(how=SimpleNamespace(fault_tolerant=tolerant))
        self._reader, self._restarts = (
            StreamReader(directory / FOLDER),
            RestartPolicy(directory, QUESTION, None),
        )

    def _call(self, *_: Any) -> Any:
        end = self._ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end


def not_started(times: int) -> list[NotStarted]:
    return [NotStarted("the engines did not start: a rank has died") for _ in range(times)]


def test_a_death_while_engines_start_lets_them_start_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Sent(tmp_path, *not_started(TRIES - 1), "calls")._send(QUESTION, None) == "calls"
    told = "the engines did not start: a rank has died; labkit starts the engines again\n"
    assert capsys.readouterr().err == told * (TRIES - 1)
    with pytest.raises(NotStarted):
        Sent(tmp_path, *not_started(TRIES), "calls")._send(QUESTION, None)


@pytest.mark.parametrize(
    ("error", "tolerant"),
    [(InvalidInput("8 ranks"), True), (RankError("rank 0", 0), True), (*not_started(1), False)],
)
def test_any_other_error_is_raised_at_once(tmp_path: Path, error: Any, tolerant: bool) -> None:
    with pytest.raises(type(error)):
        Sent(tmp_path, error, "calls", tolerant=tolerant)._send(QUESTION, None)


def test_who_wants_the_end_waits_for_no_further_start(tmp_path: Path) -> None:
    sent = Sent(tmp_path, *not_started(1), "calls")
    sent._why = "stopped by the user"
    with pytest.raises(NotStarted):
        sent._send(QUESTION, None)


def test_all_rows_that_ranks_have_told_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"rank": 1, "step": step} for step in range(9)]
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "rank1.jsonl").write_text(encode_lines("step", rows))
    monkeypatch.setattr(stream, "MAX_READ_BYTES", 100)  # maximum number of bytes per read
    assert Sent(tmp_path)._rows_of({1}, {}) == rows


@pytest.mark.parametrize("is_sent", [True, False])
def test_what_ranks_have_printed_is_written_once(tmp_path: Path, is_sent: bool) -> None:
    calls: Any = SimpleNamespace(outputs=lambda: ["one\n"], close=lambda: None)
    again: Any = SimpleNamespace(outputs=lambda: ["two\n"])
    sent = Sent(tmp_path, again if is_sent else RankError("rank 0", 0))
    sent._calls = calls
    try:
        sent._restart([1], RankError("rank 1 failed", 1))
    except RankError as error:
        sent._record_failure(error)
    else:
        sent._record_failure(RankError("rank 0 failed", 0))
    written = (tmp_path / "logs" / "rank0.log").read_text()
    assert written == ("one\ntwo\n" if is_sent else "one\n")
