"""Test that other frameworks run in a private network, unless a user trusts the machine's one."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from labkit import LabkitError
from labkit.common.machine import TRUSTED
from labkit.frameworks.namespaces import isolate, private_network
from labkit.frameworks.tcp_counters import connections, open_socket

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has namespaces")
SERVER = """
import socket
with socket.create_server(("0.0.0.0", 0)) as server:
    print(server.getsockname()[1], flush=True)
    there, _ = server.accept()
    there.sendall(bytes(321))
    input()
"""
CLIENT = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as there:
    print(len(there.recv(321, socket.MSG_WAITALL)), flush=True)
    input()
"""


def started(words: list[str], *command: str) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([*words, sys.executable, "-c", *command], text=True, **pipes)


@LINUX
def test_who_is_inside_meets_and_who_is_outside_reaches_nobody() -> None:
    with private_network("a server") as words, started(words, SERVER) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port)))
        with started(words, CLIENT, port) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "321\n"
            # The kernel counts the bytes sent inside, and the test reads the counts from outside.
            sent = {end.port: end.sent for end in connections(open_socket(words))}
            assert 321 <= sent[int(port)] <= 322  # the handshake counts as one byte
            client.communicate("\n")
        server.communicate("\n")


@LINUX
def test_one_command_has_a_network_to_itself() -> None:
    told = subprocess.run([*isolate("it"), "cat", "/proc/net/dev"], capture_output=True, text=True)
    assert [line.split(":")[0].strip() for line in told.stdout.splitlines()[2:]] == ["lo"]


def test_without_namespaces_it_is_refused_unless_the_network_is_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    told = r"TensorFlow's servers would listen on every interface.*give trusted_network=True or set"
    with pytest.raises(LabkitError, match=told), private_network("TensorFlow's servers"):
        pass
    with pytest.raises(LabkitError, match=told):
        isolate("TensorFlow's servers")
    with private_network("TensorFlow's servers", trusted=True) as words:
        assert words == []
    monkeypatch.setenv(TRUSTED, "1")
    assert isolate("TensorFlow's servers") == []
