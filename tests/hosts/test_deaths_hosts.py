"""Test that ranks on two hosts survive the death of other ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.communicator import launcher

pytestmark = [pytest.mark.slow, pytest.mark.alone]

SCRIPT = Path(__file__).parents[1] / "communicator" / "sample_deaths.py"
Mpirun = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(("call", "victims"), [("two_level", "0,3"), ("mpi", "2,1")])
def test_those_that_live_go_on_over_both_hosts(mpirun: Mpirun, call: str, victims: str) -> None:
    command = [sys.executable, str(SCRIPT), call, victims, "0.4"]
    done = mpirun(command, options=launcher.ULFM_OPTIONS, timeout=80)
    told = [line.split(",")[0] for line in done.stdout.splitlines()]
    assert told == [f"{call}: without {each}" for each in victims.split(",")], done.stderr
