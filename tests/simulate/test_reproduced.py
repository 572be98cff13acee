"""Test published figures beside labkit's: a fit never uses a figure that it is judged by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from labkit.network import Network
from labkit.schedules import get_collective
from labkit.schedules.round import Round
from labkit.simulate import Judged, closed_form, reproduce, simulate
from labkit.simulate.published import REPRODUCTIONS, Reproduction, allreduce, bugliarello
from labkit.simulate.published.pipelines import share

# Published figures with their marks; formulas are computed with F = 1, B = 1.2 and W = 0.8.
DAINT = [0.957, 0.947, 0.921, 0.905, 0.868, 0.805, 0.521]
K80 = [0.940, 0.938, 0.935, 0.883, 0.845, 0.510, 0.276]
K80_BY_8 = [0.955, 0.952, 0.944, 0.918, 0.884, 0.885, 0.852]
FIGURES = {
    "tensors from shapes": ("R", [92.9]),
    "best number of servers": ("R" * 8, [1, 1, 3, 2, 4, 12, 40, 116]),
    "link fitted at 32 nodes of 1 K80": ("R" * 14, K80 + K80_BY_8),
    "link fitted at 32 K80, separate GPU messages": ("R" * 11, [*K80[:3], K80[4], *K80_BY_8]),
    "link fitted at 32 nodes of 1 P100": ("R" * 7, DAINT),
    "link fitted at 128 nodes of 1 P100": ("RRRRRRRP", [*DAINT, 0.9956]),
    "512 GPUs, 25 Gb/s": ("DDD", [0.90, 0.90, 0.68]),
    "512 GPUs, 25 Gb/s, without minimal filtering": ("DDD", [0.90, 0.90, 0.68]),
    "BERT-large, 256 GPUs": ("RR", [0.70, 0.90]),
    "same time per round in both networks": ("DD", [11.64, 1.41]),
    "16 CPUs": ("FFFF", [10.9, 14.7, 14.5, 15.3]),
    "nodes": ("AAA", [53.0, 90.0, 42.0]),
    "no layer shapes, a single value": ("AA", [6.5, 14.0]),
    "(K - 1) / (M + K - 1)": ("CCC", [3 / 7, 3 / 19, 7 / 39]),
    "forms": ("CCC", [21, 9.8, 4.2]),
    "1F1B, measured": ("PPP", [0.243, 0.199, 0.124]),
    "AmoebaNet-D": ("RRR", [0.93, 2.62, 4.95]),
    "ResNet-101, number of micro-batches unknown": ("RRRR", [0.853, 1.41, 2.77, 4.29]),
    "bound 3 / (1 + 2 / K) [C]": ("FFFRRR", [1.40, 1.70, 1.84, 1.37, 1.57, 1.64]),
}


@cache
def reproduced() -> list[Judged]:
    return reproduce()


def test_figures_and_their_marks_are_those_that_were_published() -> None:
    assert [each.name for each in REPRODUCTIONS] == list(FIGURES)
    for name, (marks, figures) in FIGURES.items():
        rows = [row for row in reproduced() if row.study == name]
        assert "".join(row.mark for row in rows) == marks, name
        assert [row.published for row in rows] == pytest.approx(figures, abs=0.0005), name


@pytest.mark.parametrize("study", REPRODUCTIONS, ids=lambda study: study.name)
def test_a_judged_figure_never_enters_its_fit(study: Reproduction) -> None:
    """Test that labkit's predictions stay the same when all judged figures are changed."""
    other = {
        name: value if name in study.fitted else 0.5 * value
        for name, value in study.figures.items()
    }
    again = replace(study, figures=other).reproduce()
    assert [row.predicted for row in again] == [row.predicted for row in study.reproduce()]


def test_nothing_is_predicted_that_a_parameter_or_a_form_was_made_for() -> None:
    said = {row.study for row in reproduced() if row.verdict == "predicted"}
    assert said == {"tensors from shapes", "(K - 1) / (M + K - 1)", "forms"}
    assert not any(row.parameters for row in reproduced() if row.study in said)


def test_rows_of_one_node_and_of_bounds_are_no_predictions() -> None:
    one = {row.what for row in reproduced() if row.unit == "efficiency" and row.predicted == 1}
    assert one == {"DGX-1, 8 GPUs", *(f"p2.8xlarge, {gpus} GPUs" for gpus in (2, 4, 8))}
    assert {row.verdict for row in reproduced() if row.what in one} == {"by construction"}
    bounds = [row for row in reproduced() if row.study.startswith("bound")]
    assert {row.verdict for row in bounds} == {"bound"}
    assert [row.error for row in bounds[3:]] == pytest.approx([0.09, 0.15, 0.22], abs=0.006)
    assert replace(bounds[0], published=1.51).verdict == "not reached"


def test_the_cliff_is_predicted_from_32_nodes_and_absent_with_eight_gpus_a_node() -> None:
    rows = [row for row in reproduced() if row.study == "link fitted at 32 nodes of 1 K80"]
    beyond = {row.what for row in reproduced() if row.verdict == "predicted from a fit"}
    assert beyond == {f"p2.xlarge, {gpus} GPUs" for gpus in (64, 128)}
    assert {row.verdict for row in rows[-4:]} == {"reproduced"}
    apart = [row for row in reproduced() if "separate" in row.study and "8xlarge" in row.what]
    assert {row.verdict for row in apart[3:]} == {"not reached"}


def test_one_node_of_eight_is_ahead_of_eight_nodes() -> None:
    rows = {
        row.what: row for row in reproduced() if row.study == "link fitted at 128 nodes of 1 P100"
    }
    one, eight = rows["DGX-1, 8 GPUs"], rows["piz-daint, 8 GPUs"]
    assert one.predicted == pytest.approx(0.9956, abs=0.01)
    assert eight.predicted == pytest.approx(0.9207, abs=0.01)


def test_shapes_have_as_many_parameters_as_their_papers_say() -> None:
    def millions(layers: allreduce.Layers) -> float:
        return allreduce.nbytes(layers) / allreduce.FLOAT / 1e6

    assert millions(allreduce.inception_v3()) == 23.819401
    assert max(bugliarello.variables()) == 4 * 2048 * 1001
    assert millions(allreduce.vgg((2, 2, 3, 3, 3))) == 138.357544
    assert millions(allreduce.vgg((1, 1, 2, 2, 2))) == 132.863336
    assert millions(allreduce.alexnet()) == 60.965224
    assert millions(allreduce.googlenet()) == 6.998552
    assert millions(allreduce.resnet((3, 4, 23, 3))) == pytest.approx(44.5, abs=0.1)


def server_step(loads: list[int], apart: int, size: int) -> Iterator[Round]:
    """Yield rounds of weights out and gradients in; server k is beside rank k · apart."""
    load = np.array(loads)
    server, worker = np.divmod(np.arange(len(load) * size), size)
    other = server * apart != worker
    server, worker = server[other], worker[other]
    home, part = server * apart, ((np.cumsum(load) - load)[server], load[server])
    yield Round(home, worker, *part, reduce=False)
    yield Round(worker, home, *part, reduce=True)


def parts(loads: list[int], size: int, network: Network, apart: int = 1) -> list[float]:
    """Return the seconds to send the weights out and to send the gradients in."""
    step = server_step(loads, apart, size)
    return [simulate(lambda _, e=each: [e], size, sum(loads), network).seconds for each in step]


@pytest.mark.parametrize("servers", [1, 3, 8])
def test_a_servers_step_takes_what_its_busiest_link_needs(servers: int) -> None:
    """Test a server's own link as the bottleneck: more flows enter a server than leave a node."""
    loads = bugliarello.greedy(bugliarello.variables(), servers)
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
    nbytes = allreduce.nbytes(allreduce.inception_v3())
    form = closed_form("ring", 512, nbytes, network)
    assert form == pytest.approx(
        get_collective("ring").cost(512).beta * nbytes / (25e9 / 8), rel=1e-12
    )
    assert simulate("ring", 512, nbytes, network).seconds == pytest.approx(form, rel=1e-9)
    assert share("gpipe", 4, 16) == pytest.approx(3 / 19, rel=1e-9)
    assert share("1f1b", 8, 24) == pytest.approx(7 / 31, rel=1e-9)
