"""Compare flow times of labkit with those of SimGrid, if a Python with SimGrid exists."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import numpy as np

from labkit.bench.command import AS_JSON, show_rows
from labkit.bench.timing import Row, head
from labkit.common.errors import LabkitError
from labkit.network import finish_times
from tests.acceptance.flow_sets import FLOW_SETS, FlowSet

SCRIPT = Path(__file__).with_name("simgrid_script.py")


def interpreter() -> str:
    """Return the path of a Python that can import SimGrid: this Python, or the system's.

    Raises: LabkitError with instructions to install SimGrid.
    """
    for python in (sys.executable, shutil.which("python3", path=os.defpath)):
        asked = [python or "", "-I", "-c", "import simgrid"]
        if python and subprocess.run(asked, capture_output=True).returncode == 0:
            return python
    raise LabkitError(
        "no SimGrid in this Python or the system's: on Debian and Ubuntu apt-get install "
        "python3-simgrid"
    )


def compare() -> list[Row]:
    """Return a row per flow of `FLOW_SETS`: its end time (s) by hand, by labkit, and by SimGrid.

    Raises: LabkitError if SimGrid is missing or fails.
    """
    python = interpreter()
    return [row for each in FLOW_SETS for row in _rows(each, _by_simgrid(python, each))]


def _by_simgrid(python: str, each: FlowSet) -> list[float]:
    asked = json.dumps(each._asdict())
    done = subprocess.run([python, "-I", str(SCRIPT)], input=asked, capture_output=True, text=True)
    if done.returncode:
        raise LabkitError(f"SimGrid failed on {each.name!r}: {done.stderr.strip()[-300:]}")
    seconds: list[float] = json.loads(done.stdout)
    return seconds


def _rows(each: FlowSet, simgrid: list[float]) -> list[Row]:
    hops = max(map(len, each.ways))
    ways = np.array([[*way, *[-1] * (hops - len(way))] for way in each.ways])
    own = finish_times(ways, each.nbytes, each.start, each.bandwidth).tolist()
    return [
        head("link", f"{each.name}: flow {flow}", "SimGrid", 0)
        | {"by_hand": hand, "labkit": mine, "simgrid": theirs, "error": mine / theirs - 1}
        for flow, (hand, mine, theirs) in enumerate(zip(each.drained, own, simgrid, strict=True))
    ]


@click.command("simgrid")
@AS_JSON
def command(file: Path | None) -> None:
    """Compare the end times of labkit's flows with those of SimGrid, if SimGrid is installed."""
    columns = {"case": "flows", "by_hand": "by hand s", "labkit": "labkit s"}
    show_rows(compare(), columns | {"simgrid": "SimGrid s", "error": "error"}, file)
