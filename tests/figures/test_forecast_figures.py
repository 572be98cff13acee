"""Test the figures and summaries of forecasts; the forecasts are written by the tests."""

from __future__ import annotations

from typing import Any

import pytest
from sample_calibrations import calibration, experiment

import labkit as lk
from labkit import figures
from labkit.common.errors import InvalidInput
from labkit.figures.forecasts.winners import winners_table
from labkit.forecast import Calibration, CodecCost, MapPoint, Provenance, Spread, Study
from labkit.network import Network

STUDY = Study(
    experiment(strategy=lk.AllReduce(algorithm="ring"), workers=1),
    calibration(),
    Network(latency=1e-5, bandwidth=1e9),
)
AHEAD = {"ring": [STUDY.at(n) for n in (1, 2, 64)]}
PLACES = [
    MapPoint(1e-5, 2, 1e8, {"usual": 1.0, "less": 0.5}),
    MapPoint(1e-5, 2, 1e10, {"usual": 1.0, "less": 0.97}),
    MapPoint(1e-3, 2, 1e8, {"usual": 1.0, "less": 2.0}),
    MapPoint(1e-3, 2, 1e10, {"usual": 1.0, "less": 1.5}),
]


def test_the_curve_says_where_half_of_the_efficiency_is_gone() -> None:
    table = figures.scaling_table(AHEAD)
    assert list(table["workers"]) == [1, 2, 64]
    assert (table["efficiency_low"] <= table["efficiency"]).all()
    above = max(each.workers for each in AHEAD["ring"] if each.weak_efficiency >= 0.5)
    said = figures.summarize_scaling(AHEAD)
    assert f"**ring** keeps an efficiency of at least one half up to: {above} worker" in said
    figure = figures.forecast_scaling(AHEAD)
    assert figure.layout.title.text.startswith("Scaling · forecast")
    assert figure.layout.xaxis.type == "log"


def test_runs_without_one_of_one_worker_have_no_efficiency() -> None:
    with pytest.raises(InvalidInput, match="no run has one worker"):
        figures.scaling_table(AHEAD, {"ring": []})


def test_less_than_five_per_cent_is_no_gain() -> None:
    said = figures.summarize_winners(PLACES, "usual")
    assert "saves at least 5% of the time in: 1 of 4 places" in said
    assert (
        "**less** is fastest in: 1 of them; largest gain at 2 workers, 800 Mb/s, 10 µs: 50%" in said
    )
    with pytest.raises(InvalidInput, match="usual='none' is not on this map; allowed: usual, less"):
        figures.summarize_winners(PLACES, "none")


def test_the_map_has_a_frame_a_latency_and_colours_its_cells_by_who_is_fastest() -> None:
    figure = figures.winners_map(PLACES, "usual", "a model")
    assert [frame.name for frame in figure.frames] == ["10 µs", "1 ms"]
    cells = [[list(row) for row in frame.data[0].z] for frame in figure.frames]
    assert cells == [[[1, 0]], [[0, 0]]]
    assert figure.frames[0].data[0].text[0][0] == "50%"
    assert "1 of 4 places" in figure.alt


def reached(less: list[int], usual: list[int]) -> list[MapPoint]:
    return [each.to_target({"usual": usual, "less": less}) for each in PLACES]


def test_no_winner_is_named_where_bands_of_seeds_overlap() -> None:
    # With half the time per step, the slowest seed of "less" needs 0.5 × 180 s; the quickest seed
    # of "usual" needs 90 s, too.
    places = reached([90, 100, 180], [90, 100, 110])
    table = winners_table(places, "usual")
    assert list(table["winner"]) == ["not distinguishable"] * 2 + ["usual"] * 2
    assert list(table["gain"]) == [0.0] * 4
    figure = figures.winners_map(places, "usual", "a model")
    cells = figure.frames[0].data[0]
    assert [list(row) for row in cells.z] == [[2, 2]]
    assert cells.text[0][0] == "≈"
    assert "not distinguishable: usual 100 s (90 s to 110 s), less" in cells.customdata[0][0]
    assert "not distinguishable" in [trace.name for trace in figure.data]
    assert "its slowest seed is faster than the fastest seed of every other strategy" in figure.alt
    assert (
        "not distinguishable, because their bands overlap or the saving is small, in: 2 of 4"
        in figure.alt
    )


def test_a_way_that_is_surely_faster_wins_and_says_so() -> None:
    places = reached([90, 100, 170], [90, 100, 110])
    table = winners_table(places, "usual")
    assert list(table["winner"]) == ["less", "not distinguishable", "usual", "usual"]
    assert table["gain"][0] == pytest.approx(0.5)
    said = figures.summarize_break_even(PLACES, "usual", ["less"], {}, {}, places)
    assert (
        "To reach the target, with any seed, a strategy other than **usual** saves at least 5%"
    ) in said
    assert (
        "not distinguishable, because their bands overlap or the saving is small, in: 1 of 4 "
        "places" in said
    )


def test_one_seed_tells_nobody_apart() -> None:
    places = reached([1], [100, 110])
    assert set(winners_table(places, "usual")["winner"]) == {"not distinguishable"}
    hover = winners_table(places, "usual")["hover"][0]
    assert "(only one seed, so no band)" in hover


def test_the_null_hypothesis_comes_first() -> None:
    first = figures.summarize_break_even(PLACES, "usual", ["less"], {}, {}).split("\n")[0]
    assert first.endswith("save at least 5% of the time of **usual**: 0 of 1.")


def rows() -> list[dict[str, Any]]:
    near = {"predicted_ms": 10.0, "low_ms": 9.0, "high_ms": 11.0, "measured_ms": 10.0}
    near |= {"least_ms": 9.9, "most_ms": 10.1, "error": 0.0, "group": "calm", "network": "1GbE"}
    far = near | {"predicted_ms": 15.0, "error": 0.5, "case": "far"}
    return [near | {"case": "near"}, far, far | {"case": "loud", "group": "unsteady"}]


def test_the_diagonal_names_those_that_are_furthest_off() -> None:
    said = figures.summarize_diagonal(rows())
    assert "**calm**, median forecast error of 2 settings: 25.0%" in said
    furthest = [line for line in said.split("\n") if "Largest error" in line]
    assert ["far on 1GbE" in furthest[0], "near on 1GbE" in furthest[1]] == [True, True]
    assert not any("loud" in line for line in furthest)
    assert figures.forecast_diagonal(rows(), "abc").layout.title.text.startswith("Forecasts")


def test_tables_of_sources_and_codecs() -> None:
    assert list(figures.sources_table([Provenance("a", "b")]).iloc[0]) == ["a", "b"]
    spread = Spread(median=1e-3, low=1e-3, high=1e-3)
    codec = CodecCost(
        compressor={"name": "ErrorFeedback", "inner": {"name": "TopK"}},
        nbytes=4000, encode=spread, decode=spread, payload=400,
    )  # fmt: skip
    known = Calibration(made="2026-01-01", machine={}, codecs=(codec,))
    row = figures.codec_table(known).iloc[0]
    assert (row["compressor"], row["ratio"], row["encode, ms"]) == ("ErrorFeedback(TopK)", 10, 1.0)


def test_answers_say_workers_servers_and_slowness() -> None:
    said = figures.summarize_study(
        STUDY, {"ring": lk.AllReduce(algorithm="ring")}, 0.5, 2.0, {4: 2}, {}
    )
    last = STUDY.workers_until(0.5)
    assert f"**ring** keeps an efficiency of 50%: up to {last} worker" in said
    assert "4 workers with parameter servers: 2 servers within 5 % of the fastest" in said
    assert "Increase of the step time if one of 2 ranks computes 2 times as long" in said
