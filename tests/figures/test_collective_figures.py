"""Test the figures of collectives: costs, numbers of messages, and use of links."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from labkit.common.errors import InvalidInput
from labkit.figures import (
    cost_curves,
    counts_table,
    link_utilisation,
    summarize_cost,
    summarize_counts,
    summarize_link,
)
from labkit.network import Network
from labkit.schedules import ALLREDUCE
from labkit.simulate import AlphaBetaCost, closed_form
from labkit.simulate.costs import modelled
from labkit.simulate.simulation import costs

GIGABIT = Network.named("1GbE")


def test_the_fastest_changes_where_the_closed_forms_cross() -> None:
    (found,) = costs(["butterfly", "ring"], 8, ["1GbE"], (64, 2**26))
    butterfly, ring = (modelled(name, 8)[0] for name in ("butterfly", "ring"))
    expected = AlphaBetaCost.crossover(butterfly, ring, GIGABIT)
    small, large = found.fastest
    assert (small.algorithms, large.algorithms) == (("butterfly",), ("ring",))
    assert small.last == pytest.approx(expected, rel=1e-6)
    assert large.first == small.last


def test_adding_moves_the_crossing() -> None:
    edges = [
        costs(["butterfly", "ring"], 8, ["1GbE"], (64, 2**26), gamma)[0].fastest[0].last
        for gamma in (0.0, 4e-9)
    ]
    assert edges[1] < edges[0]  # a butterfly adds the whole buffer lg p times


def test_algorithms_that_take_as_long_share_their_stretch() -> None:
    (found,) = costs(["round_robin", "spanning_trees", "tree"], 4, ["10GbE"], (64, 2**20))
    assert [stretch.algorithms for stretch in found.fastest] == [("round_robin", "spanning_trees")]


def test_stretches_cover_the_range_and_name_the_fastest() -> None:
    names = ["all_to_all", "tree", "butterfly", "rabenseifner", "ring"]
    (found,) = costs(names, 6, [GIGABIT], (64, 2**26))
    assert found.fastest[0].first == 64
    assert found.fastest[-1].last == pytest.approx(2**26)
    for one, other in itertools.pairwise(found.fastest):
        assert one.last == other.first
    for stretch in found.fastest:
        middle = np.sqrt(stretch.first * stretch.last)
        times = {name: closed_form(name, 6, middle, GIGABIT) for name in names}
        assert min(times, key=times.__getitem__) in stretch.algorithms


def test_the_figure_has_a_panel_a_network_a_legend_and_its_clock() -> None:
    figure = cost_curves(["tree", "ring"], 4, ["1GbE", "wan"], (1024, 2**22))
    assert figure.layout.title.text == "Allreduce on 4 ranks · simulation"
    assert [trace.name for trace in figure.data if trace.showlegend] == ["tree", "ring"]
    assert figure.layout.xaxis2.title.text == "buffer size"
    assert figure.layout.yaxis.ticktext[0].endswith("s")
    assert "1GbE: fastest is" in figure.alt
    crosses = [trace for trace in figure.data if trace.marker.symbol == "x-thin"]
    assert len(crosses) == 2


def test_thin_lines_are_the_closed_forms_and_a_graph_of_links_has_none() -> None:
    lines = [t for t in cost_curves(["ring"], 4, ["1GbE"]).data if t.mode == "lines"]
    assert lines[0].y[-1] == pytest.approx(closed_form("ring", 4, 2**26, GIGABIT))
    hosts = Network(latency=1e-5, bandwidth=1e9, hosts=2, host_bandwidth=1e10)
    assert not [t for t in cost_curves(["ring"], 4, [hosts]).data if t.mode == "lines"]


def test_the_reading_says_what_the_figure_shows() -> None:
    said = summarize_cost(["master_worker", "ring"], 8, ["1GbE"], (64, 2**26))
    assert "then ring. At 64 MiB, master_worker takes 7.99 times as long as ring" in said


@pytest.mark.parametrize(
    "wrong", [{"size": 1}, {"nbytes": (64, 64)}, {"nbytes": (0, 64)}, {"networks": []}]
)
def test_numbers_that_cannot_be_are_a_sentence(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="give two ranks or more, 0 < minimum < maximum bytes"):
        cost_curves(**wrong)  # type: ignore[arg-type]


def test_all_algorithms_equal_their_formula() -> None:
    table = counts_table(sizes=range(1, 18))
    assert len(table) == 17 * len(ALLREDUCE)
    assert table["equal"].all()
    assert (table["messages"] == table["messages_formula"]).all()


def test_ring_and_master_send_as_much_but_the_master_alone_sends_half() -> None:
    ring, master = counts_table(["ring", "master_worker"], [8]).to_dict("records")
    assert ring["volume"] == master["volume"] == 14
    assert ring["busiest_rank"] == pytest.approx(2 * 7 / 8)
    assert master["busiest_rank"] == 7
    said = summarize_counts(counts_table(["ring", "master_worker"], [8]))
    assert "2 of 2 rows equal" in said
    assert "1.75 buffers with ring, and 7 buffers with master_worker" in said


def test_a_row_that_differs_is_named() -> None:
    table = counts_table(["ring"], [4])
    table.loc[0, ["messages", "equal"]] = [23, False]
    assert "**ring** on 4 ranks differs: its schedule has 23 messages" in summarize_counts(table)


def test_an_unknown_name_is_a_sentence() -> None:
    with pytest.raises(InvalidInput, match="no schedule is called 'rign'"):
        counts_table(["rign"], [2])


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
    said = summarize_link(["master_worker", "ring"], 8, 2**26, "1GbE")
    assert "7.99 times the fastest" in said
    assert "**ring**" in said
