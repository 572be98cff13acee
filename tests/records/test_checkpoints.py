"""Test checkpoint files: when one is due, which is complete, and which are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit.common.errors import InvalidInput, LabkitError
from labkit.records.checkpoints import (
    FOLDER,
    MANIFEST,
    Checkpoint,
    complete_checkpoints,
    daly,
    newest_checkpoint,
    publish,
    read_manifest,
    remove_after,
    remove_old,
)
from labkit.records.tensor_boxes import TensorBox, rank_file, write


def checkpoint(run: Path, step: int) -> Path:
    folder = run / FOLDER / f"{step}.half"
    folder.mkdir(parents=True)
    files = {
        f"rank{rank}.npz": write(
            rank_file(folder, rank), [TensorBox.local("w", np.full(3, step + rank))], {}
        )
        for rank in range(2)
    }
    publish(folder, {"taken": step, "ranks": 2, "files": files})
    return run / FOLDER / str(step)


@pytest.mark.parametrize("file", ["rank0.npz", "rank1.npz", MANIFEST])
@pytest.mark.parametrize("place", [0, 40, -20])
def test_a_damaged_one_gives_way_to_the_one_before_and_is_named(
    tmp_path: Path, file: str, place: int
) -> None:
    checkpoint(tmp_path, 5)
    path = checkpoint(tmp_path, 9) / file
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises((LabkitError, ValueError)):
        read_manifest(path.parent)
    found = newest_checkpoint(tmp_path, lambda manifest: True)
    assert found is not None
    assert found.step == 5
    assert f"9/{file}" in found.notes[0]


def test_a_lost_file_and_a_half_written_one_are_no_checkpoints(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    (checkpoint(tmp_path, 7) / "rank1.npz").unlink()
    (checkpoint(tmp_path, 9) / MANIFEST).unlink()
    found = newest_checkpoint(tmp_path, lambda manifest: True)
    assert found is not None
    assert (found.step, len(found.notes)) == (5, 1)
    assert "7/rank1.npz cannot be read" in found.notes[0]


def test_where_all_are_damaged_none_is_taken_for_the_begin(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path, lambda manifest: True) is None
    for step in (5, 9):
        (checkpoint(tmp_path, step) / "rank0.npz").write_bytes(b"")
    with pytest.raises(LabkitError, match=r"9/rank0.*5/rank0.*start training again"):
        newest_checkpoint(tmp_path, lambda manifest: True)


GOOD: dict[str, Any] = {"taken": 5, "ranks": 2, "files": {}}


@pytest.mark.parametrize(
    "odd",
    [
        {"files": [1]}, {"files": {"rank0.npz": 1}}, {"files": None}, {"taken": None},
        {"taken": -1}, {"ranks": 0}, {"ranks": 10**12}, {"ranks": "two"}, {"experiment": 3},
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_of_odd_values_is_damaged(odd: dict[str, Any], tmp_path: Path) -> None:
    half = tmp_path / FOLDER / "5.half"
    half.mkdir(parents=True)
    (half / "rank0.npz").touch()
    publish(half, {**GOOD, **odd})
    (sole,) = half.parent.iterdir()  # the folder's name comes from the manifest
    sole.rename(half.with_name("5"))
    with pytest.raises(LabkitError, match="no checkpoint is complete; start training again"):
        newest_checkpoint(tmp_path, lambda manifest: bool(manifest["experiment"]["clock"]))


def test_the_newest_stay_and_what_is_being_written(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        checkpoint(tmp_path, step)
    (tmp_path / FOLDER / "12.half").mkdir()
    remove_old(tmp_path / FOLDER, keep=2)
    assert [each.name for each in complete_checkpoints(tmp_path)] == ["11", "10"]
    assert (tmp_path / FOLDER / "12.half").exists()
    remove_after(tmp_path / FOLDER, 10)
    assert sorted(each.name for each in (tmp_path / FOLDER).iterdir()) == ["10"]


def test_the_interval_loses_least() -> None:
    def lost(interval: float, cost: float, failures: float) -> float:
        """Return Daly's expected time per unit of work, up to a factor for the restart."""
        whole = np.expm1((interval + cost) / failures)
        return float(failures * whole / interval)

    for cost, failures in ((1.0, 3600.0), (30.0, 3600.0), (0.01, 10.0)):
        best = daly(cost, failures)
        at = lost(best, cost, failures)
        assert all(at <= lost(best * factor, cost, failures) for factor in (0.8, 0.9, 1.1, 1.25))
    assert daly(10.0, 4.0) == 4.0


def test_what_cannot_be_an_interval_is_refused() -> None:
    assert Checkpoint("30s").interval(None) == 30.0
    assert Checkpoint(50).steps == 50
    assert Checkpoint(mtbf=3600.0).interval(1.0) == pytest.approx(84.19, abs=0.01)
    with pytest.raises(
        InvalidInput, match=r"every=.* is impossible; give a number of steps, or a time such"
    ):
        Checkpoint("soon")
    with pytest.raises(InvalidInput, match="give only one"):
        Checkpoint(50, mtbf=3600.0)
