"""Test numbers on axes and in sentences: units and three significant digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from labkit.common.units import amounts_axis, bytes_axis, bytes_text, seconds_axis, seconds_text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(1, "1 B"), (1023, "1023 B"), (1024, "1 KiB"), (1.5 * 2**20, "1.5 MiB"), (2**40, "1 TiB")],
)
def test_bytes(nbytes: float, text: str) -> None:
    assert bytes_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (2e-10, "0.2 ns"), (12.34e-6, "12.3 µs"), (0.9999, "1 s"), (1234, "1234 s")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_an_axis_has_a_handful_of_round_ticks() -> None:
    assert bytes_axis(64, 2**26)["ticktext"] == [
        "64 B",
        "1 KiB",
        "16 KiB",
        "256 KiB",
        "4 MiB",
        "64 MiB",
    ]
    assert seconds_axis(2e-5, 3e-4)["ticktext"][:4] == ["10 µs", "20 µs", "50 µs", "100 µs"]
    assert len(seconds_axis(1e-9, 1e3)["ticktext"]) <= 7


@pytest.mark.parametrize("axis", [bytes_axis, seconds_axis, amounts_axis])
@pytest.mark.parametrize(
    ("low", "high"),
    [(1e-300, 1e300), (5e-324, 1.0), (1.0, 1.7e308), (1.0, 1 + 1e-9), (1e300, 2e300), (3.0, 3.0)],
)
def test_an_axis_of_any_ends_has_few_ticks_and_decades(
    axis: Callable[[float, float], dict[str, Any]], low: float, high: float
) -> None:
    made = axis(low, high)
    assert len(made["tickvals"]) <= 30
    assert all(0 <= tick < float("inf") for tick in made["tickvals"])
    if "range" in made:
        assert made["range"][1] - made["range"][0] <= 30
