"""Test TF_CONFIG for each host, and child processes of other frameworks."""

from __future__ import annotations

import json
import os
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from labkit.cli.app import app
from labkit.common.errors import InvalidInput, LabkitError
from labkit.communicator import single_rank
from labkit.frameworks.child import Child
from labkit.frameworks.tcp_counters import ByteCounters
from labkit.frameworks.tf_config import on_hosts, on_this_host


def told(*arguments: str) -> dict[str, Any]:
    """Return the `TF_CONFIG` values that `labkit tf-config` prints, by host and task."""
    result = CliRunner().invoke(app, ["tf-config", *arguments])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    exported = [shlex.split(line)[1].partition("=") for line in lines[1::2]]
    assert {name for name, _, _ in exported} == {"TF_CONFIG"}
    return {
        who[2:]: json.loads(value) for who, (_, _, value) in zip(lines[::2], exported, strict=True)
    }


def test_workers_alone_are_told_of_each_other() -> None:
    cluster = {"worker": ["a:2222", "b:2222"]}
    assert told("a", "b") == {
        "a: worker 0": {"cluster": cluster, "task": {"type": "worker", "index": 0}},
        "b: worker 1": {"cluster": cluster, "task": {"type": "worker", "index": 1}},
    }


def test_servers_bring_a_chief_and_have_ports_of_their_own() -> None:
    found = told("a", "b", "--workers", "2", "--servers", "1", "--evaluator", "--port", "3000")
    assert [*found] == [
        "a: chief 0",
        *("a: worker 0", "a: worker 1", "b: worker 2", "b: worker 3"),
        *("a: ps 0", "b: ps 1", "b: evaluator 0"),
    ]
    (cluster,) = {json.dumps(each["cluster"]) for each in found.values()}
    assert json.loads(cluster) == {
        "chief": ["a:3000"],
        "worker": ["a:3001", "a:3002", "b:3000", "b:3001"],
        "ps": ["a:3003", "b:3002"],
        "evaluator": ["b:3003"],
    }


def test_a_server_inside_a_worker_has_no_process_of_its_own() -> None:
    found = told("a", "b", "--servers", "1", "--server-inside-worker")
    assert [*found] == ["a: chief 0", "a: worker 0 and ps 0", "b: worker 1 and ps 1"]
    found = told("a", "b", "--workers", "2", "--servers", "1", "--server-inside-worker")
    assert [*found][1:] == [
        *("a: worker 0 and ps 0", "a: worker 1", "b: worker 2 and ps 1", "b: worker 3"),
    ]
    with pytest.raises(InvalidInput, match="servers=2 exceed workers=1"):
        on_hosts(["a"], servers=2, inside=True)
    with pytest.raises(InvalidInput, match="hosts a are given twice"):
        on_hosts(["a", "b", "a"])


def test_ports_of_this_host_are_free_and_different() -> None:
    spec = on_this_host({"chief": 1, "worker": 3, "ps": 2})
    addresses = [address for job in spec.jobs.values() for address in job]
    assert len({*addresses}) == 6
    for address in addresses:
        host, _, port = address.partition(":")
        socket.create_server((host, int(port))).close()


@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(socket, "AF_NETLINK"), reason="Linux alone counts")
def test_bytes_are_those_of_the_connections_between_tasks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        read, write = os.pipe()
        child = os.fork()
        if not child:  # the child sends, then waits for the parent's signal
            with socket.create_connection(server.getsockname()) as there:
                there.sendall(bytes(54_321))
                os.read(read, 1)
            os._exit(0)
        try:
            here, _ = server.accept()
            with here:
                got = 0
                while got < 54_321:
                    got += len(here.recv(1 << 16))
                here.sendall(bytes(7))
                wires = ByteCounters({"child": child, "parent": os.getpid()})
                assert 54_321 <= wires.read(["child"]) <= 54_322  # the handshake counts as one byte
        finally:
            os.write(write, b"x")
            os.waitpid(child, 0)
    row = wires.matrix(["child"])
    assert row == {"child": {"child": 0, "parent": wires.read(["child"])}}
    assert wires.read(["nobody"]) == 0
    wires.reset()
    assert wires.read(["child"]) == 0


SAMPLE = """
import os, sys
from labkit.frameworks.child import serve

serve(lambda task: {
    "add": lambda more: task + more,
    "divide": lambda by: task / by,
    "threads": lambda: os.environ["TF_NUM_INTRAOP_THREADS"],
    "leave": lambda: (print("last words", flush=True), os._exit(3)),
})
"""


@pytest.mark.heavy
def test_a_child_answers_and_its_errors_are_raised_where_they_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("sample_child.py").write_text(SAMPLE)
    # A child does not search its working folder for modules.
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    communicator = single_rank()
    child = Child("sample_child", "sample 0", 20, communicator, 1)
    try:
        assert child.answer() is None
        assert child.ask("add", 3) == 23
        with pytest.raises(LabkitError, match="sample 0: ZeroDivisionError"):
            child.ask("divide", 0)
        assert child.ask("threads") == "1"
        with pytest.raises(LabkitError, match="sample 0 ended early: last words"):
            child.ask("leave")
        assert child.ended
        child.close()
    finally:
        communicator.close()


def test_outside_of_a_job_of_slurms_there_are_no_hosts_to_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    for words, said in (
        (["--slurm"], "works only in a Slurm job"),
        (["--slurm", "a"], "give either host names"),
        ([], "give either host names"),
    ):
        refused = CliRunner().invoke(app, ["tf-config", *words])
        assert (refused.exit_code, said in refused.output) == (2, True), refused.output
