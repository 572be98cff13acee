"""Test parameter servers by number of workers, and which published results are reproduced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_runs import FAILED_GATE, write_run

from labkit.figures import server_prediction, server_scaling, summarize_server
from labkit.records.run import Run

VIRTUAL = {"clock": "virtual", "network": "1GbE"}


def on(
    root: Path, workers: int, rate: float, servers: int = 1, step: float = 5.0, **changes: object
) -> Run:
    """Return a run on parameter servers with this throughput in samples/s."""
    stragglers = changes.pop("stragglers", {})
    strategy = {"name": "ParameterServer", "servers": servers, "backup_workers": 0, **changes}
    found: dict[str, Any] = VIRTUAL | {"samples_per_second": rate, "repeats": 3}
    found["step_ms"] = {"median": step, "p10": step, "p90": step}
    found["spread"] = {"samples_per_second": [0.9 * rate, 1.1 * rate]}
    given: dict[str, Any] = {
        "workers": workers,
        "strategy": strategy,
        "stragglers": stragglers,
        "epochs": 1,
    }
    return write_run(root, measured=found, **given)


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    one = [on(tmp_path, n, rate) for n, rate in ((1, 100), (2, 180), (4, 200))]
    four = [on(tmp_path, n, rate, 4) for n, rate in ((1, 100), (2, 190), (4, 360))]
    same = [on(tmp_path, 4, 300, 4, colocated=True)]
    slow = [
        on(tmp_path, 4, 77, 4, step, stragglers={3: 3}, backup_workers=b)
        for b, step in ((0, 9), (1, 6))
    ]
    return one + four + same + slow


def test_throughput_is_a_line_with_a_band_for_each_way_to_hold_the_weights(runs: list[Run]) -> None:
    figure = server_scaling(runs)
    title = "Parameter servers and allreduce · virtual clock · network 1GbE"
    assert figure.layout.title.text == title
    lines = {t.name: t for t in figure.data if t.x[0] is not None and t.line.width == 2}
    assert list(lines) == ["1 server", "4 servers"]
    assert list(lines["1 server"].x) == [1, 2, 4]
    assert list(lines["1 server"].y) == [100, 180, 200]
    assert any(t.fill == "tonexty" for t in figure.data)
    assert "4 servers, co-located: 300 samples/s on 4" in figure.alt
    assert "77 samples/s" not in figure.alt  # the run with a slow worker is not comparable


def test_the_reading_says_where_each_cliff_is_and_which_shapes_came(runs: list[Run]) -> None:
    said = summarize_server(runs)
    assert "**1 server**, 200 samples/s (3 seeds, 180 to 220); doubling the workers to" in said
    assert "doubling the workers to 4 gives less than 1.5 × the throughput" in said
    assert "throughput grows with each doubling of the workers up to 4" in said
    assert "**More servers give a higher throughput** (4 workers): reproduced" in said
    assert "1.80 ×" in said
    assert (
        "**Co-located servers have a lower throughput than separate servers** (Bugliarello): "
        "reproduced" in said
    )
    assert "have 0.83 on 4 workers" in said
    most = "- Highest throughput on 4 workers: **4 servers**, 360 samples/s (3 seeds, 324 to 396)"
    assert said.splitlines()[-1].startswith(most)
    assert (
        "of which one is slow: reproduced: with backup_workers=1 a step takes 6 ms, without 9 ms"
        in said
    )


def test_a_shape_that_does_not_come_is_said_with_its_number(tmp_path: Path) -> None:
    slow = [
        on(tmp_path, 4, 90, 1, step, stragglers={3: 3}, backup_workers=b)
        for b, step in ((0, 5), (1, 6))
    ]
    better = [on(tmp_path, 4, 300, 4), on(tmp_path, 4, 330, 4, colocated=True)]
    said = summarize_server([on(tmp_path, 4, 400), *better, *slow])
    assert said.count("**not** reproduced") == 3
    assert "0.75 ×" in said
    assert "have 1.10 on 4 workers" in said
    assert "1.20 ×" in said


def test_the_prediction_stands_beside_the_wall_clock_but_not_of_a_failed_gate(
    tmp_path: Path,
) -> None:
    virtual, wall = on(tmp_path, 2, 100, step=4.0), on(tmp_path, 2, 80, step=5.0)
    found = server_prediction([virtual], [wall]).iloc[0]
    assert (found["virtual_ms"], found["wall_ms"], found["wall_over_virtual"]) == (4, 5, 1.25)
    failed = write_run(tmp_path, measured={"equivalence": FAILED_GATE})
    assert server_prediction([virtual], [failed])["wall_ms"].isna().all()
