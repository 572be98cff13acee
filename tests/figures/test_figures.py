"""Test that figures show what the records contain, and nothing that a record forbids."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from sample_runs import FAILED_GATE, experiment, history, write_run

from labkit.common.errors import LabkitError
from labkit.figures import compare, curves, show, speedup, table, throughput
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import PALETTE, entries, labels
from labkit.records import store
from labkit.records.analysis.columns import differences
from labkit.records.analysis.curves import loss_curve, smoothed
from labkit.records.analysis.scaling import scalings
from labkit.records.run import Run

SVG = "{http://www.w3.org/2000/svg}"  # the namespace of SVG elements
TOP_K = {"name": "AllReduce", "algorithm": "ring", "compressor": {"name": "TopK", "ratio": 0.01}}


def scaled(root: Path) -> list[Run]:
    """Return three runs: one worker, two with equal global batch, two with equal local batch."""
    return [
        write_run(root, workers=1, step_ms=8.0),
        write_run(root, workers=2, step_ms=5.0),
        write_run(root, workers=2, step_ms=10.0, batch_size=512),
    ]


def texts(figure: Any) -> str:
    """Return all texts of a figure, without tags and line breaks."""
    words = [note.text for note in figure.layout.annotations]
    words += [figure.layout.title.text, figure.layout.title.subtitle.text or ""]
    return re.sub(r"<[^>]+>", " ", " ".join(words))


def traces_of(figure: Any, run: Run) -> list[Any]:
    """Return the traces that draw a run, without its entry in the legend."""
    key = entries([run])[0].key
    found = [trace for trace in figure.data if (trace.meta or {}).get("run") == key]
    return [trace for trace in found if trace.x[0] is not None]


def panel(figure: Any, title: str) -> str:
    """Return the y axis of the panel with this title."""
    titled = [a for a in figure.layout.annotations if title in a.text]
    for axis in figure.select_yaxes():
        if np.isclose(axis.domain[1], titled[0].y):
            x_axis = figure.layout[axis.anchor.replace("x", "xaxis")]
            if np.isclose(x_axis.domain[0], titled[0].x):
                return str(axis.plotly_name.replace("axis", ""))
    raise AssertionError(f"no panel {title!r}")


def test_labels_name_only_the_parameters_that_differ(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, workers=2), write_run(tmp_path, workers=4, strategy=TOP_K)]
    assert labels(runs) == ["no compression", "TopK 1 %"]
    assert differences(runs)[0] == {"compressor": None, "workers": 2}


def test_equal_runs_get_numbers_and_a_lone_run_its_name(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, "a", seed=1) for _ in range(2)] + [write_run(tmp_path, seed=2)]
    assert labels(runs) == ["seed 1 (1)", "seed 1 (2)", "seed 2"]
    assert labels(runs[:1]) == ["a"]


def test_arrays_of_ones_own_are_named_by_shape_and_a_few_digits(tmp_path: Path) -> None:
    data = [
        [
            {"shape": [200, 3], "dtype": "float64", "sha256": first * 64},
            {"shape": [200], "sha256": 64 * "0"},
        ]
        for first in "ab"
    ]
    runs = [write_run(tmp_path, dataset=arrays) for arrays in data]
    told = [row["dataset"] for row in differences(runs)]
    assert told == ["arrays 200 × 3, #aa00", "arrays 200 × 3, #bb00"]


def test_the_source_of_a_users_callable_is_no_label(tmp_path: Path) -> None:
    models = [{"callable": name, "source": f"def {name}(): ..."} for name in ("small", "large")]
    runs = [write_run(tmp_path, model=model) for model in models]
    assert labels(runs) == ["small", "large"]


def test_a_path_in_a_parameter_is_shortened_in_labels(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, dataset=f"/srv/alice/{name}.npz") for name in "ab"]
    assert labels(runs) == ["…/a.npz", "…/b.npz"]


def test_the_seventh_run_has_another_dash_and_symbol(tmp_path: Path) -> None:
    shown = entries([write_run(tmp_path, seed=seed) for seed in range(7)])
    assert len({entry.color for entry in shown[:6]}) == len(PALETTE)
    assert shown[6].color == shown[0].color
    assert (shown[6].dash, shown[6].symbol) != (shown[0].dash, shown[0].symbol)


def test_a_runs_key_stays_when_its_folder_moves(tmp_path: Path) -> None:
    run = write_run(tmp_path / "here")
    before = entries([run])[0].key
    moved = run.path.rename(tmp_path / "elsewhere")
    assert entries([Run(moved)])[0].key == before
    assert entries([write_run(tmp_path, seed=1)])[0].key != before


def test_the_loss_is_the_mean_over_ranks_weighted_by_samples() -> None:
    rows = pd.DataFrame(history(2, 1, steps=2))
    rows["loss"] = [1.0, 4.0, 2.0, np.nan]
    rows["samples"] = [30, 10, 20, 0]
    rows["seconds"] = [3.0, 2.0, 0.5, 0.7]
    curve = loss_curve(rows)
    assert list(curve["loss"]) == pytest.approx([1.75, 2.0])
    assert list(curve["seconds"]) == pytest.approx(
        [0.0, 0.7]
    )  # those of the slowest rank, after the first step
    assert list(curve["step"]) == [1, 2]


def test_seeds_are_a_mean_within_a_band(tmp_path: Path) -> None:
    parts = [pd.DataFrame(history(2, 2, seed=seed)) for seed in range(3)]
    run = write_run(tmp_path)
    store.finish(run.path, run.metrics, pd.concat(parts))
    curve = loss_curve(run.history)
    assert (curve["seeds"] == 3).all()
    assert (curve["loss_low"] <= curve["loss"]).all()
    assert (curve["loss"] <= curve["loss_high"]).all()
    assert [t.fill for t in traces_of(curves([run]), run)].count("tonexty") == 1


def test_smoothing_keeps_a_straight_line_and_a_constant() -> None:
    line = np.arange(200.0)
    assert smoothed(line)[20:180] == pytest.approx(line[20:180])
    assert smoothed(np.full(200, 3.0)) == pytest.approx(np.full(200, 3.0))
    assert smoothed(line[:5]) == pytest.approx(line[:5])


def test_compare_draws_every_panel_for_every_run(tmp_path: Path) -> None:
    runs = scaled(tmp_path)
    figure = compare(runs)
    for title in (
        "Training loss",
        "Test accuracy",
        "Throughput",
        "Speed-up",
        "Efficiency",
    ):
        axis = panel(figure, title)
        for run in runs:
            assert any(trace.yaxis == axis for trace in traces_of(figure, run)), title
    legend = [trace.name for trace in figure.data if trace.showlegend]
    assert legend == labels(runs)


def test_titles_say_clock_and_network(tmp_path: Path) -> None:
    run = write_run(tmp_path, measured={"network": "1GbE"})
    assert "wall clock · network 1GbE" in texts(compare([run]))
    both = compare([run, write_run(tmp_path, workers=4)])
    assert "network 1GbE, none (by run)" in texts(both)
    assert "network not emulated" in texts(throughput([write_run(tmp_path)]))


def test_whiskers_reach_from_the_speed_of_slow_steps_to_that_of_fast_ones(tmp_path: Path) -> None:
    run = write_run(tmp_path, step_ms=5.0)
    (bar,) = traces_of(throughput([run]), run)
    assert bar.y[0] == pytest.approx(51_200)
    assert bar.y[0] + bar.error_y.array[0] == pytest.approx(51_200 / 0.8)
    assert bar.y[0] - bar.error_y.arrayminus[0] == pytest.approx(51_200 / 1.4)


def test_efficiency_is_t1_over_n_tn_strong_and_t1_over_tn_weak(tmp_path: Path) -> None:
    runs = {run.name: run for run in scaled(tmp_path)}
    points = {(p.workers, p.kind): p for p in scalings(runs).itertuples()}
    assert points[1, "strong"].speedup == 1
    assert points[2, "strong"].speedup / 2 == pytest.approx(8 / (2 * 5))
    assert points[2, "weak"].speedup / 2 == pytest.approx(8 / 10)
    assert points[2, "strong"].speedup_low == pytest.approx(8 / 7)
    assert points[2, "strong"].speedup_high == pytest.approx(8 / 4)
    assert "strong" in texts(speedup(scaled(tmp_path)))


@pytest.mark.parametrize(
    "other",
    [{"model": "cnn"}, {"threads": 2}, {"batch_size": 300}, {"model_options": {"widths": [8]}}],
)
def test_a_run_of_other_work_is_no_baseline(tmp_path: Path, other: dict[str, Any]) -> None:
    figure = speedup([write_run(tmp_path, workers=1, **other), write_run(tmp_path, workers=2)])
    assert "no run with workers=1 has the same other parameters" in texts(figure)
    assert "no run with workers=1" in figure.alt


def test_a_baseline_with_the_same_strategy_is_preferred(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path, workers=1, step_ms=8.0),
        write_run(tmp_path, workers=1, step_ms=9.0, strategy=TOP_K),
        write_run(tmp_path, workers=2, step_ms=4.5, strategy=TOP_K),
    ]
    table = scalings(dict(zip("abc", runs, strict=True)))
    assert list(table[table["workers"] == 2]["baseline"]) == ["b"]


def test_a_run_whose_gate_failed_has_no_speed_anywhere(tmp_path: Path) -> None:
    good = scaled(tmp_path)
    bad = write_run(tmp_path, workers=4, measured={"equivalence": FAILED_GATE})
    figure = compare([*good, bad])
    assert "no speed is shown, because the equivalence check failed (max |Δ| 0.25)" in texts(figure)
    drawn = traces_of(figure, bad)
    assert {trace.yaxis for trace in drawn} == {panel(figure, t) for t in ("loss", "accuracy")}
    assert {name for trace in drawn for name in trace.meta["over"]} == {"bytes"}
    assert "no speed is shown, because the equivalence check failed (max |Δ| 0.25)" in figure.alt
    row = table([*good, bad]).iloc[3]
    assert row["equivalence"] == "failed (max |Δ| 0.25)"
    assert pd.isna(row["samples_per_second"])
    alone = throughput([bad])
    assert traces_of(alone, bad) == []
    assert "no speed is shown" in texts(alone)


def test_too_few_cores_are_marked_in_legend_and_title(tmp_path: Path) -> None:
    figure = compare([write_run(tmp_path, measured={"oversubscribed": True})])
    assert "* more threads (ranks \N{MULTIPLICATION SIGN} threads per rank) than cores" in texts(
        figure
    )
    assert next(t.name for t in figure.data if t.showlegend).endswith(" *")
    assert "than cores" not in texts(compare([write_run(tmp_path)]))


def test_a_regression_shows_its_test_loss(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    metrics = run.metrics
    for epoch in metrics["epochs"]:
        del epoch["val_accuracy"]
    store.finish(run.path, metrics, history(2, 3))
    assert "Test loss" in texts(curves([run]))


def test_runs_without_results_are_named_and_the_rest_is_drawn(tmp_path: Path) -> None:
    good = write_run(tmp_path)
    directory = store.new_run_directory(tmp_path, "broken")
    store.start(directory, experiment(workers=4), {})
    store.fail(directory, "out of memory", rank=1)
    figure = compare([good, Run(directory)])
    assert "workers 4: no results (failed)" in texts(figure)
    assert table([good, Run(directory)])["state"].tolist() == ["completed", "failed: out of memory"]
    assert "no history" in texts(curves([Run(directory)]))


def test_the_words_hold_the_numbers(tmp_path: Path) -> None:
    figure = compare(scaled(tmp_path))
    assert figure.layout.meta["alt"] == figure.alt
    for words in ("3 runs", "test accuracy 0.733", "51,200 samples/s", "efficiency 80 %"):
        assert words in figure.alt


def test_markup_in_parameters_is_text(tmp_path: Path) -> None:
    names = ["<a href='https://x.example'>click</a>", "<b>bold</b>"]
    figure = compare([write_run(tmp_path, dataset=name) for name in names])
    drawn = json.dumps(figure.to_dict()["data"], default=str)
    assert "<a " not in drawn
    assert "<b>" not in drawn


def test_a_notebook_keeps_the_figure_and_its_words_and_no_address(tmp_path: Path) -> None:
    bundle = compare(scaled(tmp_path))._repr_mimebundle_()
    content = bundle["application/vnd.plotly.v1+json"]
    assert content["config"]["showSendToCloud"] is False
    assert len(content["data"]) > 10
    assert "speed-up" in bundle["text/html"]
    assert "http" not in json.dumps(bundle)
    [code] = re.findall(
        r'<img src="data:image/svg\+xml;base64,([^"]+)" alt="[^"]+">', bundle["text/html"]
    )
    picture = ElementTree.fromstring(base64.b64decode(code))
    drawn = [len(each.get("points", "").split()) for each in picture.iter(f"{SVG}polyline")]
    assert max(drawn) > 10
    assert "Throughput" in " ".join(each.text or "" for each in picture.iter(f"{SVG}text"))


def test_a_figure_without_a_still_picture_keeps_its_words() -> None:
    figure = Figure(data=[{"type": "scatter3d", "x": [1], "y": [1], "z": [1]}])
    figure.update_layout(meta={"alt": "a < b"})
    assert figure._repr_mimebundle_()["text/html"] == "<p>a &lt; b</p>"


def test_ipython_displays_that_bundle(tmp_path: Path) -> None:
    from IPython.core.formatters import DisplayFormatter

    data, _ = DisplayFormatter().format(compare([write_run(tmp_path)]))
    assert {"application/vnd.plotly.v1+json", "text/html", "text/plain"} <= set(data)


def test_show_outside_a_notebook_offers_no_cloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    figure = compare([write_run(tmp_path)])
    # Other tests may have created an IPython shell in this process; this test needs none.
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: None)
    monkeypatch.setattr(type(figure), "show", lambda self, **options: given.update(options))
    show(figure)
    assert given["config"]["showSendToCloud"] is False


def test_no_runs_is_a_sentence() -> None:
    with pytest.raises(LabkitError, match="no runs to compare"):
        compare([])


@pytest.mark.slow
def test_a_hundred_runs_stay_small(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, learning_rate=1.0 + k, epochs=50) for k in range(100)]
    figure = compare(runs)
    assert len(figure.to_json()) < 3e6
    assert not any(trace.showlegend is not False for trace in figure.data)  # no legend for 100 runs


def test_buttons_move_curves_to_seconds_and_bytes(tmp_path: Path) -> None:
    figure = compare(scaled(tmp_path))
    buttons = {button.label: button.args for button in figure.layout.updatemenus[0].buttons}
    assert list(buttons) == ["by step", "by seconds", "by bytes"]
    moved, layout, places = buttons["by seconds"]
    assert layout["xaxis.title"]["text"] == "seconds since the first step"
    for x, place in zip(moved["x"], places, strict=True):
        assert len(x) == len(figure.data[place].y)
        assert x[0] >= 0


def test_curves_that_lie_on_each_other_are_told(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, network=network) for network in ("1GbE", "100Mb")]
    assert "1GbE and 100Mb coincide exactly" in texts(curves(runs))
    other = write_run(tmp_path, network=None, seed=5)
    assert "coincide" not in texts(curves([runs[0], other]))


def test_bytes_are_those_after_the_first_step_and_none_in_shared_memory(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    rows = run.history
    rows.loc[rows["step"] == 0, "wire_bytes"] = 10**9  # bytes of the measurements by `auto`
    assert loss_curve(rows)["bytes"].max() < 10**8
    rows.loc[rows["step"] > 0, "wire_bytes"] = 0
    measured = run.metrics | {"exchange": {"algorithm": "shared_memory"}}
    store.finish(run.path, measured, rows)
    figure = curves([Run(run.path)])
    assert [b.label for b in figure.layout.updatemenus[0].buttons] == ["by step", "by seconds"]
    assert (
        "the figure has no axis of bytes: ranks exchange gradients through shared memory"
        in texts(figure)
    )
