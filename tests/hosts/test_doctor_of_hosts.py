"""Test that the doctor reports what works on hosts and in Slurm, and what prevents the rest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from labkit.hosts import Testbed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def doctor(bed: Testbed, *words: str, **more: str) -> tuple[int, str]:
    labkit = Path(sys.executable).with_name("labkit")
    done = bed.login([labkit, "doctor", *words], env=os.environ | more, cwd=ROOT, timeout=150)
    assert done.stderr == ""
    return done.returncode, done.stdout


@contextmanager
def drained(bed: Testbed, node: str, reason: str) -> Iterator[None]:
    def update(*words: str) -> subprocess.CompletedProcess[str]:
        return bed.login(["scontrol", "update", f"nodename={node}", *words], check=True)

    update("state=drain", f"reason={reason}")
    try:
        yield
    finally:
        update("state=resume")


def test_slurm_that_works_is_shown_by_one_world_in_each_way(bed: Testbed) -> None:
    code, said = doctor(bed, "--launcher", "slurm")
    assert (code, "broken" in said, "note" in said) == (0, False, False), said
    assert "slurm: Slurmctld(primary) at control is UP" in said
    assert "nodes: 2 of 2 nodes can run jobs" in said
    assert re.search(r"pmi: srun offers .*\bpmix\b", said)
    for way in ("srun --mpi=pmix", "mpiexec in an allocation"):
        assert f"{way}: 2 ranks formed one MPI_COMM_WORLD on a, b" in said


def test_what_is_in_the_way_is_named_with_slurms_words(bed: Testbed) -> None:
    with drained(bed, "b", "a fan is loud"):
        code, said = doctor(bed, "--launcher", "slurm", LABKIT_SLURM="--partition=none")
    assert "nodes: node b is drained: a fan is loud | fix: systemctl restart slurmd on b" in said
    assert (code, "nodes: 1 of 2 nodes can run jobs" in said) == (0, True), said
    invalid = "Unable to allocate resources: Invalid partition name specified"
    assert f"Slurm granted no allocation within 30 s: srun: error: {invalid}" in said
    assert "fix: export LABKIT_SLURM='--partition=NAME" in said


def test_hosts_are_asked_one_by_one_and_then_meet(bed: Testbed) -> None:
    words = ("--launcher", "hosts", "--hosts", "a:2,b:2")
    code, said = doctor(bed, *words, LABKIT_AGENT=str(bed.agent))
    assert code == 0, said
    assert "hosts: b has the same versions of Python, labkit and MPI as this machine" in said
    assert "world: 4 ranks formed one MPI_COMM_WORLD on a, b" in said
    bed.link_down("b")
    try:
        code, said = doctor(bed, *words)  # the login node's environment also names the agent
    finally:
        bed.link_up()
    assert (code, "world:" in said) == (1, False)
    assert "broken  hosts: b cannot be reached by agent: ssh: connect to host b port 22" in said
