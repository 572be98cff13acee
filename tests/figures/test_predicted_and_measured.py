"""Compare forecast and measured times: errors are reproducible; wrong results have no time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from labkit.common.errors import InvalidInput
from labkit.figures import measurements, predicted_and_measured, summarize_prediction
from labkit.network import Network
from labkit.simulate import calibrate, closed_form

SIZES = (4096, 2**20, 2**22)


def rows(algorithm: str, factor: float = 1.0, **changes: Any) -> list[dict[str, Any]]:
    """Return rows of a benchmark whose times are `factor` times the closed form on 1GbE."""
    found = []
    for nbytes in SIZES:
        milliseconds = 1e3 * factor * closed_form(algorithm, 2, nbytes, Network.named("1GbE"))
        row = {"algorithm": algorithm, "bytes": nbytes, "workers": 2, "network": "1GbE"}
        times = {"median_ms": milliseconds, "min_ms": 0.95 * milliseconds}
        found.append(row | times | {"p90_ms": 1.25 * milliseconds, "correct": True} | changes)
    return found


def test_the_error_is_predicted_over_measured_minus_one() -> None:
    table, _ = predicted_and_measured(rows("ring", 1.25) + rows("master_worker", 0.8))
    assert table["error"].to_numpy() == pytest.approx([-0.2] * 3 + [0.25] * 3)
    assert table["predicted_ms"].to_numpy() == pytest.approx(table["closed_form_ms"].to_numpy())
    assert table["measured_ms"].iloc[0] == rows("ring", 1.25)[0]["median_ms"]


def test_the_spread_of_the_measured_is_drawn() -> None:
    measured = rows("ring", 1.0)
    _, figure = predicted_and_measured(measured)
    (marks,) = [trace for trace in figure.data if trace.mode == "markers"]
    assert marks.error_y.array[0] == pytest.approx(0.25 * measured[0]["median_ms"] / 1e3)
    assert marks.error_y.arrayminus[0] == pytest.approx(0.05 * measured[0]["median_ms"] / 1e3)
    errors = [trace for trace in figure.data if trace.error_y.array is not None][-1]
    assert errors.y[0] == pytest.approx(0, abs=1e-9)
    assert errors.error_y.array[0] == pytest.approx(100 * (1 / 0.95 - 1))
    assert errors.error_y.arrayminus[0] == pytest.approx(100 * (1 - 1 / 1.25))


def test_the_prediction_between_the_sizes_is_simulated_too() -> None:
    _, figure = predicted_and_measured(rows("ring"))
    line = next(trace for trace in figure.data if trace.mode == "lines" and len(trace.x) > 9)
    assert line.x[0] == SIZES[0]
    middle = [closed_form("ring", 2, n, Network.named("1GbE")) for n in line.x]
    assert np.asarray(line.y) == pytest.approx(middle)


def test_titles_say_clock_network_and_where_the_prediction_is_from() -> None:
    _, figure = predicted_and_measured(rows("ring"))
    assert figure.layout.title.text == "Predicted and measured, 2 ranks · wall clock · network 1GbE"
    assert "simulation on 1GbE" in figure.layout.title.subtitle.text
    assert "0.0% (over 3 sizes)" in figure.alt


def test_a_fit_of_the_rows_predicts_them() -> None:
    own = [row | {"network": None} for name in ("ring", "butterfly") for row in rows(name)]
    fit = calibrate(measurements(own))
    table, figure = predicted_and_measured(own, fit)
    assert table["error"].abs().max() < 1e-6
    assert "fit of 6 measurements: α 50 µs, β 8 ns a byte" in figure.layout.title.subtitle.text
    assert "network not emulated" in figure.layout.title.text


def test_what_has_no_schedule_is_measured_only() -> None:
    library = [row | {"algorithm": "mpi"} for row in rows("ring")]
    table, figure = predicted_and_measured(library + rows("ring"))
    assert table["predicted_ms"].isna().tolist() == [True] * 3 + [False] * 3
    assert "**mpi**: not predicted" in summarize_prediction(table)
    assert [trace.name for trace in figure.data if trace.showlegend] == ["mpi", "ring"]


def test_a_wrong_result_has_no_time() -> None:
    table, figure = predicted_and_measured(rows("ring", correct=False) + rows("tree"))
    assert table["measured_ms"].isna().tolist() == [True] * 3 + [False] * 3
    assert "3 of 3 rows have wrong sums" in summarize_prediction(table)
    assert "3 rows with wrong sums are omitted" in figure.layout.title.subtitle.text
    with pytest.raises(InvalidInput, match="all rows have wrong sums"):
        predicted_and_measured(rows("ring", correct=False))


def test_the_reading_judges_by_the_spread_and_weighs_the_master() -> None:
    table, _ = predicted_and_measured(rows("master_worker", 1.5) + rows("ring", 1.0))
    said = summarize_prediction(table)
    assert "**master_worker**: median error 33.3% (over 3 sizes)" in said
    assert "0 of 3 predictions are within the spread" in said
    assert "3 of 3 predictions are within the spread" in said
    assert "At 4 MiB, master_worker takes 3.00 times as long as ring" in said


def test_without_a_network_to_predict_with_it_asks() -> None:
    with pytest.raises(InvalidInput, match="give the network for the prediction"):
        predicted_and_measured([row | {"network": None} for row in rows("ring")])
    with pytest.raises(InvalidInput, match="no rows to compare"):
        predicted_and_measured([])
