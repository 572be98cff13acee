"""Test that hosts which cannot take part say why, before any process starts on them."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from labkit.hosts import Testbed, host_probe

pytestmark = pytest.mark.heavy  # each test starts a process that reports its MPI


def agent(script: str) -> list[str]:
    """Return a command that replaces ssh: $1 is the host, $2 the shell command."""
    path = Path("agent").absolute()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return [str(path)]


def test_a_host_with_the_same_python_labkit_and_mpi_has_no_trouble() -> None:
    (well,) = host_probe.probe(["a"], agent('[ $# = 2 ] && echo motd && exec sh -c "$2"'))
    assert well == ("a", "")
    own = host_probe.local_python()
    assert "MPI" in own.mpi
    assert Path(own.path).name.startswith("libmpi")


def test_each_trouble_is_a_sentence_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = host_probe.local_python()
    told = {
        "old": own._replace(labkit="0.0"),
        "mended": own._replace(source="other"),
        "site": own._replace(mpi="Open MPI v4.1.4"),
    }
    said = "\n".join(
        f"{name}) echo 'labkit answers: {json.dumps(known)}' ;;" for name, known in told.items()
    )
    words = agent(f"""case $1 in
        {said}
        far) echo 'ssh: connect to host far port 22: No route to host' >&2; exit 255 ;;
        bare) echo 'sh: 1: python: not found' >&2; exit 127 ;;
        empty) echo "ModuleNotFoundError: No module named 'labkit'" >&2; exit 1 ;;
        mute) exec sleep 600 ;;
    esac""")
    monkeypatch.setattr(host_probe, "LIMIT", 3.0)
    names = ["old", "mended", "site", "far", "bare", "empty", "mute"]
    troubles = dict(host_probe.probe(names, words))
    assert troubles["old"].startswith(
        f"old has labkit 0.0, but this host has {own.labkit}; install"
    )
    assert "mended has labkit" in troubles["mended"]
    assert "with another source; install the same labkit on all hosts" in troubles["mended"]
    assert troubles["site"] == (
        f"site uses Open MPI v4.1.4, but this host uses {own.mpi}; use the same MPI on all hosts"
    )
    assert troubles["far"].startswith("far cannot be reached by agent: ssh: connect to host far")
    assert "install labkit's Python at the same path on all hosts" in troubles["bare"]
    assert troubles["empty"].endswith("ModuleNotFoundError: No module named 'labkit'")
    assert troubles["mute"] == "mute did not answer within 3 s"


def test_ssh_is_told_not_to_ask_for_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    agent('echo "$@" > words; exit 255')
    Path("agent").rename("ssh")
    host_probe.probe(["a"], [str(Path("ssh").absolute())])
    assert Path("words").read_text().startswith("-o BatchMode=yes -o ConnectTimeout=5 a env ")


@pytest.mark.slow
def test_the_hosts_of_a_testbed_are_asked_and_one_that_is_cut_off_is_named(bed: Testbed) -> None:
    words = [str(bed.agent)]
    assert host_probe.probe(bed.hosts, words) == [("a", ""), ("b", "")]
    bed.link_down("b")
    try:
        well, cut = host_probe.probe(bed.hosts, words)
    finally:
        bed.link_up()
    assert well.trouble == ""
    assert cut.trouble.startswith("b cannot be reached by agent: ssh: connect to host b port 22")
