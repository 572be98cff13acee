"""Test comparison figures and tables of runs, and how tables are displayed."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sample_runs import FAILED_GATE, write_run

from labkit.common.errors import InvalidInput, LabkitError
from labkit.figures import (
    compare,
    format_table,
    has_grid,
    heat_map,
    parallel_coordinates,
    pareto,
    scatter,
    summarize_comparison,
    table,
)
from labkit.figures.kit.canvas import join_points
from labkit.figures.kit.entries import MANY, entries, settings
from labkit.figures.kit.panels import number_text, scale
from labkit.figures.runs.comparison import sheets
from labkit.records.analysis.curves import smoothed
from labkit.records.analysis.scaling import scalings, seed_bands
from labkit.records.run import Run

ONE_BIT = {"name": "AllReduce", "algorithm": "ring", "compressor": {"name": "OneBit"}}


def grid(root: Path, seeds: int = 1, **changes: Any) -> list[Run]:
    """Return runs of 2 numbers of workers × 2 compressors × seeds; the second is less accurate."""
    return [
        write_run(
            root,
            workers=workers,
            seed=seed,
            step_ms=8.0 / workers + seed,
            measured={
                "test_accuracy": (0.8 if other else 0.9) + seed / 100,
                "wire_bytes_per_step": 0.0,
            }
            | changes,
            **({"strategy": ONE_BIT} if other else {}),
        )
        for workers in (1, 2)
        for other in (False, True)
        for seed in range(seeds)
    ]


def keyed(figure: Any, run: Run) -> list[Any]:
    """Return the traces that draw only this run, without the legend's entry."""
    key = entries([run])[0].key
    found = [trace for trace in figure.data if (trace.meta or {}).get("run") == key]
    return [trace for trace in found if trace.x[0] is not None]


def test_numbers_stand_in_proportion_and_few_of_them_in_slots() -> None:
    assert scale([1, 3, 2], measured=True).places == (0.0, 1.0, 0.5)
    assert scale([4, 1, 2], measured=False).places == pytest.approx((5 / 6, 1 / 6, 1 / 2))
    wide = scale([1, 10, 100], measured=True)
    assert wide.places == pytest.approx((0.0, 0.5, 1.0))  # logarithmic
    assert scale([2.0, None], measured=True).places == (0.5, None)
    words = scale(["b", None, "a", "b"], measured=False)
    assert [value for _, value in words.ticks] == [None, "b", "a"]
    assert words.places == pytest.approx((1 / 2, 1 / 6, 5 / 6, 1 / 2))


@pytest.mark.parametrize(
    ("value", "text"), [(0.12345, "0.123"), (1234, "1,234"), (45_700, "45.7k"), (2.5e6, "2.5M")]
)
def test_numbers_on_axes_are_short(value: float, text: str) -> None:
    assert number_text(value) == text


def test_parallel_coordinates_have_an_axis_for_each_difference_and_result(tmp_path: Path) -> None:
    runs = grid(tmp_path)
    figure = parallel_coordinates(runs)
    names = list(figure.layout.xaxis.ticktext)
    assert names == ["compressor", "workers", "test accuracy", "training time, s", "samples/s"]
    for run in runs:
        (line,) = keyed(figure, run)
        assert len(line.y) == len(names)
        accuracy = run.metrics["test_accuracy"]
        assert line.y[2] == pytest.approx((accuracy - 0.8) / 0.1)
    assert "compressor: OneBit, workers: 2, test accuracy: 80.0%" in figure.alt


def test_a_failed_gate_breaks_the_line_where_speeds_are(tmp_path: Path) -> None:
    bad = write_run(tmp_path, workers=4, measured={"equivalence": FAILED_GATE})
    figure = parallel_coordinates(
        [*grid(tmp_path), bad], ["workers", "test_accuracy", "samples_per_second"]
    )
    (line,) = keyed(figure, bad)
    assert line.y[0] is not None
    assert line.y[1] is not None
    assert line.y[2] is None
    assert "equivalence check failed" in figure.alt


def test_a_heat_map_finds_the_grid_and_takes_medians_of_seeds(tmp_path: Path) -> None:
    runs = grid(tmp_path, seeds=3)
    assert has_grid(runs)
    figure = heat_map(runs)
    accuracy, speed = (trace for trace in figure.data if trace.type == "heatmap")
    assert [list(row) for row in accuracy.z] == [[0.91, 0.91], [0.81, 0.81]]
    assert speed.z[0][0] == pytest.approx(256 / 9 * 1000)
    assert list(figure.layout.yaxis.ticktext) == ["no compression", "OneBit"]
    assert list(figure.layout.xaxis.ticktext) == ["1", "2"]
    dots = next(trace for trace in figure.data if (trace.meta or {}).get("points"))
    assert sorted(key for keys in dots.meta["points"] for key in keys) == sorted(
        entry.key for entry in settings(runs)
    )
    assert "compressor OneBit, workers 2: 81.0%" in figure.alt


def test_a_heat_map_can_be_turned_and_says_what_is_missing(tmp_path: Path) -> None:
    runs = grid(tmp_path)
    figure = heat_map(runs, x="compressor", y="workers", measures=["test_loss"])
    assert list(figure.layout.xaxis.ticktext) == ["no compression", "OneBit"]
    with pytest.raises(InvalidInput, match=r"'worker' \(did you mean 'workers'"):
        heat_map(runs, x="worker", y="compressor")
    with pytest.raises(InvalidInput, match="no two parameters have runs"):
        heat_map(runs[:2])
    assert not has_grid(runs[:2])
    assert not has_grid([])


def test_no_speed_of_a_failed_gate_is_in_a_cell(tmp_path: Path) -> None:
    runs = grid(tmp_path)
    runs[3] = write_run(
        tmp_path, workers=2, strategy=ONE_BIT, measured={"equivalence": FAILED_GATE}
    )
    figure = heat_map(runs)
    accuracy, speed = (trace for trace in figure.data if trace.type == "heatmap")
    assert not np.isnan(accuracy.z[1][1])
    assert np.isnan(speed.z[1][1])
    assert "check failed" in figure.alt


def test_scatter_shows_any_number_over_any_other(tmp_path: Path) -> None:
    runs = grid(tmp_path)
    figure = scatter(runs, "step_ms.median", "test_accuracy")
    (marker,) = keyed(figure, runs[2])
    assert (marker.x[0], marker.y[0]) == (4.0, 0.9)
    assert list(scatter(runs, "compressor", "test_loss").layout.xaxis.ticktext) == [
        "no compression",
        "OneBit",
    ]
    with pytest.raises(InvalidInput, match="did you mean 'test_accuracy'"):
        scatter(runs, "workers", "test_acuracy")


def test_seed_bands_span_the_seeds_of_each_number_of_workers(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path, workers=workers, seed=seed, step_ms=step)
        for workers, steps in ((1, (8.0, 8.0)), (2, (4.0, 5.0)))
        for seed, step in enumerate(steps)
    ]
    band = bands_of(runs)
    assert list(band["workers"]) == [1, 2]
    assert list(band["speedup_low"]) == pytest.approx([1, 8 / 5])
    assert list(band["speedup_high"]) == pytest.approx([1, 8 / 4])
    assert list(band["speedup"])[1] == pytest.approx((8 / 5 + 8 / 4) / 2)
    assert list(band["efficiency"])[1] == pytest.approx(50 * (8 / 5 + 8 / 4) / 2)
    assert list(band["seeds"]) == [2, 2]
    drawn = [t for t in compare(runs).data if (t.meta or {}).get("runs")]
    assert len(drawn) == 2 * 3  # speed-up and efficiency: the band's two ends, and its middle
    assert list(drawn[0].y) == pytest.approx([1, 8 / 5])
    assert list(drawn[1].y) == pytest.approx([1, 8 / 4])
    assert bands_of(runs[:2]).empty


def bands_of(runs: list[Run]) -> pd.DataFrame:
    return seed_bands(scalings({run.name: run for run in runs}))


def test_repeats_of_one_run_make_a_band_too(tmp_path: Path) -> None:
    spread = {"repeats": 2, "spread": {"step_ms.median": [4.0, 5.0]}}
    runs = [
        write_run(tmp_path, workers=1, step_ms=8.0),
        write_run(tmp_path, workers=2, step_ms=4.5, repeats=2, measured=spread),
    ]
    last = bands_of(runs).iloc[-1]
    assert (last["speedup_low"], last["speedup_high"]) == pytest.approx((8 / 5, 8 / 4))
    assert last["seeds"] == 2


def test_no_speed_up_is_told_over_other_work(tmp_path: Path) -> None:
    virtual = {"compute_time": {"seconds": 0.02, "distribution": "constant"}}
    server = {"name": "ParameterServer", "synchronous": False}
    speaks = {"wire_bytes_per_step": 40_000.0}
    runs = [
        write_run(tmp_path, workers=1, clock="virtual", virtual=virtual),
        write_run(tmp_path, workers=3, clock="virtual", batch_size=768),
        write_run(tmp_path, workers=1, strategy=server, network="wan", measured=speaks),
        write_run(tmp_path, workers=2),
    ]
    assert scalings({str(k): run for k, run in enumerate(runs)}).empty
    alone = write_run(tmp_path, workers=1, network="wan")  # one worker sends nothing over it
    found = scalings({str(k): run for k, run in enumerate([*runs, alone])})
    assert dict(zip(found["run"], found["baseline"], strict=True))["3"] == "4"


def test_points_of_many_runs_are_one_trace_that_knows_whose_they_are(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, learning_rate=1.0 + k) for k in range(MANY + 1)]
    keys = [entry.key for entry in entries(runs)]
    for figure in (pareto(runs), scatter(runs, "train_seconds", "test_accuracy")):
        points = [trace for trace in figure.data if (trace.meta or {}).get("points")]
        assert points[0].meta["points"] == [[key] for key in keys]
        assert len(points[0].x) == len(points[0].y) == len(points[0].marker.color) == len(runs)
    bars = [trace for trace in compare(runs).data if trace.type == "bar"]
    assert len(bars) == 1
    assert "lr 4" in bars[0].hovertemplate[3]


@pytest.mark.parametrize(
    ("runs", "epochs", "steps"),
    [*product([1, 3, MANY + 1], [1], [20, 1]), (120, 1, 1)],
)
def test_curves_of_one_point_are_points_that_can_be_seen(
    tmp_path: Path, runs: int, epochs: int, steps: int
) -> None:
    made = [
        write_run(tmp_path, learning_rate=1.0 + k, epochs=epochs, steps=steps) for k in range(runs)
    ]
    learning, _ = sheets(settings(made))
    for panel, points in zip(learning.rows[0], (steps, epochs), strict=True):
        lines = [t for t in panel.traces if "lines" in t["mode"] and len(t["x"]) > 1]
        marks = [trace for trace in panel.traces if "markers" in trace["mode"]]
        assert bool(lines) == (points > 1)
        if points == 1:
            assert sum(len(trace["x"]) for trace in marks) == runs
            assert all(trace["marker"]["color"] is not None for trace in marks)


def test_lines_and_points_without_a_run_are_left_as_they_are() -> None:
    line = {"x": [1, 2], "y": [3, 4], "meta": {"run": "a"}, "name": "a"}
    short = {"x": [1], "y": [3], "mode": "lines", "meta": {"run": "b"}, "name": "b"}
    front = {"x": [1], "y": [3], "name": "front"}
    assert join_points([line, short, front]) == [line, short, front]


def test_the_reading_knows_who_is_best_and_what_seeds_leave_open(tmp_path: Path) -> None:
    text = summarize_comparison(grid(tmp_path, seeds=3))
    assert (
        "12 runs that differ in compressor, workers (12 completed; 4 settings that differ in more "
        "than the seed)" in text
    )
    assert "Equivalence check: 4 passed" in text
    assert "**no compression, workers 1**, 91.00% (3 seeds, 90.00% to 92.00%)" in text
    assert "no compression, workers 2, 91.00%" in text  # equal accuracy: no run is called better
    assert "the difference exceeds the spread of the seeds" not in text
    one = summarize_comparison(grid(tmp_path / "one"))
    assert "One seed cannot separate a difference from chance in test accuracy: " in one
    assert "No difference beyond the spread of the seeds in test accuracy: **no c" in text


def test_the_reading_judges_a_clear_lead_and_names_failed_gates(tmp_path: Path) -> None:
    runs = [
        write_run(
            tmp_path, seed=seed, model=model, measured={"test_accuracy": accuracy + seed / 1e3}
        )
        for model, accuracy in (("mlp", 0.9), ("cnn", 0.5))
        for seed in range(3)
    ]
    runs.append(write_run(tmp_path, workers=4, measured={"equivalence": FAILED_GATE}))
    text = summarize_comparison(runs)
    # Different models are different tasks, so these runs are not compared with each other.
    assert (
        "Not compared, because no other run has the same model, data set, length and clock: "
        "workers 2, cnn" in text
    )
    assert "mlp on digits: " in text
    assert "no speed is shown for workers 4" in text
    clear = [
        write_run(
            tmp_path, seed=s, learning_rate=rate, measured={"test_accuracy": accuracy + s / 1e3}
        )
        for rate, accuracy in ((0.1, 0.9), (0.5, 0.5))
        for s in range(3)
    ]
    assert "the difference exceeds the spread of the seeds" in summarize_comparison(clear)


def test_modelled_seconds_are_no_rivals_of_measured_ones(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path, clock=clock, learning_rate=rate, measured={"clock": clock} | speed)
        for clock, speed in (
            ("wall", {"train_seconds": 9.0}),
            ("virtual", {"train_seconds": 1.0, "samples_per_second": 1e6}),
        )
        for rate in (0.1, 0.2)
    ]
    text = summarize_comparison(runs)
    assert "wall clock: One seed cannot separate a difference from chance in samples/s" in text
    assert "virtual clock: One seed cannot separate a difference from chance in samples/s" in text
    assert "clock virtual" not in text.partition("wall clock: ")[2].partition("virtual clock: ")[0]
    alone = summarize_comparison(runs[1:3])
    assert "no other run has the same model, data set, length and clock" in alone
    # In the figure of accuracy and seconds, runs on different clocks do not dominate each other.
    assert pareto(runs).layout.meta["alt"].count("(on the front)") == 4


def test_a_speed_up_names_its_spread_and_its_seeds_and_a_null_result_comes_first(
    tmp_path: Path,
) -> None:
    def reading(name: str, steps: list[float]) -> str:
        return summarize_comparison(
            [
                write_run(tmp_path / name, workers=workers, seed=seed, step_ms=step)
                for workers, times in ((1, [8.0] * len(steps)), (2, steps))
                for seed, step in enumerate(times)
            ]
        )

    assert (
        "Largest speed-up over one worker: **workers 2**, 1.60 (3 seeds, 1.33 to 2.00); "
        "strong scaling, efficiency 80%." in reading("clear", [4.0, 5.0, 6.0])
    )
    assert (
        "No speed-up over one worker exceeds the spread of the seeds; the largest: **workers 2**, "
        "1.14 (3 seeds, 0.89 to 1.60)" in reading("null", [5.0, 7.0, 9.0])
    )
    assert (
        "1.60 (spread 1.14 to 2.00); strong scaling, efficiency 80%; the spread is over the "
        "steps of the run's only seed" in reading("one", [5.0])
    )


def test_without_runs_each_says_what_to_do() -> None:
    for figure in (compare, pareto, parallel_coordinates, heat_map, summarize_comparison, table):
        with pytest.raises(LabkitError, match="run a notebook first"):
            figure([])


def test_regressions_are_judged_by_their_loss(tmp_path: Path) -> None:
    def runs(workers: int, *losses: float) -> list[Run]:
        return [
            write_run(
                tmp_path,
                seed=seed,
                workers=workers,
                measured={"test_accuracy": None, "test_loss": loss},
            )
            for seed, loss in enumerate(losses)
        ]

    text = summarize_comparison([*runs(1, 0.3, 0.32), *runs(2, 0.1, 0.12)])
    assert (
        "Lowest test loss: **workers 2**, 0.11 (2 seeds, 0.1 to 0.12); next workers 1, 0.31" in text
    )
    assert "every seed is lower than every seed of the next run" in text
    null = summarize_comparison([*runs(1, 0.1, 0.3), *runs(2, 0.2, 0.4)])
    assert "No difference beyond the spread of the seeds in test loss" in null
    assert "One seed cannot separate" in summarize_comparison([*runs(1, 0.1), *runs(2, 0.2)])


def test_runs_of_one_step_have_no_seconds_and_say_why(tmp_path: Path) -> None:
    measured = {"first_step_ms": 400.1, "train_seconds": 0.4001}
    runs = [write_run(tmp_path, workers=w, epochs=1, steps=1, measured=measured) for w in (1, 2)]
    assert (
        "2 runs of only one step, whose time includes TensorFlow's tracing"
        in compare(runs).layout.meta["alt"]
    )
    assert "bytes" in pareto(runs).layout.meta["alt"]
    assert " 0 s" not in pareto(runs).layout.meta["alt"]


def test_a_gap_in_the_loss_is_a_gap_at_its_place() -> None:
    values = np.linspace(2.0, 1.0, 200)
    broken = values.copy()
    broken[[50, 120]] = np.nan, np.inf
    smooth = smoothed(broken)
    assert np.flatnonzero(~np.isfinite(smooth)).tolist() == [50, 120]
    kept = np.isfinite(smooth)
    np.testing.assert_allclose(smooth[kept], smoothed(values)[kept], atol=0.02)
    assert np.isnan(smoothed(np.full(100, np.nan))).all()


def test_a_parameter_has_a_column_of_its_own_whatever_its_name(tmp_path: Path) -> None:
    shown = table([write_run(tmp_path, verify=gate) for gate in (True, False)])
    assert shown["verify"].tolist() == [True, False]
    assert shown["equivalence"].str.startswith("passed").all()


def test_accuracies_of_one_value_are_drawn_between_none_and_all(tmp_path: Path) -> None:
    low, high = pareto([write_run(tmp_path, workers=w) for w in (1, 2)]).layout.yaxis.range
    assert -0.06 <= low < high <= 1.06


ROWS = {
    "way": ["ring", "tree"],
    "step_ms": [0.123456789, 12345.678],
    "payload_bytes_per_step": [15780904.0, float("nan")],
    "messages": [24000, 3],
    "right": [True, False],
    "ratio": [1.0, None],
}


def cells(table: pd.DataFrame) -> list[str]:
    return re.findall("<td>(.*?)</td>", table._repr_html_() or "")


def test_numbers_have_four_digits_and_bytes_units() -> None:
    shown = cells(format_table(pd.DataFrame(ROWS)))
    assert shown[:6] == ["ring", "0.1235", "15 MiB", "24,000", "True", "1"]
    assert shown[6:] == ["tree", "12,346", "", "3", "False", ""]


def test_values_stay_and_what_is_made_of_it_is_shown_alike() -> None:
    given = pd.DataFrame(ROWS)
    table = format_table(given)
    pd.testing.assert_frame_equal(pd.DataFrame(table), given)
    assert table["step_ms"].iloc[0] == pytest.approx(0.123456789, abs=0)
    assert type(table.query("messages > 5")[["way", "step_ms"]]) is type(table)
    assert cells(table.head(1))[1] == "0.1235"


def test_two_columns_of_one_name_are_both_shown() -> None:
    table = format_table(pd.DataFrame([[1.23456, 2.34567]], columns=["ms", "ms"]))
    assert cells(table) == ["1.235", "2.346"]
