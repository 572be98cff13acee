"""Cost curves: the simulator's times, the closed forms, and where the fastest changes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from labkit.common.errors import InvalidInput
from labkit.figures import cost_curves, cost_reading
from labkit.network import Network
from labkit.simulate import Cost, closed_form
from labkit.simulate.costs import modelled
from labkit.simulate.fastest import costs

GIGABIT = Network.named("1GbE")


def test_the_fastest_changes_where_the_closed_forms_cross() -> None:
    (found,) = costs(["butterfly", "ring"], 8, ["1GbE"], (64, 2**26))
    butterfly, ring = (modelled(name, 8)[0] for name in ("butterfly", "ring"))
    expected = Cost.crossover(butterfly, ring, GIGABIT)
    small, large = found.fastest
    assert (small.algorithms, large.algorithms) == (("butterfly",), ("ring",))
    assert small.last == pytest.approx(expected, rel=1e-6)
    assert large.first == small.last


def test_adding_moves_the_crossing() -> None:
    edges = [
        costs(["butterfly", "ring"], 8, ["1GbE"], (64, 2**26), gamma)[0].fastest[0].last
        for gamma in (0.0, 4e-9)
    ]
    assert edges[1] < edges[0]  # a butterfly adds whole buffers lg p times


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
    assert figure.layout.xaxis2.title.text == "size of the buffer"
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
    said = cost_reading(["master_worker", "ring"], 8, ["1GbE"], (64, 2**26))
    assert "then ring. At 64 MiB master_worker takes 7.99 times as long as ring" in said


@pytest.mark.parametrize(
    "wrong", [{"size": 1}, {"nbytes": (64, 64)}, {"nbytes": (0, 64)}, {"networks": []}]
)
def test_numbers_that_cannot_be_are_a_sentence(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="give two ranks or more, 0 < least bytes < greatest"):
        cost_curves(**wrong)  # type: ignore[arg-type]
