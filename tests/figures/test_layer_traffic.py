"""Test figures of the traffic between ranks that each hold parts of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_runs import write_run

from labkit.common.errors import InvalidInput, LabkitError
from labkit.experiment import Experiment
from labkit.figures import grid_traffic, layer_traffic
from labkit.records import store
from labkit.records.run import Run
from labkit.records.store import write_table
from labkit.schedules.grid_layers import GridLayer, crossing, window
from labkit.strategies import SpatialParallel


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
    assert "payload 3 KiB, 1.5 KiB on the wire" in bars["forward"].hovertext[1]
    assert figure.layout.xaxis.title.text == "KiB per step"


def test_the_words_say_what_the_bars_show(tmp_path: Path) -> None:
    alt = layer_traffic(sliced_run(tmp_path)).alt
    assert "up (outputs): 0 B forward, 4 KiB backward" in alt
    assert "down <b> (inputs): 3 KiB forward, 0 B backward" in alt
    assert "Replicated on every rank, so nothing is sent: norm" in alt
    assert "a rank stores at most 4 KiB of the 6 KiB of weights" in alt


def test_a_run_without_slices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabkitError, match=r"no layers divided .*strategy=lk.TensorParallel\(\)"):
        layer_traffic(write_run(tmp_path))


LAYERS = [
    GridLayer("input", "input", (6, 6, 1), trains=False),
    window("pixels", (6, 6, 1), 2, (1, 1), (1, 1)),
    window("kernels", (6, 6, 2), 1, (3, 3), (1, 1)),
    GridLayer("scores", "units", (1, 1, 5)),
    GridLayer("loss", "loss", (1, 1, 5), trains=False),
]


def maps(figure: Any) -> list[Any]:
    return [trace for trace in figure.data if trace.type == "heatmap"]


def test_a_row_a_layer_with_its_tiles_and_what_machines_say_to_each_other() -> None:
    figure = grid_traffic(LAYERS, (2, 2))
    pixels, between, places, everything, scores, loss = maps(figure)
    # The neighbours' kernels overlap pixel rows and columns 2 and 3; all kernels overlap the
    # centre.
    assert np.asarray(pixels.z)[0].tolist() == [0, 0, 1, 1, 0, 0]
    assert np.asarray(pixels.z)[2].tolist() == [1, 1, 3, 3, 1, 1]
    assert np.asarray(between.z).tolist()[0] == [0, 2 * 3, 2 * 3, 2]
    assert (np.asarray(places.z) == 3).all()
    assert np.asarray(everything.z).sum() == 3 * 16
    assert np.asarray(scores.z).tolist() == [[0, 1, 1, 1, 1]]
    assert [row[0] for row in np.asarray(loss.z).tolist()] == [0, 1, 1, 2]
    data = crossing(LAYERS, (2, 2))
    assert sum(int(np.asarray(each.z).sum()) for each in (between, everything, loss)) == (
        data.values.sum()
    )
    nodes = [trace for trace in figure.data if trace.type == "scatter" and trace.text]
    assert list(nodes[0].x) == [1, 4, 1, 4]
    assert list(nodes[0].y) == [1, 1, 4, 4]


def test_the_words_say_every_message_and_where_the_numbers_come_from() -> None:
    figure = grid_traffic(LAYERS, (2, 2))
    assert figure.layout.title.text == (
        "Traffic between 2 × 2 machines · predicted, bytes per sample"
    )
    assert "pixels to kernels: 56 values forward, 56 gradients back, predicted 224 B" in figure.alt
    assert "0 sends 6 to 1, 0 sends 6 to 2, 0 sends 2 to 3" in figure.alt
    wide = grid_traffic(Experiment(model="mlp", workers=5).grid_layers or [], (1, 5)).alt
    assert "20 messages of 25 to 26 values" in wide


def test_one_machine_sends_nothing() -> None:
    assert "pixels to kernels: 0 values forward" in grid_traffic(LAYERS, (1, 1)).alt
    assert "no messages" in grid_traffic(LAYERS, (1, 1)).alt


def test_what_a_run_has_metered_stands_beside(tmp_path: Path) -> None:
    run: Any = write_run(tmp_path / "run", precision="float64")
    samples = float(run.history["samples"].mean())
    rows = [
        {
            "rank": rank,
            "layer": name,
            "slices": "grid",
            "why": "",
            "backward_bytes": 0.0,
            "forward_bytes": 8 * 10 * samples,
            "weights_bytes": 0,
            "whole_weights_bytes": 0,
        }
        for rank in range(8)  # two replicas
        for name in ("pixels", "kernels", "scores", "loss")
    ]
    with pytest.raises(InvalidInput, match="has no byte counts of these 4 layers"):
        grid_traffic(LAYERS, (2, 2), run)
    run = type(run)(run.path)
    write_table(run.path / "layers.parquet", rows)
    figure = grid_traffic(LAYERS, (2, 2), run)
    assert "predicted 448 B forward, 448 B back; measured 320 B forward, 0 B back" in figure.alt
    assert "and measured · wall clock · network" in figure.layout.title.text


def test_a_grid_larger_than_the_smallest_layer_is_refused() -> None:
    with pytest.raises(InvalidInput, match="larger than layer 'scores' of 5 units"):
        grid_traffic(LAYERS, (2, 3))


def test_the_planes_of_a_named_model_are_drawn_without_building_it() -> None:
    strategy = SpatialParallel(grid=(1, 2))
    question = Experiment(model="locally_connected", workers=2, strategy=strategy)
    assert (
        "locally_connected2d to locally_connected2d_1"
        in grid_traffic(question.grid_layers or [], strategy.grid_of(2)).alt
    )
