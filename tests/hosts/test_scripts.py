"""Test that a shell passes values in a testbed's commands on unchanged."""

from __future__ import annotations

import os
import subprocess

import pytest

from labkit.hosts.scripts import AGENT_VARIABLE, login

AGENT = "/a folder/it's an agent"


@pytest.mark.parametrize(
    ("chosen", "agent"), [("", AGENT), ("ssh -p 22", "ssh -p 22"), ("a'b $(id)", "a'b $(id)")]
)
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_login_takes_the_agent_that_is_chosen_or_its_own(
    chosen: str, agent: str, shell: str
) -> None:
    text = login([("/a b", "/c'd")], AGENT, None)
    assert subprocess.run([shell, "-n", "-c", text]).returncode == 0
    exports = text.partition("\nexec ")[0]
    done = subprocess.run(
        [shell, "-c", f'{exports}\nprintf %s "${AGENT_VARIABLE}"'],
        env=os.environ | {AGENT_VARIABLE: chosen},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == (agent, "")
