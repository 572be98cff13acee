"""Test what is recorded of a job whose array task Slurm has ended, and which names are no task."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.hosts.queue import SlurmJob
from labkit.jobs.elements import number_of, settle
from labkit.jobs.sweep import element
from labkit.records import store


@pytest.fixture
def job() -> Path:
    """Return a running job of an array task, with a run in it."""
    folder = store.new_job_directory("runs", "a.ipynb", {})
    for each in (folder, store.new_run_directory(folder, "mlp")):
        store.start(each, {"model": "mlp"})
        known = store.read_json(each / "status.json")
        # The record is another machine's: no process here has this process id.
        store.write_json(each / "status.json", known | {"element": "12_3", "pid": 2**22 + 1})
    return folder


@pytest.mark.parametrize(
    ("said", "state", "cause"),
    [
        (SlurmJob("12_3", "TIMEOUT"), "interrupted", "job 12_3: the time limit was reached"),
        (
            SlurmJob("12_3", "OUT_OF_MEMORY"),
            "failed",
            "the job used more memory than Slurm had allocated",
        ),
        (SlurmJob("12_3", "NODE_FAIL"), "failed", "a node failed"),
        (
            SlurmJob("12_3", "FAILED", "NonZeroExitCode"),
            "failed",
            "without a record (FAILED, NonZero",
        ),
        (None, "interrupted", "Slurm no longer has a record of the run's job array element"),
    ],
)
def test_slurms_reason_is_recorded_of_the_job_and_of_its_run(
    job: Path, said: SlurmJob | None, state: str, cause: str
) -> None:
    # This machine cannot know that the task has ended.
    assert store.read_status(job)["state"] == "running"
    settle(job, said)
    for folder in (job, job / "mlp"):
        status = store.read_status(folder)
        assert (status["state"], cause in status["cause"]) == (state, True), status


def test_a_record_that_knows_better_stays(job: Path) -> None:
    store.fail(job, "cell In [2]: ValueError: no use")
    settle(job, SlurmJob("12_3", "FAILED", "NonZeroExitCode"))
    assert "no use" in store.read_status(job)["cause"]
    # A killed kernel cannot record why it ended, but Slurm can.
    settle(job, SlurmJob("12_3", "OUT_OF_MEMORY"))
    assert "more memory" in store.read_status(job)["cause"]
    store.complete(job)
    settle(job, SlurmJob("12_3", "CANCELLED"), "interrupted by the user")
    assert store.read_status(job)["state"] == "completed"


def test_who_has_asked_for_the_end_is_named(job: Path) -> None:
    settle(job, SlurmJob("12_3", "CANCELLED"), "interrupted by the user")
    assert store.read_status(job)["cause"] == "interrupted by the user"


def test_what_is_no_number_never_becomes_a_word_of_scancels() -> None:
    assert number_of({"element": "12_3"}) == "12_3"
    for odd in ({}, {"element": "--user=root"}, {"element": "12"}, {"element": ["12_3"]}):
        assert number_of(odd) == ""


def test_an_element_without_a_member_says_so(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert element.main(Path("nowhere"), "12", 3) == element.NOT_MINE
    assert "element 12_3 has no notebook run in nowhere: nowhere/sweep.json is missing" in (
        capfd.readouterr().err
    )
    store.write_json(Path("runs/sweep.json"), {"elements": [f"{job.parent.name}/{job.name}"]})
    assert element.main(Path("runs"), "12", 1) == element.NOT_MINE
