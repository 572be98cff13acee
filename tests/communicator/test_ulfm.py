"""Test that ranks survive the death of a rank, whatever they do at that moment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.communicator import launcher

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("sample_deaths.py")


@pytest.mark.parametrize(
    ("call", "victims"),
    [("ring", "0,2"), ("mpi", "2,0"), ("shared_memory", "0,2")],
)
def test_those_that_live_are_told_and_their_world_adds_up_rightly(call: str, victims: str) -> None:
    command = [*launcher.mpiexec(4, outlives=True), sys.executable, str(SCRIPT), call, victims]
    environment = os.environ | launcher.environment()
    done = subprocess.run(
        [*command, "0.2"], capture_output=True, text=True, timeout=60, env=environment
    )
    told = [line.split(",")[0] for line in done.stdout.splitlines()]
    assert told == [f"{call}: without {each}" for each in victims.split(",")], done.stderr
