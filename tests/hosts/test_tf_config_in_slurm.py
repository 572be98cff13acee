"""TF_CONFIG of the hosts that Slurm has given."""

from __future__ import annotations

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
