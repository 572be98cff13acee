"""Published figures beside ours: as published, and none is judged by a fit that has seen it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from labkit.network import Network
from labkit.schedules import named
from labkit.simulate import Reproduction, closed_form, reproduce, simulate
from labkit.simulate.published import PUBLISHED, STUDIES, Study, bugliarello, shapes
from labkit.simulate.published.pipelines import share

# As published; of three platforms the curves' rates and efficiencies are held by test_published.
FIGURES = {
    "512 GPUs, 25 Gb/s": [0.90, 0.90, 0.68],
    "BERT-large, 256 GPUs": [0.70, 0.90],
    "a round costs the same in both": [11.64, 1.41],
    "16 CPUs": [10.9, 14.7, 14.5, 15.3],
    "nodes": [53.0, 90.0, 42.0],
    "no shapes, one figure each": [6.5, 14.0],
    "1F1B, measured": [0.243, 0.199, 0.124],
    "AmoebaNet-D": [0.93, 2.62, 4.95],
    "ResNet-101, micro-batches not said": [0.853, 1.41, 2.77, 4.29],
    "bound 3 / (1 + 2 / K)": [1.40, 1.70, 1.84],
    "tensors by their shapes": [92.9],
}


@cache
def reproduced() -> list[Reproduction]:
    return reproduce()


@pytest.mark.parametrize(("name", "figures"), FIGURES.items(), ids=list(FIGURES))
def test_figures_are_those_that_were_published(name: str, figures: list[float]) -> None:
    (study,) = (each for each in STUDIES if each.name == name)
    assert list(study.figures.values()) == figures
    assert study.mark in "ADFPR"


def test_three_platforms_and_a_node_of_eight_are_as_published() -> None:
    for name in ("piz-daint", "p2.xlarge", "p2.8xlarge"):
        shown = [row.published for row in reproduced() if row.what.startswith(f"{name}, ")]
        assert set(shown) == set(PUBLISHED[name].efficiency[1:])
    assert {row.published for row in reproduced() if row.what.startswith("DGX-1")} == {0.9956}


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_a_judged_figure_never_enters_its_fit(study: Study) -> None:
    """With all judged figures changed, ours stay as they are."""
    other = {
        name: value if name in study.fitted else 0.5 * value
        for name, value in study.figures.items()
    }
    again = replace(study, figures=other).reproduce()
    assert [row.predicted for row in again] == [row.predicted for row in study.reproduce()]


def test_verdicts_follow_from_the_error_and_from_what_was_fitted() -> None:
    for row in reproduced():
        if row.error is None or abs(row.error) > row.within:
            assert row.verdict == "not reached"
        else:
            assert row.verdict == ("reproduced" if row.what in row.fitted else "predicted")


def test_the_cliff_is_predicted_from_32_nodes_and_absent_with_eight_gpus_a_node() -> None:
    rows = {row.what: row for row in reproduced() if row.study == "link at 32 of 1 K80 a node"}
    for gpus in (64, 128):
        assert rows[f"p2.xlarge, {gpus} GPUs"].verdict == "predicted"
    eight = [row for name, row in rows.items() if name.startswith("p2.8xlarge")]
    assert len(eight) == 7
    assert {row.verdict for row in eight} == {"predicted"}
    apart = [row for row in reproduced() if "apart" in row.study and "8xlarge" in row.what]
    assert {row.verdict for row in apart[3:]} == {"not reached"}


def test_one_node_of_eight_is_ahead_of_eight_nodes() -> None:
    rows = {row.what: row for row in reproduced() if row.study == "link at 128 of 1 P100 a node"}
    one, eight = rows["DGX-1, 8 GPUs"], rows["piz-daint, 8 GPUs"]
    assert one.predicted == pytest.approx(0.9956, abs=0.01)
    assert eight.predicted == pytest.approx(0.9207, abs=0.01)


def test_shapes_have_as_many_parameters_as_their_papers_say() -> None:
    def millions(layers: shapes.Layers) -> float:
        return shapes.nbytes(layers) / shapes.FLOAT / 1e6

    assert millions(shapes.inception_v3()) == 23.819401
    assert max(bugliarello.variables()) == 4 * 2048 * 1001
    assert millions(shapes.vgg((2, 2, 3, 3, 3))) == 138.357544
    assert millions(shapes.vgg((1, 1, 2, 2, 2))) == 132.863336
    assert millions(shapes.alexnet()) == 60.965224
    assert millions(shapes.googlenet()) == 6.998552
    assert millions(shapes.resnet((3, 4, 23, 3))) == pytest.approx(44.5, abs=0.1)


def parts(loads: list[int], size: int, network: Network, apart: int = 1) -> list[float]:
    """Seconds of the weights' way out, and of the gradients' way in."""
    step = list(bugliarello.server_step(loads, apart)(size))
    return [simulate(lambda _, e=each: [e], size, sum(loads), network).seconds for each in step]


@pytest.mark.parametrize("servers", [1, 3, 8])
@pytest.mark.parametrize("place", [bugliarello.greedy, bugliarello.round_robin])
def test_a_servers_step_takes_what_its_busiest_link_needs(place, servers: int) -> None:
    """More flows come into a server than leave a node: no other link is the bottleneck."""
    loads = place(bugliarello.variables(), servers)
    assert sum(loads) == sum(bugliarello.variables())
    network = Network(latency=0, bandwidth=1e8)
    assert parts(loads, 9, network) == pytest.approx([8 * max(loads) / 1e8] * 2, rel=1e-9)


def test_messages_of_a_nodes_gpus_share_its_link() -> None:
    loads = bugliarello.greedy(bugliarello.variables(), 4)
    network = Network(latency=0, bandwidth=1e8, hosts=8, host_bandwidth=1e15)
    form = 24 * max(loads) / 1e8
    assert parts(loads, 32, network, apart=8) == pytest.approx([form] * 2, rel=1e-9)
    assert bugliarello.link_bytes(32, 8, summed=False) == 24 * bugliarello.busiest(4)[0]
    assert bugliarello.link_bytes(32, 8) == 3 * bugliarello.busiest(4)[0]


def test_the_largest_of_normal_numbers() -> None:
    assert bugliarello.largest_of(1) == pytest.approx(0, abs=1e-9)
    assert bugliarello.largest_of(2) == pytest.approx(np.pi**-0.5, rel=1e-9)
    assert bugliarello.largest_of(3) == pytest.approx(1.5 * np.pi**-0.5, rel=1e-9)


def test_closed_forms_are_what_the_simulator_gives() -> None:
    network = Network(latency=0, bandwidth=25e9 / 8)
    nbytes = shapes.nbytes(shapes.inception_v3())
    form = closed_form("ring", 512, nbytes, network)
    assert form == pytest.approx(named("ring").cost(512).beta * nbytes / (25e9 / 8), rel=1e-12)
    assert simulate("ring", 512, nbytes, network).seconds == pytest.approx(form, rel=1e-9)
    assert share("gpipe", 4, 16) == pytest.approx(3 / 19, rel=1e-9)
    assert share("1f1b", 8, 24) == pytest.approx(7 / 31, rel=1e-9)
