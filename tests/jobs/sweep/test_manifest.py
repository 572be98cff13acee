"""Test a sweep's record beside its members' records: read with care, replaced but never lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.common.errors import LabkitError
from labkit.jobs.sweep import manifest
from labkit.jobs.sweep.sweep_plan import SweepPlan, SweepSpec, make, read_assignments
from labkit.records import store
from labkit.records.folders import scan

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "is_swept.ipynb"
GONE = {"pid": 2**22 + 1, "process_started": 0.0}  # no process has this number


@pytest.fixture
def plan() -> SweepPlan:
    return make(NOTEBOOK, SweepSpec(read_assignments(("number=1,2,3",)), {}))


def folder_of(plan: SweepPlan) -> Path:
    return manifest.create(Path("runs"), "swept", plan)


def test_a_members_job_is_complete_when_it_can_be_seen(plan: SweepPlan) -> None:
    folder = folder_of(plan)
    job = manifest.queue(folder, plan, plan.members[0])
    assert job == folder / "001_number=1"
    assert sorted(path.name for path in job.iterdir()) == ["params.yaml", "status.json"]
    assert store.read_status(job)["state"] == "queued"
    assert sorted(path.name for path in folder.iterdir()) == ["001_number=1", "sweep.json"]


def test_a_member_is_done_when_it_completed_with_the_same_content(plan: SweepPlan) -> None:
    folder, first = folder_of(plan), plan.members[0]
    assert not manifest.is_done(folder, plan, first)
    job = manifest.queue(folder, plan, first)
    assert not manifest.is_done(folder, plan, first)
    store.complete(job)
    assert manifest.is_done(folder, plan, first)
    status = store.read_json(job / "status.json")
    store.write_json(job / "status.json", status | {"content": "of another notebook"})
    assert not manifest.is_done(folder, plan, first)
    (job / "status.json").write_text("{")
    assert not manifest.is_done(folder, plan, first)


def test_a_new_attempt_keeps_the_earlier_one_out_of_sight(plan: SweepPlan) -> None:
    folder, first = folder_of(plan), plan.members[0]
    store.fail(manifest.queue(folder, plan, first), "no use")
    job = manifest.queue(folder, plan, first)
    assert store.read_status(job)["state"] == "queued"
    (kept,) = (folder / store.EARLIER).iterdir()
    assert store.read_status(kept)["cause"] == "no use"
    assert scan("runs").skipped == []


def test_states_are_those_of_the_members_own_records(plan: SweepPlan) -> None:
    folder = folder_of(plan)
    store.complete(manifest.queue(folder, plan, plan.members[0]))
    dead = manifest.queue(folder, plan, plan.members[1])
    store.mark_running(dead)
    store.write_json(dead / "status.json", store.read_json(dead / "status.json") | GONE)
    states = manifest.states(folder, manifest.read(folder))
    assert states == {"completed": 1, "interrupted": 1, "queued": 1}


def test_a_sweep_whose_process_is_gone_was_interrupted(plan: SweepPlan) -> None:
    folder = folder_of(plan)
    manifest.update(folder, state="running")
    assert manifest.read(folder)["state"] == "running"
    path = folder / manifest.FILE
    store.write_json(path, store.read_json(path) | GONE)
    assert manifest.read(folder)["state"] == "interrupted"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ('{"schema": 99}', "update labkit"),
        ('{"schema": 1}', "not the record of a sweep"),
        ('{"schema": 1, "state": "odd", "members": []}', "not the record of a sweep"),
        ('{"schema": 1, "state": "failed", "members": [1]}', "a mapping of values"),
        (
            '{"schema": 1, "state": "failed", "members": [{"values": 1}]}',
            "a mapping of values",
        ),
        ('{"schema": 1, "state": "failed", "members": [], "jobs": "x"}', "jobs is 'x'"),
        (
            '{"schema": 1, "state": "failed", "members": [], "limit": 0}',
            "a number above 0",
        ),
    ],
)
def test_a_record_that_cannot_be_used_is_one_line(content: str, words: str) -> None:
    Path("swept").mkdir()
    Path("swept/sweep.json").write_text(content)
    with pytest.raises(LabkitError, match=words) as refused:
        manifest.read(Path("swept"))
    assert "\n" not in str(refused.value)


def test_a_record_names_no_folder_outside_of_the_sweep(plan: SweepPlan) -> None:
    folder = folder_of(plan)
    path = folder / manifest.FILE
    known = store.read_json(path)
    for name in ("../../elsewhere", "..", ".", "/"):
        known["members"][0]["folder"] = name
        store.write_json(path, known)
        with pytest.raises(LabkitError, match="expected: a list of records with a folder's name"):
            manifest.read(folder)


def test_halves_of_members_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".half.new").mkdir()
    (tmp_path / ".x.new").touch()
    (tmp_path / "001_n=1").mkdir()
    manifest.tidy(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x.new", "001_n=1"]


def test_the_newest_sweep_that_asked_the_same_is_found(plan: SweepPlan) -> None:
    assert manifest.newest(Path("runs"), plan) is None
    first = folder_of(plan)
    manifest.update(first, started="2026-01-01T00:00:00+00:00")
    assert manifest.newest(Path("runs"), plan) == first
    second = folder_of(plan)
    manifest.update(second, started="2026-01-02T00:00:00+00:00")
    other = make(NOTEBOOK, SweepSpec(read_assignments(("number=1,2",)), {}))
    manifest.update(folder_of(other), started="2026-01-03T00:00:00+00:00")
    Path("runs/broken").mkdir()
    Path("runs/broken/sweep.json").write_text("{")
    assert second.name == "swept-2"
    assert manifest.newest(Path("runs"), plan) == second


def test_one_process_owns_a_sweep(plan: SweepPlan) -> None:
    folder = folder_of(plan)
    manifest.update(folder, state="running")
    script = (
        "import sys; from pathlib import Path; from labkit.jobs.sweep import manifest\n"
        "with manifest.owned(Path(sys.argv[1])): print('mine', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(folder.resolve())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    child.stdout.readline()
    with (
        pytest.raises(LabkitError, match=f"is running .process {os.getpid()}"),
        manifest.owned(folder),
    ):
        pass
    child.stdin.close()
    child.wait(30)
    with manifest.owned(folder):
        pass


def test_a_record_names_no_absolute_path(plan: SweepPlan) -> None:
    text = (folder_of(plan) / manifest.FILE).read_text()
    assert json.loads(text)["notebook"] == "is_swept.ipynb"
    assert "/" not in text
