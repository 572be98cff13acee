"""Test that links, pipes and devices in a folder to resume are refused: nothing leads elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from sample_runs import write_run
from special_files import KINDS, Kind, contents, link, pipe, put

from labkit.cluster.resume import find_resumable, find_run
from labkit.common.errors import LabkitError
from labkit.experiment import Experiment
from labkit.jobs.listing import jobs_and_runs
from labkit.jobs.sweep import manifest
from labkit.records import checkpoints, store
from labkit.records.analysis import curves
from labkit.records.folders import LINKED, scan
from labkit.records.stream import StreamReader, StreamWriter, make_stream

RUN = ("experiment.json", "status.json", "metrics.json", "environment.json", "history.parquet")
RUN += ("model.keras", "logs", "logs/rank0.log", "live", "live/rank0.jsonl", "live/stop", "seed1")
RUN += ("live/submitter.json", "checkpoints", "checkpoints/5", "checkpoints/5/rank0.npz")
RUN += ("checkpoints/5/manifest.json", "checkpoints/6.17", "checkpoints/6.17/rank0.npz")
FILES = (".reason", "stop")  # these are files, though their names have no suffix
JOB = ("params.yaml", "status.json", "output.ipynb", "notebook.ipynb", ".reason", "logs")
JOB += ("logs/process.log", "logs/notebook.log", "run", *(f"run/{name}" for name in RUN))
SWEEP = (
    "sweep.json",
    "notebook.ipynb",
    "optuna.journal",
    "optuna.journal.lock",
    ".earlier",
    ".slurm",
    ".slurm/12_0.log",
)
SWEEP += (".0123.new", "001_a=1", *(f"001_a=1/{name}" for name in JOB))


def make_run(parent: Path) -> Path:
    return _filled(write_run(parent, "run").path, RUN)


def make_job(folder: Path) -> Path:
    make_run(folder)
    return _filled(folder, JOB)


def make_sweep() -> Path:
    folder = store.new_run_directory("runs", "sweep")
    record = {"members": [], "state": "interrupted", "notebook": "a.ipynb", "plan": ""}
    store.write_json(folder / manifest.FILE, record | {"pid": None})
    make_job(folder / "001_a=1")
    return _filled(folder, SWEEP)


def _filled(folder: Path, names: tuple[str, ...]) -> Path:
    """Return a folder filled with every file and folder that such a record may have."""
    for name in names:
        path = folder / name
        if path.exists():
            continue
        if path.suffix in ("", ".17", ".new") and path.name not in FILES:
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("precious")
    return folder


def refuses(place: Path, kind: Kind, resume: Callable[[], object]) -> None:
    """Check that resuming with such a file in a place fails with one line and changes nothing."""
    original = put(kind, place)
    before = contents(Path.cwd())
    with pytest.raises(LabkitError) as refusal:
        resume()
    assert "\n" not in str(refusal.value)
    assert contents(Path.cwd()) == before, place
    place.unlink()
    original.rename(place)


def interrupted_job() -> Path:
    job = store.new_job_directory("runs", "a.ipynb", {})
    make_job(job)
    store.interrupt(job)
    return job


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_job_is_not_resumed(kind: Kind) -> None:
    job = interrupted_job()

    def resume() -> None:
        if store.unfinished_job("runs", "a.ipynb", {}) is None:
            raise LabkitError("there is none: another one begins, beside what stands there")

    for name in (*JOB, "."):
        refuses(job / name, kind, resume)
    resume()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_no_new_job_begins_where_a_link_leads(kind: Kind) -> None:
    job = store.new_job_directory("runs", "a.ipynb", {})
    refuses(job.parent, kind, lambda: store.new_job_directory("runs", "a.ipynb", {}))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_no_new_run_begins_where_a_link_leads(kind: Kind) -> None:
    refuses(store.run_directory("a").parent, kind, lambda: store.run_directory("a"))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_sweep_is_not_resumed(kind: Kind) -> None:
    folder = make_sweep()

    def resume() -> None:
        manifest.read(folder)
        with manifest.owned(folder):
            pass

    for name in SWEEP:
        refuses(folder / name, kind, resume)
    resume()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_run_is_not_resumed(kind: Kind) -> None:
    run = make_run(Path("runs"))
    for name in RUN:
        refuses(run / name, kind, lambda: find_run(run))
    find_run(run)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_newest_run_of_an_experiment_is_not_resumed(kind: Kind) -> None:
    experiment = Experiment(model="mlp", workers=2)
    run = store.new_run_directory("runs", "run")
    store.start(run, experiment.to_json())
    _filled(run, RUN)
    store.interrupt(run)
    (run / "metrics.json").unlink()
    (run / "history.parquet").unlink()
    known = find_resumable(experiment, True)
    assert known is not None
    assert known.path == run.resolve()
    for name in ("logs", "logs/rank0.log", "checkpoints/5/rank0.npz", "live"):
        refuses(run / name, kind, lambda: find_resumable(experiment, True))


def test_the_folder_of_all_runs_may_be_a_link() -> None:
    Path("large").mkdir()
    Path("runs").symlink_to("large")
    job = interrupted_job()
    assert store.unfinished_job("runs", "a.ipynb", {}) == job
    assert store.run_directory("a").parent == Path("large/interactive").resolve()
    with manifest.owned(make_sweep()):
        pass
    assert find_run(Path("runs/a/001/run")).name == "run"


def test_the_end_of_a_run_is_not_recorded_where_a_link_leads() -> None:
    job = store.new_job_directory("runs", "a.ipynb", {})
    run = write_run(job, "run").path
    gone = {"state": "running", "pid": 2**22 + 1}
    store.write_json(run / "status.json", store.read_json(run / "status.json") | gone)
    put(link, run)
    before = contents(Path.cwd())
    store.end_orphans(job, "its process is gone", seconds=0.0)
    assert contents(Path.cwd()) == before


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_ranks_tell_goes_nowhere_else(kind: Kind) -> None:
    live = Path("run/live")
    live.parent.mkdir()
    make_stream(live, store.this_process())
    rank, stop = live / "rank0.jsonl", live / "stop"
    for place in (rank, stop):
        place.write_text("")
        put(kind, place)
    before = contents(Path.cwd())
    StreamWriter(live, 0, store.this_process()).write("step", [{"step": 0}])
    reader = StreamReader(live)
    assert reader.read() == []
    with pytest.raises(LabkitError, match="live/stop is a"):
        reader.is_prune_requested()
    assert contents(Path.cwd()) == before
    reader.stop("enough")  # it replaces the link or device at that path
    assert contents(Path.cwd()) == before | {str(Path.cwd() / stop): b"enough"}


def test_a_run_that_a_link_leads_to_is_left_out_with_a_line() -> None:
    write_run("elsewhere", "run")
    write_run("runs", "here")
    Path("runs/there").symlink_to(Path("elsewhere/run").resolve())
    Path("runs/.hidden").symlink_to(Path("elsewhere").resolve())
    line = f"runs/there {LINKED}"
    assert ([each.path.name for each in scan("runs").usable], scan("runs").skipped) == (
        ["here"],
        [line],
    )
    rows, skipped = jobs_and_runs(Path("runs"))
    assert ([row[0] for row in rows], skipped) == (["here"], [line])
    # A folder that the user names may be a link.
    assert [each.path.name for each in scan("runs/there").usable] == ["there"]


def test_no_checkpoint_is_removed_where_a_link_leads() -> None:
    folder = make_run(Path("runs")) / checkpoints.FOLDER
    put(link, folder / "6.17")
    outside = contents(Path("outside"))
    assert outside
    checkpoints.remove_after(folder, 0)
    assert contents(Path("outside")) == outside
    assert [*folder.iterdir()] == []


def test_a_checkpoint_is_read_from_its_own_folder_alone() -> None:
    folder = Path("run/checkpoints/5")
    folder.mkdir(parents=True)
    secret = Path("secret")
    secret.write_bytes(b"precious")
    for name in ("../../../secret", str(secret.resolve())):
        half = folder.with_name("half")
        half.mkdir()
        folder.rmdir()
        checkpoints.publish(half, {"ranks": 1, "taken": 5, "files": {name: {"sha256": ""}}})
        with pytest.raises(LabkitError, match="leads out of its folder"):
            checkpoints.read_manifest(folder)
        (folder / checkpoints.MANIFEST).unlink()


@pytest.mark.parametrize("kind", [link, pipe])
def test_a_reader_waits_for_no_pipe_and_follows_no_link(kind: Kind) -> None:
    run = write_run("runs/sweep/001", "run")
    for name in ("model.keras", "history.parquet"):
        (run.path / name).touch()
        put(kind, run.path / name)
    journal = Path("runs/sweep") / curves.JOURNAL
    journal.touch()
    put(kind, journal)
    with pytest.raises(LabkitError, match=r"model\.keras is a"):
        _ = run.model_file
    with pytest.warns(UserWarning, match=r"history\.parquet is a .*, not a file"):
        assert run.history.empty
    assert curves.folders([run]) == []
    with pytest.raises(LabkitError, match=r"is a .*, not a file"):
        curves.storage(journal.parent)
    (run.path / "seed1").symlink_to(os.path.abspath("outside"))
    assert run.seeds == []
