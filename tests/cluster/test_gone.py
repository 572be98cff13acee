"""Test from which errors labkit infers that a host is gone."""

from __future__ import annotations

import pytest

from labkit.cluster.calls import Failure, reports_lost_host

SILENT = "host b with rank 2, 3 has sent no status for 8 s: the host, or the link to it, has failed"


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
    assert reports_lost_host(Failure(name, value, "")) is gone
