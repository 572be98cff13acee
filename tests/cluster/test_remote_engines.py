"""Test the connection files with which engines of another machine are used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit.cluster.engines import RemoteEngines
from labkit.cluster.start import Start
from labkit.common.errors import InvalidInput
from labkit.common.files import fingerprint
from labkit.hosts.host_list import Host


@pytest.fixture
def file() -> Path:
    content = {
        "name": "lab",
        "how": Start(2, launcher="hosts", hosts=(Host("a", 1), Host("b", 1))).to_json(),
        "state": {},
        "connection": {"curve_serverkey": "key"},
        "fingerprint": fingerprint(),
    }
    path = Path("attach.json")
    path.touch(0o600)
    path.write_text(json.dumps(content))
    return path


def test_a_file_of_this_user_is_used(file: Path) -> None:
    assert RemoteEngines(file).name == "lab"


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(
        InvalidInput, match=r"other users may write attach.*: chmod 600 attach\.json"
    ):
        RemoteEngines(file)
