"""Test figures of the order of parameter servers' updates, and of the age of gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_runs import write_run

from labkit.common.errors import InvalidInput, LabkitError
from labkit.figures import staleness, summarize_staleness, update_log
from labkit.records import store
from labkit.records.run import Run


def event(update: int, worker: int, old: int, sent: float, applied: float) -> dict[str, Any]:
    return {
        "server": 2,
        "update": update,
        "worker": worker,
        "step": update,
        "version": update - old,
        "staleness": old,
        "rows": 8,
        "sent": sent,
        "delivered": sent + 0.001,
        "applied": applied,
    }


# The second gradient of worker 1 is the third update; its weights are 2 updates old.
EVENTS = [
    event(0, 0, 0, 0.010, 0.011),
    event(1, 1, 1, 0.010, 0.012),
    event(2, 1, 2, 0.020, 0.022),
    event(-1, 0, 7, 0.030, 0.031),
]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = write_run(tmp_path, measured={"clock": "virtual", "network": "1GbE"})
    store.write_table(found.path / "update_log.parquet", EVENTS)
    return found


def test_each_push_goes_from_its_departure_to_the_moment_of_its_update(run: Run) -> None:
    figure = update_log(run)
    assert figure.layout.title.text == "Update log, 2 workers · virtual clock · network 1GbE"
    drawn = {trace.name: trace for trace in figure.data if trace.x[0] is not None}
    assert list(drawn) == [
        "dropped, because it arrived too late",
        "staleness 0",
        "staleness 1",
        "staleness 2",
    ]
    stale = drawn["staleness 2"]
    assert list(stale.x) == [pytest.approx(20), pytest.approx(21), pytest.approx(22), None]
    assert list(stale.y) == ["worker 1", "server 0", "server 0", None]
    assert len({trace.line.color for trace in drawn.values()}) == 4
    assert "1 dropped" in figure.alt


def test_a_window_draws_its_gradients_alone(run: Run) -> None:
    figure = update_log(run, first=1, last=2)
    drawn = [trace for trace in figure.data if trace.x[0] is not None]
    assert [trace.name for trace in drawn] == ["staleness 1", "staleness 2"]
    assert "2 gradients applied between 10 ms and 22 ms" in figure.alt
    with pytest.raises(
        InvalidInput, match=r"last=9, but there are 4 gradients; give 0 <= first <= last <= 3"
    ):
        update_log(run, last=9)


def test_of_hundreds_of_gradients_so_many_are_drawn_as_are_legible(run: Run) -> None:
    many = [event(k, k % 2, 1, k / 100, k / 100 + 0.01) for k in range(500)]
    store.write_table(run.path / "update_log.parquet", many)
    (trace,) = [trace for trace in update_log(Run(run.path)).data if trace.x[0] is not None]
    assert len(trace.x) == 60 * 4


def test_staleness_is_a_share_of_the_gradients_that_were_applied(run: Run) -> None:
    figure = staleness(run)
    (bars,) = [trace for trace in figure.data if trace.type == "bar"]
    assert list(bars.x) == [0, 1, 2]
    assert list(bars.y) == pytest.approx([1 / 3] * 3)
    assert figure.layout.title.text == "Staleness · virtual clock · network 1GbE"
    assert "mean 1, at most 2" in figure.alt


def test_the_reading_holds_staleness_beside_that_of_equal_workers(run: Run) -> None:
    said = summarize_staleness(run)
    assert "staleness 1 updates on average, 2 at most (2 equally fast workers" in said
    assert "never wait have 1); test accuracy" in said
    assert "300 ms of the virtual clock" in said
    assert summarize_staleness({"as it was": run}).startswith("- **as it was**: staleness 1 ")


def test_a_run_without_servers_says_what_has_an_interleaving(tmp_path: Path) -> None:
    for draw in (update_log, staleness):
        with pytest.raises(LabkitError, match="completed runs with ParameterServer have one"):
            draw(write_run(tmp_path))
