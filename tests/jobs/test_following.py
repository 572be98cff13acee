"""Test that `labkit run` and `labkit sweep` export curves while the notebook runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from listening import watched

from labkit.cli.app import app

pytestmark = pytest.mark.heavy
LABKIT = Path(sys.executable).parent / "labkit"
PATIENCE = 120.0  # seconds to wait for what takes a few
WAITS = f"""
import time
from pathlib import Path
import labkit as lk
lk.log(step=1, loss=2.0)
end = time.monotonic() + {PATIENCE}
while not Path("go").exists() and time.monotonic() < end:
    time.sleep(0.05)
lk.log(step=2, loss=1.0, accuracy=rate)
"""


@pytest.fixture
def notebook() -> Path:
    """Return a notebook that logs a point, waits for a signal, and logs another point."""
    if "CI" not in os.environ:  # CI installs all extras
        pytest.importorskip("tensorboard")
    cells = [
        {
            "cell_type": "code",
            "id": f"cell{place}",
            "metadata": {} if place else {"tags": ["parameters"]},
            "execution_count": None,
            "outputs": [],
            "source": source,
        }
        for place, source in enumerate(("rate: float = 0.1  # of learning", WAITS))
    ]
    content = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path = Path("waits.ipynb")
    path.write_text(json.dumps(content))
    return path


def curves(name: str) -> dict[str, dict[int, float]]:
    """Return the points of a curve by the folder of its run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for file in Path("board").rglob("events*"):
        read = EventAccumulator(str(file.parent), {"scalars": 0})
        read.Reload()
        told = read.Scalars(name) if name in read.Tags()["scalars"] else []
        found[str(file.parent.parent)] = {event.step: event.value for event in told}
    return found


def test_points_are_there_while_the_notebook_runs_and_all_of_them_afterwards(
    notebook: Path,
) -> None:
    command = [str(LABKIT), "run", str(notebook), "--tensorboard", "board"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as it:
        end = time.monotonic() + PATIENCE
        while (seen := curves("epoch/loss")) != {"board/waits/001": {1: 2.0}}:
            assert it.poll() is None, it.communicate()
            assert time.monotonic() < end, seen
            time.sleep(0.1)
        Path("go").touch()
        _, err = it.communicate(timeout=PATIENCE)
    assert it.returncode == 0, err
    assert curves("epoch/loss") == {"board/waits/001": {1: 2.0, 2: 1.0}}
    assert curves("accuracy") == {"board/waits/001": {0: pytest.approx(0.1)}}


@pytest.mark.slow
def test_the_members_of_a_sweep_are_logged_apart(notebook: Path) -> None:
    Path("go").touch()
    command = [str(LABKIT), "sweep", str(notebook), "rate=0.1,0.2", "--tensorboard", "board"]
    with watched() as open_to_others:
        subprocess.run(command, check=True, timeout=2 * PATIENCE)
    assert open_to_others == set()
    assert curves("accuracy") == {
        f"board/waits-sweep/00{number}_rate=0.{number}": {0: pytest.approx(0.1 * number)}
        for number in (1, 2)
    }


@pytest.mark.parametrize("command", [["run"], ["sweep", "rate=0.1,0.2"]])
def test_a_store_that_cannot_be_is_refused_before_anything_starts(
    notebook: Path, command: list[str]
) -> None:
    Path("taken").touch()
    verb, *rest = command
    result = CliRunner().invoke(app, [verb, str(notebook), *rest, "--tensorboard", "taken"])
    assert result.exit_code == 2, result.output
    assert "labkit: taken cannot be written: File exists" in result.stderr
    assert not Path("runs").exists()
