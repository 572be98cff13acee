"""Test that run directories are complete, truthful and free of this machine's names."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml
from sample_runs import experiment, history, metrics, write_run

from labkit.common.errors import LabkitError
from labkit.common.privacy import scrub
from labkit.records import store
from labkit.records.folders import find_runs, scan


def test_a_write_that_fails_leaves_the_old_content_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.json"
    store.write_atomically(path, "old")

    def disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space"):
        store.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_records_are_strict_json_with_a_schema_version(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    values = {"loss": float("nan"), "n": np.int64(3), "v": np.ones(2), "p": Path("/a/b/c")}
    store.write_json(path, values)
    record = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert record == {"schema": 2, "loss": None, "n": 3, "v": [1.0, 1.0], "p": "c"}


def test_the_second_run_of_a_name_is_called_2_and_threads_never_share_a_directory(
    tmp_path: Path,
) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: store.new_run_directory(tmp_path, "mlp-1a2b3c4d"), range(8)))
    names = {path.name for path in made}
    assert names == {"mlp-1a2b3c4d", *(f"mlp-1a2b3c4d-{number}" for number in range(2, 9))}


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/b", "..", "", "é" * 300, "<b>x</b>"])
def test_no_name_leaves_its_folder_or_grows_too_long(tmp_path: Path, name: str) -> None:
    directory = store.new_run_directory(tmp_path, name)
    assert directory.parent == tmp_path
    assert directory.resolve().is_relative_to(tmp_path.resolve())
    assert 0 < len(directory.name.encode()) <= store.MAX_NAME_BYTES


def test_long_names_that_differ_at_the_end_stay_two_names() -> None:
    assert store.safe_name("a" * 300 + "1") != store.safe_name("a" * 300 + "2")


def test_jobs_are_numbered_and_named_by_their_parameters(tmp_path: Path) -> None:
    values = {"workers": 2, "data": "/srv/alice/mnist.npz", "widths": [64, 32]}
    first = store.new_job_directory(tmp_path, "notebooks/tour.ipynb", values)
    second = store.new_job_directory(tmp_path, "/home/alice/tour.ipynb", {})
    assert first == tmp_path / "tour" / "001_workers=2,data=mnist.npz,widths=_64,32"
    assert second.name == "002"
    assert store.read_status(first)["state"] == "queued"
    assert store.read_status(first)["notebook"] == "notebooks/tour.ipynb"
    assert store.read_status(second)["notebook"] == "tour.ipynb"
    assert yaml.safe_load((first / "params.yaml").read_text())["widths"] == [64, 32]
    assert yaml.safe_load((second / "params.yaml").read_text()) == {}


def test_jobs_started_at_once_take_different_numbers(tmp_path: Path) -> None:
    def job(number: int) -> Path:
        return store.new_job_directory(tmp_path, "tour.ipynb", {"seed": number})

    with ThreadPoolExecutor(8) as pool:
        names = [path.name for path in pool.map(job, range(8))]
    assert len({name[:3] for name in names}) == 8


def test_completed_is_said_after_everything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    write = store.write_atomically

    def spy(path: Path, content: bytes | str) -> Path:
        written.append(path.name)
        return write(path, content)

    monkeypatch.setattr(store, "write_atomically", spy)
    store.start(tmp_path, experiment(), {"python": "3.11"})
    assert store.read_status(tmp_path)["state"] == "running"
    store.finish(tmp_path, metrics(2, 1), history(2, 1), model=b"weights")
    assert written[-1] == "status.json"
    assert {"metrics.json", "history.parquet", "model.keras"} <= set(written[3:-1])
    status = store.read_status(tmp_path)
    assert status["state"] == "completed"
    assert status["started"] <= status["ended"]
    assert status["started"].endswith("+00:00")


def test_history_may_come_as_rows_and_keeps_columns_of_its_own(tmp_path: Path) -> None:
    import pandas as pd

    columns = history(2, 1, steps=3) | {"staleness": np.arange(6)}
    store.start(tmp_path, experiment(), {})
    store.finish(tmp_path, metrics(2, 1), pd.DataFrame(columns).to_dict("records"))
    table = pd.read_parquet(tmp_path / "history.parquet")
    assert list(table.columns) == [*store.HISTORY_COLUMNS, "staleness"]
    assert (table["loss"] == columns["loss"]).all()
    store.finish(tmp_path, metrics(2, 1), [])
    assert len(pd.read_parquet(tmp_path / "history.parquet")) == 0


def test_a_history_without_a_needed_column_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LabkitError, match="without rank"):
        store.finish(tmp_path, {}, {name: [] for name in store.HISTORY_COLUMNS if name != "rank"})


def test_a_failure_keeps_its_cause_and_rank_but_no_path_or_user(tmp_path: Path) -> None:
    store.start(tmp_path, experiment(), {})
    store.fail(tmp_path, f"no file {Path.home()}/data/lab/x.npz", rank=1)
    status = store.read_status(tmp_path)
    assert (status["state"], status["rank"]) == ("failed", 1)
    assert status["cause"].endswith("x.npz")
    assert str(Path.home()) + "/" not in status["cause"]


def test_running_without_its_process_reads_as_interrupted(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from labkit.records import store;"
        "store.start(Path(sys.argv[1]), {}, {})"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=240)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"
    status = store.read_status(tmp_path)
    assert (status["state"], status["cause"]) == ("interrupted", "its process is gone")


def test_another_process_under_the_same_number_does_not_keep_a_run_alive(tmp_path: Path) -> None:
    store.start(tmp_path, experiment(), {})
    record = store.read_json(tmp_path / "status.json")
    store.write_json(tmp_path / "status.json", record | {"process_started": 1.0, "since_boot": 1.0})
    assert store.read_status(tmp_path)["state"] == "interrupted"


def test_a_clock_that_was_set_ends_no_run(tmp_path: Path) -> None:
    store.start(tmp_path, experiment(), {})
    record = store.read_json(tmp_path / "status.json")
    # This record looks as on a system whose clock was since put back by an hour.
    moved = {"process_started": record["process_started"] + 3600.0}
    store.write_json(tmp_path / "status.json", record | moved)
    assert store.read_status(tmp_path)["state"] == "running"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a small separate file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = ["mount", "-t", "tmpfs", "-o", "size=64k", "labkit-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(made, capture_output=True).returncode != 0:
        pytest.skip("only root can make a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_on_a_read_only_disk_the_cause_is_kept_elsewhere_and_told(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.start(disk, experiment(), {})
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    store.fail(disk, "out of patience", rank=1)
    status = store.read_status(disk)
    assert (status["state"], status["cause"], status["rank"]) == ("failed", "out of patience", 1)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "status.json: Read-only file system; failed: out of patience; written to " in said


def test_on_a_full_disk_and_nowhere_else_to_write_the_cause_is_told_at_least(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store.start(disk, experiment(), {})
    monkeypatch.setenv("LABKIT_RUNTIME", str(disk / "runtime"))
    with pytest.raises(OSError, match="No space left"), (disk / "ballast").open("wb") as file:
        file.write(bytes(1 << 20))
    store.fail(disk, "out of patience")
    assert (
        "No space left on device; failed: out of patience; the status could not be written anywhere"
        in (capsys.readouterr().err)
    )


def test_interrupt_is_said_as_such(tmp_path: Path) -> None:
    store.start(tmp_path, experiment(), {})
    store.interrupt(tmp_path)
    assert store.read_status(tmp_path)["cause"] == "interrupted by the user"


def test_runs_are_found_at_any_depth_but_not_inside_a_run(tmp_path: Path) -> None:
    job = store.new_job_directory(tmp_path, "tour.ipynb", {"workers": 2})
    top = write_run(job)
    write_run(top.path, "seed0")
    other = write_run(tmp_path / "interactive")
    assert {run.path for run in find_runs(tmp_path)} == {top.path, other.path}
    assert [run.path for run in find_runs(top.path)] == [top.path]


@pytest.mark.parametrize("kept", [0, 3, -3])
def test_a_run_whose_history_is_torn_is_left_out(tmp_path: Path, kept: int) -> None:
    good, torn = write_run(tmp_path), write_run(tmp_path)
    path = torn.path / "history.parquet"
    path.write_bytes(path.read_bytes()[:kept])
    found = scan(tmp_path)
    assert found.runs == [good.path]
    assert "history.parquet is truncated; copy the run again" in found.skipped[0]


def test_broken_metrics_of_a_run_that_did_not_complete_are_a_line_too(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    status = store.read_json(run.path / "status.json")
    store.write_json(run.path / "status.json", status | {"state": "interrupted"})
    (run.path / "metrics.json").write_text("{")
    assert "metrics.json cannot be read" in scan(tmp_path).skipped[0]


def test_unusable_runs_are_left_out_with_one_line_each(tmp_path: Path) -> None:
    good = write_run(tmp_path)
    newer, torn, half, lost = (write_run(tmp_path).path for _ in range(4))
    store.write_atomically(newer / "metrics.json", '{"schema": 99}')
    store.write_atomically(torn / "status.json", '{"schema": 2, "sta')
    (half / "status.json").unlink()
    (lost / "metrics.json").unlink()
    found = scan(tmp_path)
    assert found.runs == [good.path]
    reasons = "\n".join(found.skipped)
    assert len(found.skipped) == len(reasons.splitlines()) == 4
    assert "schema 99, but this labkit reads only up to 2; update labkit" in reasons
    assert "status.json is missing" in reasons
    assert "metrics.json is missing" in reasons
    assert "status.json cannot be read" in reasons
    with pytest.warns(UserWarning, match="left out") as warned:
        assert [run.path for run in find_runs(tmp_path)] == [good.path]
    assert len(warned) == 4


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LabkitError, match=r"no folder .*nowhere"):
        find_runs(tmp_path / "nowhere")


def test_scrub_shortens_paths_and_leaves_addresses_and_words_alone() -> None:
    assert scrub("in /srv/lab/alice/train.py:3") == "in …/train.py:3"
    assert scrub("File '/opt/x/lib/site.py'") == "File '…/site.py'"
    assert scrub("File \x1b[32m/opt/x/site.py\x1b[0m") == "File …/site.py"
    assert scrub("--data=/mnt/x/y.npz file:///mnt/x/z") == "--data=…/y.npz …/z"
    assert scrub("in /home/alice and /Users/bob/lab") == "in ~ and ~/lab"
    for text in (
        "https://arxiv.org/abs/1710.03740",
        "samples/s/rank",
        "a </div></p>",
        "data:image/jpeg;base64,/9j/4AA/x=",
    ):
        assert scrub(text) == text


def test_scrub_takes_out_user_and_host(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    from labkit.common import privacy

    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(socket, "gethostname", lambda: "bluebox.lab.example")
    privacy._names.cache_clear()
    try:
        assert scrub("alice@bluebox: malice, bluebox.lab.example") == "…@…: malice, …"
    finally:
        privacy._names.cache_clear()


@pytest.mark.parametrize(("record", "state"), [(store.fail, "failed"), (store.prune, "pruned")])
def test_a_run_that_its_process_left_behind_ends_as_its_job_did(
    tmp_path: Path, record: Callable[[Path, str], None], state: str
) -> None:
    gone = store.this_process() | {"process_started": 0.0, "since_boot": 0.0}
    for name, process in (("left", gone), ("goes on", store.this_process())):
        (tmp_path / name).mkdir()
        store.start(tmp_path / name, experiment(), {})
        status = tmp_path / name / "status.json"
        store.write_json(status, store.read_json(status) | process)
    store.end_orphans(tmp_path, "step 2", seconds=0.0, record=record)
    ended, other = (store.read_json(tmp_path / n / "status.json") for n in ("left", "goes on"))
    assert (ended["state"], ended["cause"], other["state"]) == (state, "step 2", "running")


@pytest.mark.parametrize(
    "odd",
    [
        *({"pid": pid} for pid in (0, -1, -(2**40), 2**80, True, 1.0, 1e400, "1", None, [1])),
        *({"process_started": value} for value in (10**400, "now", None, {})),
    ],
    ids=lambda odd: str(odd)[:40],
)
def test_no_process_is_alive_under_an_odd_number(odd: dict[str, object]) -> None:
    this = store.this_process()
    assert store.is_alive(this)
    first = psutil.Process(1).create_time()  # so that only the type of the process id is wrong
    named = this | ({"process_started": first, "since_boot": -1.0} if "pid" in odd else {})
    assert not store.is_alive(named | {"since_boot": -1.0} | odd)


def test_a_kernel_in_a_folder_of_the_repository_finds_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LABKIT_RUNS", raising=False)
    inner = tmp_path / "project" / "notebooks"
    inner.mkdir(parents=True)
    (tmp_path / "project" / "runs").mkdir()
    monkeypatch.chdir(inner)
    assert store.runs_folder() == Path("runs")
    (tmp_path / "project" / ".git").mkdir()
    assert store.runs_folder() == tmp_path / "project" / "runs"
    assert store.run_directory("run").parent == tmp_path / "project" / "runs" / "interactive"
    monkeypatch.setenv("LABKIT_RUNS", "elsewhere")
    assert store.runs_folder() == Path("elsewhere")
