"""Test that a process always answers the question where it is, even if it cannot tell."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from labkit.cluster import stack_probe

ANSWERING = """
import sys, time
from pathlib import Path
from labkit.cluster import stack_probe

true, asked = stack_probe.describe_location, []

def place(frame):
    asked.append(frame)
    if len(asked) == 1:
        raise IndexError("no such line")
    return true(frame)

stack_probe.describe_location = place
stack_probe.start_reporting(Path(sys.argv[1]))
Path(sys.argv[1], "ready").touch()
time.sleep(600)
"""


def test_a_place_that_cannot_be_told_does_not_end_the_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_probe, "ANSWER", 60.0)  # a late answer would count as the next one
    alone = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # NumPy starts its threads at its import
    process = subprocess.Popen([sys.executable, "-c", ANSWERING, str(tmp_path)], env=alone)
    try:
        end = time.monotonic() + 240
        while not (tmp_path / "ready").exists() and time.monotonic() < end:
            time.sleep(0.02)
        told: list[str] = []
        while len(told) < 3 and time.monotonic() < end:
            answers = stack_probe.request_locations(tmp_path, [process.pid])
            told += [answer for answer in answers if answer is not None]
        assert told[0] == "an unknown place (IndexError: no such line)"
        assert "unknown" not in told[1] + told[2]
    finally:
        process.kill()
        process.wait()
