"""Test that rows that ranks write reach every reader complete, once and in order."""

from __future__ import annotations

import math
import resource
import socket
from pathlib import Path

import pytest

from labkit.records.store import this_process
from labkit.records.stream import StreamReader, StreamWriter, is_shared, make_stream


def test_each_reader_gets_every_record_once_in_the_order_of_its_rank(tmp_path: Path) -> None:
    first, second = (StreamWriter(tmp_path, rank, this_process()) for rank in range(2))
    early, late = StreamReader(tmp_path), StreamReader(tmp_path)
    assert early.read() == []
    first.write("doing", [{"what": "training"}])
    second.write("step", [{"rank": 1, "step": 0}, {"rank": 1, "step": 1}])
    told = [
        ("doing", {"what": "training"}),
        ("step", {"rank": 1, "step": 0}),
        ("step", {"rank": 1, "step": 1}),
    ]
    assert early.read() == told
    assert early.read() == []
    first.write("step", [{"rank": 0, "step": 0}])
    assert early.read() == [("step", {"rank": 0, "step": 0})]
    assert len(late.read()) == 4


def test_a_loss_that_nobody_knows_travels(tmp_path: Path) -> None:
    StreamWriter(tmp_path, 0, this_process()).write("step", [{"step": 0, "loss": math.nan}])
    ((_, row),) = StreamReader(tmp_path).read()
    assert math.isnan(row["loss"])


def test_a_line_that_is_half_written_waits_for_its_end(tmp_path: Path) -> None:
    reader, path = StreamReader(tmp_path), tmp_path / "rank0.jsonl"
    path.write_text('["step", {"step": 0}]\n["step", {"st')
    assert reader.read() == [("step", {"step": 0})]
    with path.open("a") as file:
        file.write('ep": 1}]\n')
    assert reader.read() == [("step", {"step": 1})]


def test_ranks_are_asked_to_stop_by_anyone_and_when_nobody_would_keep_the_result(
    tmp_path: Path,
) -> None:
    writer = StreamWriter(tmp_path, 0, this_process())
    assert not writer.stop_asked()
    StreamReader(tmp_path).stop()
    assert writer.stop_asked()
    # This record names another process with the same process id.
    gone = this_process() | {"process_started": 0.0, "since_boot": 0.0}
    here = gone | {"host": socket.gethostname()}
    assert StreamWriter(tmp_path / "other", 0, here).stop_asked()
    assert not StreamWriter(tmp_path / "other", 0, gone | {"host": "elsewhere"}).stop_asked()


def test_a_full_disk_ends_the_stream_and_not_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = StreamReader(tmp_path), StreamWriter(tmp_path, 0, this_process())
    writer.write("step", [{"step": 0}])

    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    cut = (tmp_path / "rank0.jsonl").stat().st_size + len('["step", {"st')
    resource.setrlimit(resource.RLIMIT_FSIZE, (cut, most[1]))
    try:
        writer.write("step", [{"step": 1}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert (tmp_path / "rank0.jsonl").stat().st_size == cut
    writer.write("step", [{"step": 2}])
    assert reader.read() == [("step", {"step": 0})]


def test_a_run_that_has_ended_takes_no_harm(tmp_path: Path) -> None:
    reader, writer = (
        StreamReader(tmp_path / "gone"),
        StreamWriter(tmp_path / "gone", 0, this_process()),
    )
    reader.stop()
    writer.write("step", [{"step": 0}])
    assert reader.read() == []
    assert not (tmp_path / "gone").exists()


def test_a_rank_knows_the_folder_from_another_one_of_its_name(tmp_path: Path) -> None:
    folder, submitter = tmp_path / "mine" / "live", this_process()
    folder.parent.mkdir()
    make_stream(folder, submitter)
    assert is_shared(folder, submitter)
    # Each host has its own /tmp, and the folder may also be missing.
    assert not is_shared(folder, submitter | {"pid": 0})
    assert not is_shared(tmp_path / "mine" / "x", submitter)
