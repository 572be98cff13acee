"""Bytes of each layer, forward and backward, as a figure and in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_runs import write_run

from labkit.common.errors import LabkitError
from labkit.figures import layer_traffic
from labkit.records import store
from labkit.records.run import Run


def row(layer: str, slices: str, forward: int, backward: int, **changes: Any) -> dict[str, Any]:
    return {
        "layer": layer,
        "slices": slices,
        "why": "",
        "forward_bytes": float(forward),
        "forward_wire_bytes": forward / 2,
        "backward_bytes": float(backward),
        "backward_wire_bytes": backward / 2,
        "weights_bytes": 1024,
        "whole_weights_bytes": 2048,
    } | changes


def sliced_run(folder: Path) -> Run:
    run = write_run(folder, workers=2)
    rows = [
        {"rank": rank} | each
        for rank in range(2)
        for each in (
            row("up", "outputs", 0, 4096),
            row("norm", "whole", 0, 0, weights_bytes=2048),
            row("down <b>", "inputs", 2048 + 1024 * rank, 0),
        )
    ]
    store.write_table(run.path / "layers.parquet", rows)
    return run


def test_each_layer_has_a_bar_each_way_of_the_rank_that_sends_most(tmp_path: Path) -> None:
    figure = layer_traffic(sliced_run(tmp_path))
    bars = {trace.name: trace for trace in figure.data if trace.type == "bar"}
    assert list(bars["forward"].y) == ["up (outputs)", "down &lt;b&gt; (inputs)"]
    assert list(bars["forward"].x) == [0, 3]
    assert list(bars["backward"].x) == [4, 0]
    assert "3 KiB handed over, 1.5 KiB on the wire" in bars["forward"].hovertext[1]
    assert figure.layout.xaxis.title.text == "KiB a step"


def test_the_words_say_what_the_bars_show(tmp_path: Path) -> None:
    alt = layer_traffic(sliced_run(tmp_path)).alt
    assert "up (outputs): 0 B forward, 4 KiB backward" in alt
    assert "down <b> (inputs): 3 KiB forward, 0 B backward" in alt
    assert "Whole on every rank, nothing sent: norm" in alt
    assert "A rank holds 4 KiB of 6 KiB of weights" in alt


def test_a_run_without_slices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabkitError, match=r"no layers in slices .*strategy=lk.TensorParallel\(\)"):
        layer_traffic(write_run(tmp_path))
