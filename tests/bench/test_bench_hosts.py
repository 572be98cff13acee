"""`labkit bench hosts`: what it refuses, and one short round of each part on a testbed."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from labkit.bench.hosts import PARTS, emulated, levels
from labkit.cli.app import app
from labkit.common.errors import LabkitError
from labkit.hosts.means import require


@pytest.fixture
def means() -> None:
    try:
        require(slurm=False)
    except LabkitError as error:
        pytest.skip(str(error))


def test_a_part_that_is_not_there_is_answered_with_those_that_are() -> None:
    done = CliRunner().invoke(app, ["bench", "hosts", "--what", "levls"])
    assert done.exit_code != 0
    assert f"what='levls' is not known; allowed: {', '.join(PARTS)}" in str(done.output)


@pytest.mark.slow
def test_levels_are_held_to_the_ring_and_counted_as_the_link_counts(means: None) -> None:
    ring, two_level = levels.measure(1, ["ring", "two_level"], 2**20)
    assert (ring["correct"], two_level["correct"]) == (True, True)
    assert ring["ratio_to_ring"] == 1
    assert float(two_level["predicted_ratio"] or 0) < 0.75
    for row, volume in ((ring, 1.5), (two_level, 1.0)):
        assert row["link_bytes"] == pytest.approx(volume * 2**20, rel=0.01)
        assert float(row["link_bytes"]) < float(row["sent"] or 0) < 1.2 * float(row["link_bytes"])


@pytest.mark.slow
def test_the_emulation_is_held_to_two_hosts(means: None) -> None:
    (row,) = emulated.measure(1, ["ring"], [2**16])
    assert (row["bench"], row["what"], row["correct"]) == ("hosts", "emulated", True)
    assert float(row["error_min"] or 0) <= float(row["error"] or 0) <= float(row["error_max"] or 0)
