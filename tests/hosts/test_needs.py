"""Test what a testbed requires of a machine, and the message where a requirement is missing."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from labkit.common.errors import LabkitError
from labkit.hosts import testbed_state
from labkit.hosts.testbed import testbed as start_testbed


def has_all_but(monkeypatch: pytest.MonkeyPatch, *absent: str) -> None:
    def which(name: str, **_: object) -> str | None:
        return None if name in absent else f"/bin/{name}"

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", which)
    monkeypatch.setattr(testbed_state, "_has_pmix", lambda: testbed_state.PMIX not in absent)
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def test_another_system_is_named_with_what_to_use_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LabkitError, match=r"is darwin; use a Linux machine, a virtual machine"):
        start_testbed()


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        (
            ("ip", "tc"),
            r"needs ip, tc, which .* apt-get install iproute2; or start a testbed without Slurm",
        ),
        (("nsenter",), r"needs nsenter, which .* apt-get install util-linux"),
        (("slurmd", "srun"), r"needs slurmd, srun, .* apt-get install slurm-wlm; .*--no-slurm"),
        (("libpmix.so.2",), r"needs libpmix.so.2, which .* apt-get install libpmix2"),
    ],
)
def test_what_is_missing_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, absent: tuple[str, ...], message: str
) -> None:
    has_all_but(monkeypatch, *absent)
    with pytest.raises(LabkitError, match=message):
        start_testbed()


def test_without_slurm_nothing_of_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    has_all_but(monkeypatch, *testbed_state.SLURM, testbed_state.PMIX)
    testbed_state.require(slurm=False)
    has_all_but(monkeypatch, "tc")
    with pytest.raises(LabkitError, match=r"apt-get install iproute2$"):
        testbed_state.require(slurm=False)


def test_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    has_all_but(monkeypatch)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabkitError, match=r"needs root .* user 1000; start it with sudo"):
        start_testbed()
