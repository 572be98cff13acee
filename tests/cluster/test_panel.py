"""Test the panel without a browser: the content of its widgets, and the effect of a click."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_sample import ROWS, Told

from labkit.cluster import RankError
from labkit.cluster.panel import LivePanel
from labkit.cluster.run_progress import RunProgress
from labkit.records import store


def losses(panel: LivePanel) -> list[list[float]]:
    """Return the losses of both ranks as the panel's figure shows them."""
    return [trace["y"] for trace in panel.figure.screen.content["data"][:2]]


def words(panel: LivePanel) -> str:
    return panel._status.value + panel._progress.value


def test_it_says_how_far_how_fast_and_how_long_yet(tmp_path: Path) -> None:
    live, now = Told(tmp_path), [0.0]
    live.progress = RunProgress(3, clock=lambda: now[0])
    panel = LivePanel(live)
    panel.draw(live)
    assert "starting" in words(panel)
    live.tell("plan", {"steps": 4})
    live.tell("doing", {"what": "training"})
    rows = [row | {"wire_bytes": 2**20, "compute_seconds": 0.5} for row in ROWS]
    live.tell("step", *rows[:2])
    now[0] = 0.5
    live.tell("step", *rows[2:])
    panel.draw(live)
    for part in ("training", "epoch 1 of 3", "step 2", "about 5.0 s left"):
        assert part in words(panel), part
    assert 'value="0.1667" aria-label="share of the training steps' in words(panel)
    for cell in ("rank 1", "8", "2 MiB", "100%"):
        assert f">{cell}</t" in words(panel), cell
    assert losses(panel) == [[2.0, 1.0], [2.0, 1.0]]
    panel.draw(live)
    assert losses(panel) == [[2.0, 1.0], [2.0, 1.0]]  # a second drawing repeats nothing


def test_the_stop_button_asks_the_ranks_once(tmp_path: Path) -> None:
    live = Told(tmp_path)
    panel = LivePanel(live)
    assert (panel.stop.description, panel.stop.disabled) == ("Stop training", False)
    assert "interrupted" in panel.stop.tooltip
    assert not live.writers[0].stop_asked()
    panel.stop.click()
    assert live.writers[0].stop_asked()
    assert panel.stop.disabled


def test_a_panel_that_is_made_late_has_what_came_before_and_shows_the_end(tmp_path: Path) -> None:
    live = Told(tmp_path)
    live.tell("step", *ROWS)
    live.begin()
    live.over.set()
    run = live.result()
    box = live.panel()
    panel = live._panel
    assert box is live.panel() is panel.widget
    assert losses(panel)[0] == [2.0, 1.0]
    assert "interrupted · stopped by the user after 2 steps" in words(panel)
    assert "s left" not in words(panel)
    assert panel.stop.disabled
    assert live.run == run


def test_the_thread_draws_until_the_end(tmp_path: Path) -> None:
    live = Told(tmp_path)
    live.panel()
    live.begin()
    live.writers[0].write("step", ROWS[:1])
    live.over.set()
    live.result()
    assert losses(live._panel)[0] == [2.0]
    assert live._panel.stop.disabled


def test_a_failure_is_shown_and_raised_as_text(tmp_path: Path) -> None:
    live = Told(tmp_path)
    panel = LivePanel(live)
    live.failure = RankError("rank 1 failed: <script>", 1)
    store.fail(live.directory, "<script>alert(1)</script>", 1)
    live.begin()
    live.over.set()
    with pytest.raises(RankError, match="rank 1 failed"):
        live.result()
    panel.draw(live)
    assert "failed · rank 1: &lt;script&gt;alert(1)" in words(panel)
    assert "<script" not in words(panel)


def test_a_display_that_breaks_does_not_end_the_run(tmp_path: Path) -> None:
    live = Told(tmp_path)

    class Broken:
        def draw(self, live: object) -> None:
            raise ValueError("no comm")

        close = draw

    live._displays.append(Broken())
    with pytest.warns(
        UserWarning, match="is no longer displayed, because its display failed: ValueError"
    ):
        live._draw()
    live._draw()
    live.begin()
    live.over.set()
    assert live.result().status["state"] == "interrupted"
