"""Test the figures of compression by method, by layer and by bandwidth."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from sample_compression import TOP_K, write_method
from sample_runs import FAILED_GATE, write_run

from labkit.common.errors import LabkitError
from labkit.common.units import bits_text
from labkit.figures import (
    bandwidth,
    compression_stats,
    pareto,
    step_parts,
    summarize_compression_stats,
)
from labkit.figures.exchange.compression import group_by_method, methods
from labkit.figures.exchange.compression_stats import observations
from labkit.figures.kit.entries import entries
from labkit.network import Network
from labkit.records import store
from labkit.records.analysis.spending import MEASURES, front, spending
from labkit.records.compressors import baseline_of, method
from labkit.records.run import Run
from labkit.records.step_costs import MethodCost, prediction_errors, step_costs, winners
from labkit.records.store import write_table
from labkit.records.verdict import completed_seeds
from labkit.report import report
from labkit.simulate import closed_form

SAID_FAILED = "no speed is shown, because the equivalence check failed"


def texts(figure: Any) -> str:
    """Return all texts of a figure without tags."""
    words = [note.text for note in figure.layout.annotations]
    words += [figure.layout.title.text, figure.layout.title.subtitle.text or ""]
    return re.sub(r"<[^>]+>", " ", " ".join(words))


def markers(figure: Any) -> list[Any]:
    """Return the traces with a run's marker, without the legend's entries."""
    return [
        trace
        for trace in figure.data
        if trace.type == "scatter" and trace.mode == "markers" and trace.x[0] is not None
    ]


# --- names and baselines -------------------------------------------------------------------------


def test_a_method_is_called_as_a_notebook_writes_it(tmp_path: Path) -> None:
    nested = {"name": "ErrorFeedback", "inner": TOP_K, "decay": None}
    assert method(write_run(tmp_path)) == "no compression"
    assert method(write_method(tmp_path, compressor=nested)) == "ErrorFeedback(TopK(ratio=0.01))"


def test_runs_on_several_networks_are_one_method(tmp_path: Path) -> None:
    runs = [write_method(tmp_path, network=name) for name in ("1GbE", "100Mb")]
    runs.append(write_method(tmp_path, network="1GbE", compressor=TOP_K))
    groups = group_by_method(entries(runs))
    assert {name: len(group) for name, group in groups.items()} == {
        "no compression": 2,
        "TopK 1 %": 1,
    }


def test_methods_of_one_compressor_are_told_apart(tmp_path: Path) -> None:
    runs = [write_method(tmp_path, algorithm=name) for name in ("ring", "tree")]
    assert list(group_by_method(entries(runs))) == ["ring", "tree"]


def test_the_baseline_is_equal_but_for_compression_and_of_the_same_network(tmp_path: Path) -> None:
    run = write_method(tmp_path, compressor=TOP_K, network="1GbE")
    slow, like, other = (
        write_method(tmp_path, network="100Mb"),
        write_method(tmp_path, network="1GbE"),
        write_method(tmp_path, network="1GbE", batch_size=64),
    )
    assert baseline_of(run, [slow, other, like, run]) == like
    assert baseline_of(run, [other, slow]) == slow
    assert baseline_of(run, [other]) is None
    assert baseline_of(like, [slow]) is None


# --- where a step goes ---------------------------------------------------------------------------


def test_a_bar_stacks_to_the_measured_step(tmp_path: Path) -> None:
    run = write_method(tmp_path, compute=3, codec=1, wire=2, wait=0.5, compressor=TOP_K)
    figure = step_parts([run, write_method(tmp_path)])
    bars = {trace.name: trace.y for trace in figure.data if trace.type == "bar"}
    assert {name: y[0] for name, y in bars.items()} == pytest.approx(
        {"compute": 3, "codec": 1, "wire": 2, "wait": 0.5}
    )
    assert bars["codec"][1] == 0  # an older run has no column for the codec
    assert sum(y[0] for y in bars.values()) == pytest.approx(6.5)
    assert markers(figure)[-1].y[0] == pytest.approx(6.5)
    assert figure.layout.barmode == "stack"
    assert "wall clock · network not emulated" in texts(figure)
    assert "codec 1 ms" in figure.alt


def test_codec_seconds_are_taken_out_of_computing_however_that_was_stored(tmp_path: Path) -> None:
    costs = step_costs(write_method(tmp_path, compute=3, codec=1, compressor=TOP_K))
    assert costs is not None
    assert (costs.compute, costs.codec, costs.work) == pytest.approx((3e-3, 1e-3, 4e-3))


def test_a_failed_gate_has_no_bar_and_no_time(tmp_path: Path) -> None:
    good = write_method(tmp_path, compressor=TOP_K)
    bad = write_method(tmp_path, measured={"equivalence": FAILED_GATE})
    figure = step_parts([good, bad])
    assert all(len(trace.y) == 1 for trace in figure.data if trace.type == "bar")
    assert SAID_FAILED in texts(figure)
    assert SAID_FAILED in figure.alt
    assert SAID_FAILED in texts(step_parts([bad]))
    assert len(methods(entries([good, bad]))) == 1
    assert SAID_FAILED in texts(bandwidth([good, bad]))
    with pytest.raises(LabkitError, match="no given run allows a prediction"):
        bandwidth([bad])


# --- Pareto --------------------------------------------------------------------------------------


def test_the_front_holds_whom_nobody_beats(tmp_path: Path) -> None:
    dense = write_method(tmp_path, [0.90, 0.92], payload=40_000)
    small = write_method(tmp_path, [0.89, 0.91], payload=400, compressor=TOP_K)
    worse = write_method(tmp_path, [0.80, 0.82], payload=4000, compressor={"name": "OneBit"})
    found = spending({"dense": dense, "small": small, "worse": worse})
    assert list(front(found, ("accuracy", "bytes"))["run"]) == ["dense", "small"]
    figure = pareto([dense, small, worse])
    drawn = markers(figure)
    assert [t.marker.symbol for t in drawn[:3]] == ["circle", "circle", "circle-open"]
    (line, _) = [t for t in figure.data if t.name == "Pareto front"]
    # The number of bytes is steps after the first × ranks × bytes per step; the cheapest run comes
    # first.
    assert list(line.x) == [59 * 2 * 400, 59 * 2 * 40_000]
    assert "accuracy 90.00%, 46.1 KiB, 295 ms (on the front)" in figure.alt
    assert "accuracy × bytes × seconds" in texts(figure).lower()
    assert "network not emulated" in texts(figure)


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=8))
@settings(max_examples=40)
def test_somebody_is_always_on_the_front_and_nobody_on_it_is_beaten(
    costs: list[tuple[int, int, int]],
) -> None:
    found = pd.DataFrame(costs, columns=list(MEASURES), dtype=float)
    found = found.assign(network="1GbE", clock="wall")
    best = list(front(found, MEASURES).index)
    good = np.array(costs) * (1, -1, -1)

    def beats(one: int, other: int) -> bool:
        return bool((good[one] >= good[other]).all() and (good[one] > good[other]).any())

    every = range(len(costs))
    assert best
    assert not any(beats(one, other) for one in every for other in best)
    assert all(each in best or any(beats(other, each) for other in best) for each in every)


def test_seconds_on_another_network_are_no_rival(tmp_path: Path) -> None:
    slow = write_method(tmp_path, [0.9], wire=50, network="100Mb")
    fast = write_method(tmp_path, [0.9], wire=5, network="1GbE")
    assert list(front(spending({"slow": slow, "fast": fast}), MEASURES)["run"]) == ["slow", "fast"]
    figure = pareto([slow, fast])
    assert [list(t.y) for t in figure.data if t.name == "Pareto front"] == [[0.9] * 2, [0.9], [0.9]]
    # If all accuracies are equal, the axis shows only their neighbourhood, not the whole range.
    assert figure.layout.yaxis.range == pytest.approx((0.85, 0.95))


def test_error_bars_span_the_seeds(tmp_path: Path) -> None:
    figure = pareto([write_method(tmp_path, [0.90, 0.92, 0.97])])
    (mark, _) = markers(figure)
    assert mark.y[0] == pytest.approx(0.93)
    assert mark.y[0] + mark.error_y.array[0] == pytest.approx(0.97)
    assert mark.y[0] - mark.error_y.arrayminus[0] == pytest.approx(0.90)
    assert mark.error_x.visible is False  # all seeds send equally many bytes


def test_a_failed_gate_keeps_its_accuracy_and_bytes_but_no_seconds(tmp_path: Path) -> None:
    bad = write_method(tmp_path, measured={"equivalence": FAILED_GATE})
    figure = pareto([bad, write_method(tmp_path, compressor=TOP_K)])
    assert len(markers(figure)) == 3
    assert SAID_FAILED in texts(figure)
    assert len(markers(pareto([bad]))) == 1


def test_what_cannot_be_placed_is_said(tmp_path: Path) -> None:
    regression = write_method(tmp_path, measured={"test_accuracy": None})
    figure = pareto([regression, write_method(tmp_path, workers=1, payload=0)])
    assert "without test accuracy: " in texts(figure)
    assert "no run has both a test accuracy and bytes" in texts(figure)


# --- bandwidth -----------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["ring", "master_worker", "butterfly", "all_to_all"])
def test_an_allreduce_is_predicted_by_its_closed_form(tmp_path: Path, algorithm: str) -> None:
    from labkit.schedules import get_collective

    counts, payload = get_collective(algorithm).counts(4), 40_000
    # The numbers are means over ranks, because the master sends more than the others.
    sent, messages = (int(each.sum()) // 4 for each in (counts.bytes(payload), counts.messages))
    messages *= 3  # three buckets
    run = write_method(
        tmp_path,
        payload=payload,
        sent=sent,
        messages=messages,
        workers=4,
        algorithm=algorithm,
    )
    (found,) = methods(entries([run]))
    network = Network(latency=2e-3, bandwidth=1e6)
    if counts.messages.sum() % 4 == 0:
        expected = 3e-3 + 3 * closed_form(algorithm, 4, payload / 3, network)
        assert found.seconds(1e6, 2e-3) == pytest.approx(expected)
    assert found.nbytes == pytest.approx(
        1e6 * closed_form(algorithm, 4, payload, network.model_copy(update={"latency": 0.0}))
    )


def test_gathered_payloads_count_what_the_busiest_rank_sends(tmp_path: Path) -> None:
    run = write_method(tmp_path, payload=500, sent=1500, messages=3, workers=4, compressor=TOP_K)
    (found,) = methods(entries([run]))
    assert (found.hops, found.nbytes) == (3, 1500)


METHOD = st.builds(
    lambda work, hops, nbytes: MethodCost(f"{work} {hops} {nbytes}", (), work, hops, nbytes),
    st.floats(1e-4, 1e-1),
    st.integers(0, 20),
    st.floats(0, 1e8),
)


@given(st.lists(METHOD, min_size=1, max_size=6))
@settings(max_examples=60)
def test_at_every_bandwidth_the_named_winner_is_the_fastest(found: list[MethodCost]) -> None:
    over = (1e6, 1e10)
    wins = winners(found, 5e-5, over)
    assert (wins[0].first, wins[-1].last) == over
    for one, other in pairwise(wins):
        assert one.last == other.first
        assert one.method != other.method
    for win in wins:
        for at in np.geomspace(win.first, win.last, 5).tolist():
            least = min(each.seconds(at, 5e-5) for each in found)
            assert win.method.seconds(at, 5e-5) == pytest.approx(least, rel=1e-9)


def test_the_winner_changes_where_saved_bytes_no_longer_pay_for_the_codec(tmp_path: Path) -> None:
    dense = write_method(tmp_path, payload=1_000_000)
    small = write_method(tmp_path, payload=10_000, codec=4, compressor=TOP_K)
    one, other = winners(methods(entries([dense, small])), 0.0, (1e6, 1e10))
    assert (one.method.name, other.method.name) == ("TopK 1 %", "no compression")
    assert one.last == pytest.approx(990_000 / 4e-3)
    figure = bandwidth([dense, small])
    assert "Fastest method by bandwidth · simulation" in texts(figure)
    assert "TopK 1 % up to 1.98 Gb/s, then no compression" in texts(figure)
    assert "TopK 1 % up to 1.98 Gb/s, then no compression" in figure.alt
    (cross,) = [t for t in figure.data if t.mode == "markers+text"]
    assert cross.x[0] == pytest.approx(8 * one.last)


def test_measured_steps_stand_at_the_bandwidth_of_their_network(tmp_path: Path) -> None:
    runs = [write_method(tmp_path, network="1GbE"), write_method(tmp_path, network=None)]
    own = Network(latency=1e-3, bandwidth=1e6).model_dump(mode="json")
    runs.append(write_method(tmp_path, network=own, measured={"network": "own"}))
    figure = bandwidth(runs)
    (points_,) = [t for t in markers(figure) if t.error_y.array is not None]
    assert list(points_.x) == [1e9, 8e6]
    assert points_.y[0] == pytest.approx(5e-3)
    assert points_.error_y.array[0] == pytest.approx(5e-3 * 0.4)
    errors = prediction_errors(methods(entries(runs[:1])))
    predicted = 3e-3 + 2 * 50e-6 + 40_000 / 125e6
    assert list(errors.values()) == pytest.approx([predicted / 5e-3 - 1])


def test_bandwidths_are_bits() -> None:
    assert [bits_text(each) for each in (1.25e6, 125e6, 12.5e9)] == [
        "10 Mb/s",
        "1 Gb/s",
        "100 Gb/s",
    ]


def test_bars_are_named_in_lines_that_fit_and_tell_runs_apart(tmp_path: Path) -> None:
    inner = {"name": "PowerSGD", "approximation_rank": 2, "warm_start": True}
    compressors = [None, TOP_K, {"name": "ErrorFeedback", "inner": inner}]
    runs = [
        write_method(tmp_path, compressor=each, network=network, codec=1.0)
        for network in ("1GbE", "100Mb")
        for each in compressors
    ]
    names = step_parts(runs).layout.xaxis.ticktext
    assert names[0] == "no compression, 1GbE"
    assert names[5] == "PowerSGD rank 2, 100Mb"
    assert len(set(names)) == len(runs)


# --- microscope ----------------------------------------------------------------------------------


def observed(root: Path, seeds: int = 1, **changes: Any) -> Run:
    """Return a run of two layers on two ranks; the second layer has larger compression errors."""
    rows = [
        {
            "step": step,
            "rank": rank,
            "bucket": 0,
            "layer": layer,
            "relative_error": 0.1 * (1 + place) + 0.01 * rank,
            "cosine": 0.9 - 0.2 * place,
            "residual_norm": 1.0 + step,
            "bits_per_parameter": 0.64,
            "fraction_sent": 0.01 * (1 + place),
        }
        for step in range(40)
        for rank in range(2)
        for place, layer in enumerate(("dense", "head"))
    ]
    run = write_method(root, [0.9] * seeds, compressor=TOP_K, network="1GbE")
    table = pd.DataFrame(rows)
    table = table.assign(**{k: v(table) if callable(v) else v for k, v in changes.items()})
    for seed in completed_seeds(run):
        store.write_table(seed.path / "compression_stats.parquet", table.to_dict("records"))
    return Run(run.path)


def test_every_measure_has_a_line_a_layer_and_a_band_of_ranks(tmp_path: Path) -> None:
    figure = compression_stats(observed(tmp_path))
    words = texts(figure)
    for title in ("Relative error", "Cosine", "Residual", "Bits per parameter", "Fraction sent"):
        assert title in words
    lines = [t for t in figure.data if t.mode == "lines" and t.line.width == 2]
    assert len(lines) == 5 * 2
    assert lines[0].y[0] == pytest.approx(0.105)
    assert sum(t.fill == "tonexty" for t in figure.data) == 2  # only errors differ between ranks
    assert [t.name for t in figure.data if t.showlegend] == ["dense", "head"]
    assert "TopK 1 % · wall clock · network 1GbE" in figure.layout.title.text


def test_a_report_shows_what_was_under_the_microscope(tmp_path: Path) -> None:
    heading = "<h3>Compression statistics</h3>"
    plain = write_method(tmp_path / "plain", [0.9], compressor=TOP_K, network="1GbE")
    told = report([plain], tmp_path / "without.html").read_text()
    assert heading not in told
    told = report([plain, observed(tmp_path / "observed")], tmp_path / "with.html").read_text()
    assert told.count(heading) == 1


def test_the_microscope_shows_all_seeds_of_a_run(tmp_path: Path) -> None:
    run = observed(tmp_path, seeds=3)
    assert list(observations(run)["seed"].unique()) == [0, 1, 2]
    assert len(observations(run)) == 3 * 160


def test_the_reading_names_the_worst_layer_and_a_growing_residual(tmp_path: Path) -> None:
    run = observed(tmp_path)
    said = summarize_compression_stats(run)
    assert (
        "lowest in layer **head** (0.7, relative error 0.205) and highest in **dense** (0.9)"
        in said
    )
    assert (
        "Compressed layers use 0.64 bits per parameter and send 0.01 to 0.02 of their elements"
    ) in said
    assert "The error-feedback residual still grows" in said
    assert "head" in compression_stats(run).alt
    assert "has stopped growing" in summarize_compression_stats(
        observed(tmp_path, residual_norm=2.0)
    )
    assert "residual" not in summarize_compression_stats(observed(tmp_path, residual_norm=0.0))


def test_what_is_not_finite_is_left_out_and_named(tmp_path: Path) -> None:
    run = observed(
        tmp_path,
        residual_norm=np.nan,
        relative_error=lambda rows: rows["relative_error"].where(rows["layer"] != "head", np.inf),
    )
    assert "no layer has this statistic" in texts(compression_stats(run))
    assert "80 rows of the statistics, of head" in summarize_compression_stats(run)


def test_a_run_without_a_microscope_is_told_how_to_have_one(tmp_path: Path) -> None:
    with pytest.raises(LabkitError, match=r"compression_stats_every=10\)"):
        compression_stats(write_method(tmp_path, compressor=TOP_K))


def test_sixty_of_thousands_of_layers_are_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    figures = ("relative_error", "cosine", "residual_norm", "bits_per_parameter", "fraction_sent")
    rows = [
        {"step": 1, "rank": 0, "bucket": 0, "layer": f"layer {number}"}
        | dict.fromkeys(figures, 0.5)
        for number in range(3_000)
    ]
    write_table(run.path / "compression_stats.parquet", rows)
    figure = compression_stats(run)
    assert len({trace.name for trace in figure.data}) <= 60
    assert "60 of 3,000 layers" in str(figure.to_dict())
