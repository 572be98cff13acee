"""Test which address of this machine hosts can reach, and whether a process listens there."""

from __future__ import annotations

import socket

import pytest

from labkit.common.errors import LabkitError
from labkit.hosts.host_list import is_reachable, local_address


def test_who_is_on_this_machine_reaches_it_by_loopback_and_unknown_names_are_left_out() -> None:
    assert local_address(["127.0.0.1", "127.0.0.2", "no such host"]) == "127.0.0.1"


def test_without_any_way_there_is_no_address() -> None:
    with pytest.raises(LabkitError, match="this machine has no route to no such host"):
        local_address(["no such host"])


def test_different_addresses_want_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.hosts.host_list._source", {"a": "10.0.0.1", "b": "10.1.0.1"}.get)
    with pytest.raises(LabkitError, match=r"a by 10\.0\.0\.1, b by 10\.1\.0\.1.*interface="):
        local_address(["a", "b"])


def test_somebody_answers_where_one_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
        assert is_reachable(place, 5)
    assert not is_reachable(place, 5)
