"""Test that the summary of compression states what the numbers show, including no effect."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_compression import TOP_K, write_method
from sample_runs import FAILED_GATE

from labkit.common.errors import LabkitError
from labkit.figures import bandwidth, summarize_compression

SEEDS = [0.90, 0.92, 0.91, 0.905, 0.915, 0.91, 0.912, 0.908]
ONE_BIT = {"name": "OneBit"}


def test_a_method_that_pays_is_said_with_speed_bytes_and_verdict(tmp_path: Path) -> None:
    dense = write_method(tmp_path, SEEDS, wire=60, network="100Mb")
    small = write_method(
        tmp_path, SEEDS, wire=1, codec=1, payload=400, network="100Mb", compressor=TOP_K
    )
    said = summarize_compression([dense, small])
    assert "wall clock · network 100Mb: the shortest step is that of **TopK 1 %**" in said
    assert "12.60x the speed of no compression" in said
    assert "compression ratio 100" in said
    assert "codec 1 ms, wire 1 ms, wait 0 s per step" in said
    assert "(the codec takes 60 ms)" in said
    assert "12.60x the speed (spread 7.20 to 22.05): it pays" in said
    assert "no loss of accuracy: the 95 % interval" in said
    assert "90.00%: reached after 60 steps, " in said
    assert "All 1 comparisons with runs without compression show a speed-up." in said


def test_null_results_are_results(tmp_path: Path) -> None:
    runs = [
        write_method(tmp_path),
        write_method(tmp_path, codec=20, compressor=TOP_K),
        write_method(tmp_path, [0.6], wire=1.9, compressor=ONE_BIT),
    ]
    said = summarize_compression(runs)
    assert "it does not pay" in said
    assert "no difference beyond the spread of the steps" in said
    assert (
        "No speed-up in 2 of 2 comparisons with runs without compression: TopK 1 %, OneBit." in said
    )
    assert "no verdict: one seed (60.00% against 90.00%)" in said
    assert "90.00%: not reached, the baseline reached after 60 steps" in said


def test_a_loss_of_accuracy_is_said(tmp_path: Path) -> None:
    dense = write_method(tmp_path, SEEDS)
    worse = write_method(tmp_path, [each - 0.2 for each in SEEDS], compressor=TOP_K)
    said = summarize_compression([dense, worse], target=0.7)
    assert "a loss of 20 points of accuracy" in said
    assert "no loss" not in said
    assert "70.00%: reached after" in said


def test_a_failed_gate_gives_no_speed(tmp_path: Path) -> None:
    dense = write_method(tmp_path)
    bad = write_method(tmp_path, compressor=TOP_K, measured={"equivalence": FAILED_GATE})
    said = summarize_compression([dense, bad])
    assert "no speed is shown, because the equivalence check failed (max |Δ| 0.25)" in said
    assert "x the speed" not in said
    assert "compression ratio 1" in said


def test_who_wins_on_other_links_is_called_a_simulation_and_held_against_the_measured(
    tmp_path: Path,
) -> None:
    runs = [
        write_method(tmp_path, payload=1_000_000, wire=8.1, network="1GbE"),
        write_method(
            tmp_path, payload=10_000, codec=4, wire=0.18, network="1GbE", compressor=TOP_K
        ),
    ]
    said = summarize_compression(runs)
    assert (
        "Simulation from measured compute times, codec times and bytes, on links of 10 Mb/s" in said
    )
    assert "the fastest method is TopK 1 % up to 1.98 Gb/s, then no compression" in said
    assert "the prediction error in 2 runs on emulated networks is 0%" in said
    alone = summarize_compression(
        [write_method(tmp_path), write_method(tmp_path, compressor=TOP_K)]
    )
    assert "no run on an emulated network" in alone


def test_speeds_on_different_networks_are_not_compared(tmp_path: Path) -> None:
    runs = [
        write_method(tmp_path, network="1GbE"),
        write_method(tmp_path, network="100Mb", compressor=TOP_K),
    ]
    said = summarize_compression(runs)
    assert "no speed-up is given, because no run without compression used this network" in said
    assert "x the speed" not in said


def test_a_baseline_may_be_named(tmp_path: Path) -> None:
    full = write_method(tmp_path, precision="float32")
    half = write_method(tmp_path, compute=1, wire=1, precision="mixed_bfloat16")
    travel = {"payload": 500, "codec": 1, "compressor": {"name": "Float16"}}
    sent = write_method(tmp_path, wire=2, precision="float32", **travel)
    assert "Not compared with" in summarize_compression([full, half])
    said = summarize_compression([full, half], baseline=full)
    assert "**precision mixed_bfloat16** against precision float32" in said
    assert "2.50x the speed (spread 1.43 to 4.38): it pays" in said
    # All runs are compared with the named baseline, so the fastest run is sought among all of them,
    # as in the figure.
    runs = [full, half, sent]
    said = summarize_compression(runs, baseline=full)
    assert "the shortest step is that of **no compression, precision mixed_bfloat16**" in said
    fastest = bandwidth(runs).layout.annotations[0].text.partition("fastest: ")[2].partition("<")[0]
    assert f"the fastest method is {fastest};" in said
    with pytest.raises(LabkitError, match="is not one of the given runs"):
        summarize_compression([half], baseline=full)
