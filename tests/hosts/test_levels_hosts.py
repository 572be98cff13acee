"""Test sums of ranks on two hosts: correct, bitwise equal, chosen by timing, counted per level."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.communicator import ALGORITHMS
from labkit.schedules import ALLREDUCE

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
Run = Callable[..., subprocess.CompletedProcess[str]]


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_algorithm_sums_to_the_bits_of_its_schedule_laid_out_on_the_hosts(
    mpirun: Run,
) -> None:
    script = str(TESTS / "communicator" / "ranks.py")
    # Two of the three ranks are on one host.
    assert said(mpirun([sys.executable, script, "sums", "3,4"])) == ["done"]


def test_means_are_right_and_what_leaves_a_host_is_what_its_link_has_counted(mpirun: Run) -> None:
    script = str(Path(__file__).with_name("sample_levels.py"))
    *counted, chosen = map(json.loads, said(mpirun([sys.executable, script])))
    among = [name for name in ALGORITHMS if name != "shared_memory"]
    assert sorted(name for name, *_ in counted) == sorted([*among, *among])  # both hosts
    for name, told, link in counted:
        # The link also counts headers, acknowledgements and Slurm's traffic; labkit's count is a
        # lower bound.
        assert told <= link < (4 if name == "mpi" else 1.1 * told + 0.05), name
        if name == "two_level":
            assert told == pytest.approx(1)  # 2(h - 1)/h
        if name == "ring":
            # 2(p - 1)/p: one of the host's two ranks sends over the link.
            assert told == pytest.approx(1.5)
    algorithm, why = chosen
    assert algorithm in among
    assert why.startswith(f"the fastest when timed with 1.05 MB on 4 ranks: {algorithm} ")
    assert algorithm in ("mpi", "ring") or ALLREDUCE[algorithm].between
