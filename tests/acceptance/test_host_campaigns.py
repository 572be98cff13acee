"""Test the campaign on two hosts: its errors, and a short measurement of each part."""

from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner

from labkit.common.errors import LabkitError
from labkit.hosts.testbed_state import require
from tests.acceptance.__main__ import campaigns
from tests.acceptance.hosts import allreduce
from tests.acceptance.hosts.command import PARTS, trouble
from tests.acceptance.hosts.starts import row_of


@pytest.fixture
def means() -> None:
    try:
        require(slurm=False)
    except LabkitError as error:
        pytest.skip(str(error))


def test_a_part_that_is_not_there_is_answered_with_those_that_are() -> None:
    done = CliRunner().invoke(campaigns, ["hosts", "--what", "levls"])
    assert done.exit_code != 0
    assert f"what='levls' is not known; allowed: {', '.join(PARTS)}" in str(done.output)


def test_starts_that_do_not_come_are_a_row_that_fails_the_command() -> None:
    none = row_of("srun", [], 2)
    assert (none["started"], none["left"], none["median_ms"]) == (0, 0, None)
    assert trouble(none) == "2 of 2 did not start"
    left = row_of("srun", [(1.0, 0.5), (np.nan, np.inf)], 2)
    assert (left["median_ms"], left["end_ms"]) == (1000, 500)
    assert trouble(left) == "1 of 2 did not start, 1 left something"
    assert trouble(row_of("srun", [(1.0, 0.5)], 1)) == ""


@pytest.mark.slow
def test_levels_are_held_to_the_ring_and_counted_as_the_link_counts(means: None) -> None:
    ring, two_level = allreduce.measure_levels(1, ["ring", "two_level"], 2**20)
    assert (ring["correct"], two_level["correct"]) == (True, True)
    assert ring["ratio_to_ring"] == 1
    assert float(two_level["predicted_ratio"] or 0) < 0.75
    for row, volume in ((ring, 1.5), (two_level, 1.0)):
        assert row["link_bytes"] == pytest.approx(volume * 2**20, rel=0.01)
        assert float(row["link_bytes"]) < float(row["sent"] or 0) < 1.2 * float(row["link_bytes"])


@pytest.mark.slow
def test_the_emulation_is_held_to_two_hosts(means: None) -> None:
    (row,) = allreduce.measure_emulation(1, ["ring"], [2**16])
    assert (row["bench"], row["what"], row["correct"]) == ("hosts", "emulated", True)
    real, pretended = float(row["median_ms"] or 0), float(row["emulated_ms"] or 0)
    # 64 KiB take more than 0.5 ms at 1 Gb/s, on the real link and on the emulated link.
    assert min(real, pretended) > 0.5
    assert row["error"] == pytest.approx(pretended / real - 1)
