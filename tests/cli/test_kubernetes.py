"""Test that `labkit kubernetes` and `labkit container` write the files of a job and its image."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from labkit import __version__
from labkit.cli.app import app
from labkit.jobs import containers

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "tests" / "notebooks" / "is_swept.ipynb"


def test_a_job_is_written_with_the_image_that_the_other_command_describes() -> None:
    asked = ["kubernetes", str(NOTEBOOK), "-p", "number", "3"]
    done = CliRunner().invoke(app, asked)
    assert (done.exit_code, "to submit it: kubectl apply -f job.yaml" in done.output) == (0, True)
    _, job = yaml.safe_load_all(Path("job.yaml").read_text())
    worker = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert worker["image"] == f"labkit:{__version__}"
    built = CliRunner().invoke(app, ["container", "-o", "Image"])
    assert f"to build it: podman build -t {worker['image']} -f Image ." in built.output
    text = Path("Image").read_text()
    assert "openssh-server" in text
    # All files that the image copies exist in labkit's source folder.
    copied = [
        word for line in text.splitlines() if line.startswith("COPY") for word in line.split()
    ]
    assert all((ROOT / word).exists() for word in copied if word not in ("COPY", "./"))
    assert "uv.lock" not in text  # git does not track this file


def test_an_image_of_an_installed_labkit_copies_its_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "checkout", lambda: None)
    lines = containers.text().splitlines()
    wheel = f"labkit_distributed-{__version__}-py3-none-any.whl"
    assert lines[0].endswith("Build it in the folder of the wheel:")
    assert [line for line in lines if wheel in line] == [
        f"COPY {wheel} /labkit/",
        f"RUN pip install --no-cache-dir '/labkit/{wheel}[train]'",
    ]


def test_a_parameter_that_the_notebook_does_not_have_ends_it_in_one_line() -> None:
    done = CliRunner().invoke(app, ["kubernetes", str(NOTEBOOK), "-p", "numbr", "3"])
    assert (done.exit_code, Path("job.yaml").exists()) == (2, False)
    assert "has no parameter 'numbr'" in done.output
