"""Test that an error about full shared memory says how much is missing, and where."""

from __future__ import annotations

from pathlib import Path

from labkit.communicator.shared_memory import no_room


def test_room_is_told_only_where_it_is_missing(tmp_path: Path) -> None:
    assert no_room(1, tmp_path) == ""
    assert no_room(2**60, tmp_path / "absent") == ""
    assert no_room(2**60, tmp_path).startswith("ranks need 1048576 TiB of shared memory, but /")
    assert no_room(2**60, tmp_path).endswith("# docker run --shm-size=2g")
