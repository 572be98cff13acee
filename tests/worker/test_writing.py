"""Test that a checkpoint is complete when all ranks have written, and that waiting ranks stop."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from labkit.communicator import Communicator
from labkit.records import stream
from labkit.records.checkpoints import Checkpoint, CheckpointContext, complete_checkpoints
from labkit.records.tensor_boxes import TensorBox
from labkit.worker.checkpoint_files import CheckpointWriter, StateCopy

OWNER, OTHER = {"pid": 1}, {"pid": 2}
PATIENCE = 60.0  # seconds to wait for what takes less than one


def writing(run: Path, rank: int) -> CheckpointWriter:
    """Return the checkpoint writer of one of two ranks."""
    board = SimpleNamespace(raise_failures=lambda: None)
    ranks = cast(Communicator, SimpleNamespace(rank=rank, size=2, board=board))
    return CheckpointWriter(
        ranks, CheckpointContext(Checkpoint(1), folder=str(run / "checkpoints"), owner=OWNER)
    )


def copied(step: int) -> StateCopy:
    told: dict[str, Any] = {"taken": step}
    return StateCopy(step, [TensorBox.local("weights", np.ones(3))], (), {}, told)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    stream.make_stream(tmp_path / stream.FOLDER, OWNER)
    return tmp_path


def ends(one: CheckpointWriter) -> bool:
    waits = threading.Thread(target=one.wait, daemon=True)
    waits.start()
    waits.join(PATIENCE)
    return not waits.is_alive()


def test_it_is_whole_when_the_last_rank_has_written(run: Path) -> None:
    first, last = (writing(run, rank) for rank in range(2))
    first.begin(copied(7))
    assert first.is_writing()
    assert complete_checkpoints(run) == []
    last.begin(copied(7))
    assert ends(last)
    assert ends(first)
    assert [path.name for path in complete_checkpoints(run)] == ["7"]


def test_whoever_takes_up_the_run_is_not_waited_for(run: Path) -> None:
    first, last = (writing(run, rank) for rank in range(2))
    last.begin(copied(7))
    assert ends(last)
    # Another process resumes from an earlier checkpoint, so no process completes this half-written
    # one.
    shutil.rmtree(run / stream.FOLDER)
    shutil.rmtree(run / "checkpoints")
    stream.make_stream(run / stream.FOLDER, OTHER)
    first.begin(copied(7))
    assert ends(first)
    assert complete_checkpoints(run) == []


def test_whoever_gives_up_waits_no_more(run: Path) -> None:
    first = writing(run, 0)
    first.begin(copied(7))
    first.stop_waiting()
    assert ends(first)
