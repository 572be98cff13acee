"""Attack real commands: each must end, name the cause, leave nothing, and allow a next run."""

from __future__ import annotations

import pytest

from labkit.common.errors import InvalidInput
from tests.acceptance.attack import measure

SHORT = ["controller killed", "kernel killed"]


@pytest.mark.slow
@pytest.mark.timeout(900)  # time for a start, an attack, an end and another start
@pytest.mark.parametrize("name", SHORT)
def test_an_attack_is_survived(name: str) -> None:
    (row,) = measure([name], times=1, seed=0)
    assert (row["tried"], row["survived"], row["wrong"]) == (1, 1, "")


def test_an_attack_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidInput, match=r"attack='rain' is not known .*Ctrl-C in training"):
        list(measure(["rain"], times=1, seed=0))
