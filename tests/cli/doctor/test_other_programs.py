"""Test that tools that are absent or fail, or find too little, yield one line and no error."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.cli.doctor import programs

pytestmark = pytest.mark.heavy  # other programs are started

Tool = Callable[[str, str], None]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Return a function that creates a command; PATH contains only these commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def put(name: str, script: str) -> None:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return put


@pytest.mark.parametrize(
    ("system", "fix"),
    [("linux", "apt-get install chromium"), ("darwin", "brew install --cask chromium")],
)
def test_no_browser_is_there(
    tool: Tool, monkeypatch: pytest.MonkeyPatch, system: str, fix: str
) -> None:
    monkeypatch.setattr(programs.sys, "platform", system)
    monkeypatch.setattr(programs, "BROWSERS", programs.BROWSERS[:3])
    (browser,) = programs.chromium()
    assert (browser.state, browser.fix) == ("note", fix)


def test_a_browser_that_is_on_no_path_is_found(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool("Google Chrome", "echo Google Chrome 1.2")
    place = str(tmp_path / "bin" / "Google Chrome")
    monkeypatch.setattr(programs, "BROWSERS", ("chromium", place))
    (found,) = programs.chromium()
    assert found.state == "ok"


def test_nothing_is_there(tool: Tool) -> None:
    (queue,) = programs.slurm()
    assert (queue.state, queue.what) == ("ok", "slurm: not installed; ranks start on this machine")
    assert programs.devices() == []
    assert programs.gpus(0, []).what == "gpus: none found; ranks compute on CPU cores"


def test_a_browser_tells_its_version_or_why_not(tool: Tool) -> None:
    tool("google-chrome", "echo Google Chrome 1.2")
    (found,) = programs.chromium()
    assert found.line == "ok      chromium: Google Chrome 1.2"
    tool("chromium", "echo error while loading libnss3.so >&2; exit 127")
    (found,) = programs.chromium()
    assert (found.state, "libnss3.so" in found.what) == ("note", True)


def test_a_queue_tells_its_nodes_or_why_not(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    tool("sinfo", "echo 'debug* 3 idle'; echo 'long 1 down'")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    (found,) = programs.slurm()
    said = "slurm: nodes: 3 idle in debug*, 1 down in long; in allocation 17"
    assert (found.state, found.what) == ("ok", said)
    tool("sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    (found,) = programs.slurm()
    assert (found.state, "Unable to contact" in found.what) == ("note", True)
    assert found.fix.startswith("systemctl restart")


def test_ranks_of_a_host_take_its_gpus_in_turn(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    tool("nvidia-smi", 'for n in 0 1; do echo "GPU $n: NVIDIA H200 (UUID: GPU-$n)"; done')
    there = programs.devices()
    assert there == ["NVIDIA H200", "NVIDIA H200"]
    found = programs.gpus(2, there)
    said = "gpus: 2; on a host rank 0 takes GPU 0, rank 1 takes GPU 1, rank 2 takes GPU 0, …"
    assert (found.state, found.what) == ("ok", said)
    found = programs.gpus(0, there)
    assert found.what == "gpus: TensorFlow finds 0 of the driver's 2 GPUs (NVIDIA H200)"
    assert "pip install 'tensorflow[and-cuda]==" in found.fix
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = programs.gpus(1, there)
    assert "CUDA_VISIBLE_DEVICES=1 hides the others" in found.what
    assert found.fix == "unset CUDA_VISIBLE_DEVICES"
