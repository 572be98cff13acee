"""Test that the doctor reports full disks and unusable folders before a run fails."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit.cli.doctor import machine


def test_short_room_is_noted_with_the_way_to_see_what_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**27))
    found = [*machine.disk(), *machine.memory()]
    short = {each.what.split(":")[0].split(",")[0]: each for each in found if each.state == "note"}
    assert "0.1 GiB free; a run of two ranks needs 1" in short["disk"].what
    assert short["disk"].fix.startswith("du -sh ")
    if machine.SHARED_MEMORY.is_dir():
        assert "remount,size=2G" in short["shared memory"].fix


def test_a_folder_is_told_once_for_all_that_lies_on_its_disk() -> None:
    found = list(machine.disk())
    told = ", ".join(each.what for each in found)
    for what in ("runs", "caches", "clusters", "temporary files"):
        assert told.count(what) == 1


def test_a_folder_that_cannot_be_written_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABKIT_RUNS", raising=False)
    may = os.access  # the test patches it, because root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: path != Path() and may(path, mode))
    (found,) = (each for each in machine.disk() if each.broken)
    assert "for runs" in found.what
    assert found.fix.startswith("chmod u+w")


def test_a_data_folder_that_is_not_there_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_DATA", "/nowhere/at/all")
    (found,) = machine.data()
    assert found.broken
    assert found.fix == "unset LABKIT_DATA"
