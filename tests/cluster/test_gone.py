"""Whose failure means that a host is gone, from which no answer comes."""

from __future__ import annotations

import pytest

from labkit.cluster.calls import Failure, is_gone

SILENT = "host b with rank 2, 3 has not been heard for 8 s: the link to it, or the host, is gone"


@pytest.mark.parametrize(
    ("name", "value", "gone"),
    [
        ("HostSilent", SILENT, True),
        ("RankFailed", f"rank 0 failed: HostSilent: {SILENT}", True),
        ("RankFailed", "rank 0 failed: ValueError: HostSilent", False),
        ("ValueError", "a host", False),
    ],
)
def test_who_noticed_and_who_repeats_it_both_say_so(name: str, value: str, gone: bool) -> None:
    assert is_gone(Failure(name, value, "")) is gone
