"""Which link is busy when: the master's all the time, the ring's all together."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.figures import link_reading, link_utilisation


def heat(figure: object, place: int) -> object:
    return [trace for trace in figure.data if trace.type == "heatmap"][place]  # type: ignore[attr-defined]


def test_the_masters_link_is_full_half_of_the_time_each_way() -> None:
    figure = link_utilisation("master_worker", 8, 8e6, "1GbE")
    trace = heat(figure, 0)
    busy = dict(zip(trace.y, np.asarray(trace.z).mean(axis=1), strict=True))  # type: ignore[attr-defined]
    assert busy["rank 0 in"] == pytest.approx(50, abs=0.5)
    assert busy["rank 0 out"] == pytest.approx(50, abs=0.5)
    assert busy["rank 3 in"] == pytest.approx(50 / 7, abs=0.5)
    assert "rank 0 out and rank 0 in are in use 50% of the time, the others 7%" in figure.alt


def test_in_a_ring_all_links_carry_as_much() -> None:
    figure = link_utilisation("ring", 8, 8e6, "1GbE")
    shares = np.asarray(heat(figure, 0).z).mean(axis=1)  # type: ignore[attr-defined]
    assert np.ptp(shares) < 0.5
    assert "all links are in use 9" in figure.alt


def test_algorithms_share_one_axis_of_time() -> None:
    figure = link_utilisation(["master_worker", "ring"], 4, 4e6, "1GbE")
    ends = [heat(figure, place).x[-1] for place in (0, 1)]  # type: ignore[attr-defined]
    assert ends[0] > 3 * ends[1]
    assert figure.layout.xaxis.range == figure.layout.xaxis2.range
    assert figure.layout.xaxis2.matches == "x"
    assert figure.layout.xaxis.title.text == "time, ms"
    assert "simulation · network 1GbE · buffer 3.81 MiB" in figure.layout.title.text


def test_of_many_links_the_busiest_are_drawn() -> None:
    figure = link_utilisation("master_worker", 40, 4e6, "10GbE")
    assert len(heat(figure, 0).y) == 40  # type: ignore[attr-defined]
    assert "rank 0 in" in heat(figure, 0).y  # type: ignore[attr-defined]
    assert "the 40 busiest links" in figure.layout.title.subtitle.text


def test_one_rank_uses_no_link() -> None:
    assert "no link is used" in link_utilisation("ring", 1).alt


def test_the_reading_gives_the_ratio() -> None:
    said = link_reading(["master_worker", "ring"], 8, 2**26, "1GbE")
    assert "7.99 times the fastest" in said
    assert "**ring**" in said
