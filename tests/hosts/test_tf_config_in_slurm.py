"""Test TF_CONFIG for the hosts that Slurm has allocated."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from labkit.hosts import Testbed

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def test_in_a_job_the_hosts_are_those_that_slurm_has_given(bed: Testbed) -> None:
    labkit = [str(Path(sys.executable).with_name("labkit")), "tf-config"]
    inside = bed.login(["salloc", "-N2", *labkit, "--slurm"], cwd=ROOT, timeout=60)
    assert inside.returncode == 0, inside.stderr
    assert inside.stdout == bed.login([*labkit, "a", "b"]).stdout


def test_each_task_of_a_step_takes_what_is_its_own(bed: Testbed) -> None:
    labkit = Path(sys.executable).with_name("labkit")
    asked = f"{labkit} tf-config --slurm --workers 1 --servers 1 --evaluator"
    script = f'told=$({asked}) && eval "$told" && echo "$(hostname) $TF_CONFIG"'
    step = ["srun", "-N2", "--ntasks-per-node=3", "--distribution=cyclic", "sh", "-c", script]
    done = bed.login(step, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    found = {}
    for host, config in (line.split(" ", 1) for line in done.stdout.splitlines()):
        told = json.loads(config)
        job, index = told["task"]["type"], told["task"]["index"]
        assert told["cluster"][job][index].startswith(f"{host}:")
        found[job, index] = host
    assert len(found) == 6
    few = ["srun", "-N2", "--ntasks-per-node=1", str(labkit), "tf-config", "--slurm"]
    wrong = bed.login([*few, "--workers", "2"], cwd=ROOT, timeout=60)
    assert "srun started 2 tasks, but TF_CONFIG has 4 processes, 2 of them on" in wrong.stderr
