"""Test that labkit's flows end when SimGrid's do, if SimGrid is installed."""

from __future__ import annotations

import pytest

from labkit.common.errors import LabkitError
from tests.acceptance.simgrid_comparison import compare


@pytest.mark.heavy
def test_flows_end_when_simgrid_says_so() -> None:
    try:
        rows = compare()
    except LabkitError as error:
        pytest.skip(str(error))
    assert len({row["case"].split(":")[0] for row in rows}) >= 16
    for row in rows:
        assert row["labkit"] == pytest.approx(row["by_hand"], rel=1e-9)
        assert row["error"] == pytest.approx(0, abs=0.03)
