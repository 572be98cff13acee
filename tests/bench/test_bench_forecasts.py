"""`labkit bench forecasts`: what is written first stays as it is, and what counts is told apart."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.bench.calibrating.messages import LINK
from labkit.bench.forecasts import BATCHES, compared, seal, settings, summary, verify, worst


def foreseen(number: int, predicted: float = 10.0) -> dict[str, Any]:
    row: dict[str, Any] = {
        "what": "forecast",
        "case": "a way",
        "network": None,
        "workers": 2,
        "number": number,
    }
    row |= {"predicted_ms": predicted, "low_ms": 0.9 * predicted, "high_ms": 1.1 * predicted}
    return row | {"seal": seal(row)}


def measured(forecast: dict[str, Any], ms: float, **more: Any) -> dict[str, Any]:
    row = {"what": "measured", "number": forecast["number"], "of": forecast["seal"]}
    return row | {"batch_ms": ms, "oversubscribed": False} | more


FIRST, SECOND = foreseen(0), foreseen(1, 20.0)


def test_forecasts_that_come_first_and_stay_are_held_against() -> None:
    assert verify([FIRST, SECOND, measured(FIRST, 9.0), measured(SECOND, 30.0)]) == []
    assert verify([FIRST]) == []


def test_what_was_written_late_or_changed_is_found() -> None:
    late = [FIRST, measured(FIRST, 9.0), SECOND]
    assert verify(late) == ["forecast 1 was written behind a measurement"]
    better = FIRST | {"predicted_ms": 9.0}
    assert verify([better, measured(FIRST, 9.0)]) == ["forecast 0 is not what was sealed"]
    again = foreseen(0, 9.0)
    (wrong,) = verify([again, measured(FIRST, 9.0)])
    assert wrong == "measurement 0 is held against another forecast"


def test_errors_are_of_what_is_calm() -> None:
    loud, shared = foreseen(2), foreseen(3)
    rows = [FIRST, SECOND, loud, shared]
    rows += [measured(FIRST, ms) for ms in (9.8, 10.0, 10.2)]
    rows += [measured(SECOND, ms) for ms in (25.0, 25.0, 25.0)]
    rows += [measured(loud, ms) for ms in (10.0, 12.0)]
    rows += [measured(shared, 10.0, oversubscribed=True)]
    assert [row["group"] for row in compared(rows)] == [
        *("calm", "calm"),
        *("unsteady", "oversubscribed"),
    ]
    calm = summary(rows)[0]
    assert (calm["settings"], calm["held"]) == (2, 0.5)
    assert calm["error_median"] == pytest.approx(0.1)
    assert calm["error_bias"] == pytest.approx(-0.1)
    assert [row["number"] for row in worst(rows)] == [1, 0]


def test_there_are_sixty_settings_and_no_two_are_alike() -> None:
    asked = [experiment.hash8 for _, experiment in settings()]
    assert len(asked) == len(set(asked)) >= 60


def test_no_setting_is_on_the_network_or_of_the_rows_of_the_calibration() -> None:
    asked = [experiment for _, experiment in settings()]
    assert LINK not in {getattr(each.network, "name", None) for each in asked}
    assert not {each.batch_size // each.workers for each in asked} & {*BATCHES}
