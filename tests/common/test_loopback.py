"""Test that a machine without 127.0.0.1, such as one with only IPv6, gets a clear message."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.cli.doctor import machine
from labkit.common.machine import LOOPBACK_FIX, require_loopback, without_loopback

ALONE = ["unshare", "--net", "--map-root-user", "sh", "-c"]
IPV6 = "ip link set lo up && ip -4 address del 127.0.0.1/8 dev lo && "
CLUSTER = "import labkit; labkit.Cluster(2)"


def alone(command: list[str]) -> str:
    """Return the last line that a command prints in a network namespace with only ::1."""
    words = " ".join(f"'{word}'" for word in command)
    done = subprocess.run([*ALONE, IPV6 + words], capture_output=True, text=True)
    return done.stderr.strip().splitlines()[-1]


def test_this_machine_has_one() -> None:
    require_loopback()
    assert without_loopback() == ""
    assert [finding.state for finding in machine.loopback()] == ["ok"]


@pytest.mark.skipif(not shutil.which("unshare") or not shutil.which("ip"), reason="wants iproute2")
def test_a_cluster_and_a_notebook_without_one_say_what_is_missing() -> None:
    if subprocess.run([*ALONE, f"{IPV6} true"], capture_output=True).returncode:
        pytest.skip("this system lets nobody make a network namespace")
    Path("nb.py").write_text("# %%\nprint(1)\n")
    for command, name in (
        ([sys.executable, "-P", "-c", CLUSTER], "labkit.common.errors.LabkitError"),
        ([str(Path(sys.executable).with_name("labkit")), "run", "nb.py"], "labkit"),
    ):
        told = alone(command)
        assert told.startswith(f"{name}: this machine has no loopback address 127.0.0.1 ("), told
        assert told.endswith(f"; as root: {LOOPBACK_FIX}")
