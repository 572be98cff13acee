"""Test the campaign of forecasts: forecasts never change, and unsteady settings do not count."""

from __future__ import annotations

import os
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import house
import pytest
import sample_calibrations
from click.testing import CliRunner

from labkit.bench.calibration_runs.measure import FULL, QUICK
from labkit.bench.calibration_runs.message_times import LINK
from labkit.common.errors import LabkitError
from labkit.forecast import Calibration, model_of
from tests.acceptance.__main__ import campaigns
from tests.acceptance.forecasts import predictions
from tests.acceptance.forecasts.campaign import measure
from tests.acceptance.forecasts.comparison import compared, summary, verify, worst
from tests.acceptance.forecasts.predictions import seal
from tests.acceptance.forecasts.settings import BATCH, BATCHES, ROWS, WAYS, calibrated, settings
from tests.acceptance.repository import ROOT


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


def test_what_is_on_two_hosts_stands_apart() -> None:
    there = foreseen(0) | {"case": "small, ring, 4 ranks, 160 rows, two hosts"}
    (row,) = compared([there, measured(there, 10.0, oversubscribed=True)])
    assert row["group"] == "two hosts"


def test_there_are_enough_settings_and_no_two_are_alike() -> None:
    every = settings()
    assert len({(each.experiment.hash8, str(each.hosts)) for each in every}) == len(every) == 76
    ranks = Counter(each.experiment.workers for each in every if each.hosts is None)
    assert ranks == {1: 2, 2: 64, 3: 4, 4: 4}
    assert settings("alone") == [each for each in every if each.experiment.workers == 1]
    assert {each.experiment.batch_size for each in settings("2 ranks")} == {*BATCHES}


def test_no_setting_is_on_a_network_or_of_the_rows_of_the_calibration() -> None:
    every = settings()
    networks = {getattr(each.network, "name", None) for each in every}
    assert not networks & {LINK, *(each.name for each in (*FULL.networks, *QUICK.networks))}
    assert not {each.experiment.batch_size // each.experiment.workers for each in every} & {*ROWS}
    assert BATCH not in {each.experiment.batch_size for each in every}


def test_all_that_is_asked_is_calibrated() -> None:
    known = calibrated(settings())
    asked = {(str(each.experiment.strategy), each.experiment.workers) for each in settings()}
    assert {(str(each.strategy), each.workers) for each in known} == asked
    assert {(each.batch_size, each.network) for each in known} == {(BATCH, None)}


CHOSEN = settings("small")


def calibration() -> Calibration:
    """Return a calibration with round numbers for the models and compressors of all settings."""
    lossy = {str(way): way.lossy for way in WAYS.values()}
    codecs = [each for each in lossy.values() if each is not None]
    made = sample_calibrations.calibration(*codecs, together=(1, 2, 3, 4))
    names = {str(own): own for own in (model_of(each.experiment) for each in settings())}
    models = [made.models[0].model_copy(update={"model": own}) for own in names.values()]
    return made.model_copy(update={"models": tuple(models)})


def test_all_forecasts_are_written_before_anything_runs(tmp_path: Path) -> None:
    known = calibration()
    first = [*islice(measure(CHOSEN, 1, [], known), len(CHOSEN))]
    assert {row["what"] for row in first} == {"forecast"}
    assert {row["calibration"] for row in first} == {known.hash8}
    assert verify(first) == []
    rest = [*islice(measure(CHOSEN, 1, first[:30], known), len(CHOSEN) - 30)]
    assert first[:30] + rest == first  # the campaign was interrupted after 30 forecasts
    # There is no file of rows beside the calibration, so these forecasts must come from the
    # calibration.
    known.save(tmp_path / "rows.calibration.json")
    kept = predictions.known(CHOSEN, None, tmp_path / "rows.jsonl")
    assert [*predictions.forecasts(CHOSEN, kept)] == first


def test_without_a_testbed_settings_on_two_hosts_are_skipped_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    apart = settings("two hosts")
    rows = [*measure(apart, 3, [], calibration())]
    assert [row["what"] for row in rows] == ["forecast", "forecast", "skipped", "skipped"]
    assert all("a testbed needs" in str(row["reason"]) for row in rows[2:])
    assert [*measure(apart, 3, rows, calibration())] == []


def test_what_forecasts_knows_nothing_of_what_measures() -> None:
    own = "tests.acceptance.forecasts."
    arrows = house.arrows(ROOT / "tests")
    reached, edge = set(), {own + "predictions"}
    while edge:
        reached |= edge
        edge = {each.imported for each in arrows if each.importer in edge} - reached
    assert own + "settings" in reached
    assert not {own + "campaign", own + "comparison"} & reached


@pytest.mark.parametrize("written", [len(CHOSEN), 3])
def test_rows_of_other_settings_or_another_calibration_are_refused(written: int) -> None:
    known = calibration()
    rows = [*islice(predictions.forecasts(CHOSEN, known), written)]  # rows of the original settings
    with pytest.raises(LabkitError, match="of other settings; give a new one"):
        next(measure(CHOSEN[1:], 1, rows, known))
    other = calibration().model_copy(update={"made": "later"})
    with pytest.raises(LabkitError, match="of another calibration; give it"):
        next(measure(CHOSEN, 1, rows, other))


def test_the_command_says_which_settings_there_are() -> None:
    done = CliRunner().invoke(campaigns, ["forecasts", "--only", "9 ranks"])
    assert done.exit_code == 2
    assert "only='9 ranks' is in no case; there are: small, ring, 2 ranks" in done.output
