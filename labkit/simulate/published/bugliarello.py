"""InceptionV3 on TensorFlow 1.1's parameter servers: the cliff of one variable on one server.

A server is placed on a node of workers and has whole variables. In a step it sends them to the
n - 1 other nodes and gets as many gradients: over the busiest server's link go (n - 1) times its
bytes, first out, while workers go forward, then in, while they go backward,

    T(n) = max(F + σ · e(n), x) + max(B, x),    x = (n - 1) · busiest / link,

with F and B = 2 F the two parts of a step on one GPU. Hosts begin their steps unlike, while others
get their weights already: e(n) is the mean of the largest of n normal numbers. With servers enough
the busiest has the one variable of 2048 × 1001, which cannot be divided: 8.2 MB.

The form was chosen with all figures in sight; parameters are fitted on those that say so. On one
node nothing waits: T is the step of one GPU, by construction.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cache, partial
from statistics import NormalDist

import numpy as np

from labkit.simulate.published.curves import DGX_1, INCEPTION_MB, PUBLISHED, SERVERS
from labkit.simulate.published.reproduction import Figures, Parameters, Reproduction, Verdict
from labkit.simulate.published.shapes import inception_v3, nbytes

SOURCE = "Bugliarello 2017"
FORWARD = 1 / 3  # of a step on one GPU; the backward pass takes twice as long
SPREAD, LINK = "σ, steps", "link, MB/s"
BATCH = 64  # images a GPU
GPUS_A_NODE = {"piz-daint": 1, "p2.xlarge": 1, "p2.8xlarge": 8, "DGX-1": 8}
STEP = {name: BATCH / curve.base for name, curve in PUBLISHED.items() if curve.base}  # s, one GPU
STEP["DGX-1"] = STEP["piz-daint"]  # P100 both


def variables() -> list[int]:
    """Bytes of the trainable tensors of InceptionV3 with 1001 classes, in order of layers."""
    return [tensor for layer in inception_v3() for tensor in layer.tensors]


def greedy(sizes: Sequence[int], servers: int) -> list[int]:
    """Bytes of each server: each variable to the one that has least, as TensorFlow can, too."""
    loads = [(0, server) for server in range(servers)]
    for size in sizes:
        load, server = loads[0]
        heapq.heapreplace(loads, (load + size, server))
    return [load for load, _ in sorted(loads, key=lambda each: each[1])]


@cache
def busiest(nodes: int) -> tuple[int, int]:
    """Bytes of the busiest server, and number of servers, at the best of 1 … nodes; the fewest."""
    sizes = variables()
    return min((max(greedy(sizes, servers)), servers) for servers in range(1, nodes + 1))


def link_bytes(gpus: int, a_node: int = 1, summed: bool = True) -> int:
    """Bytes over the busiest server's link in each direction; those of a node's own stay inside.

    Args: summed: a node adds up its GPUs' gradients and fetches weights once.
    """
    nodes = -(-gpus // a_node)
    return (nodes - 1 if summed else gpus - min(gpus, a_node)) * busiest(nodes)[0]


@cache
def largest_of(count: int) -> float:
    """The mean of the largest of so many normal numbers, ∫ x dΦⁿ = 8 - ∫ Φⁿ from -8 to 8."""
    x = np.linspace(-8.0, 8.0, 4001)
    below = np.array([NormalDist().cdf(each) for each in x])
    return float(8.0 - np.trapezoid(below**count, x))


def seconds(gpus: int, platform: str, link: float, spread: float, summed: bool = True) -> float:
    """T(n); link: bytes/s; spread: σ, in steps of one GPU."""
    nodes = -(-gpus // GPUS_A_NODE[platform])
    x = link_bytes(gpus, GPUS_A_NODE[platform], summed) / link / STEP[platform]
    return STEP[platform] * (max(FORWARD + spread * largest_of(nodes), x) + max(2 * FORWARD, x))


def _name(platform: str, gpus: int) -> str:
    return f"{platform}, {gpus} GPUs"


def _place(name: str) -> tuple[str, int]:
    platform, gpus, _ = name.replace(",", "").split()
    return platform, int(gpus)


def _figures(*platforms: str) -> Figures:
    curves = (PUBLISHED[name] for name in platforms)
    return {
        _name(curve.name, gpus): efficiency
        for curve in curves
        for gpus, efficiency in zip(curve.workers[1:], curve.efficiency[1:], strict=True)
    }


def _fit(known: Figures) -> Parameters:
    """σ by least squares of all but the last, where links have time enough; the link by that."""
    *others, last = known
    lost = np.array([1 / known[name] - 1 for name in others])
    waits = np.array([largest_of(_place(name)[1]) for name in others])
    platform, gpus = _place(last)
    took = 1 / known[last]
    # Beyond twice the backward pass both parts of the step are as long as the link needs.
    x = took / 2 if took > 4 * FORWARD else took - 2 * FORWARD
    link = link_bytes(gpus, GPUS_A_NODE[platform]) / x / STEP[platform]
    return {SPREAD: float(lost @ waits / (waits @ waits)), LINK: link / 1e6}


def _efficiency(parameters: Parameters, name: str, summed: bool = True) -> float:
    platform, gpus = _place(name)
    link, spread = 1e6 * parameters[LINK], parameters[SPREAD]
    return STEP[platform] / seconds(gpus, platform, link, spread, summed)


def _at(name: str, figures: Figures, platform: str, at: int, summed: bool = True) -> Reproduction:
    """σ is fitted at 2, 4 and 8 nodes of one GPU, the link at some more."""
    fitted = tuple(_name(platform, gpus) for gpus in (2, 4, 8, at))
    predict = partial(_efficiency, summed=summed)
    verdicts: dict[str, Verdict] = dict.fromkeys(_ONE_NODE, "by construction")
    verdicts |= {_name(platform, gpus): "predicted from a fit" for gpus in (64, 128) if gpus > at}
    given = SOURCE, "R", name, "efficiency", figures, predict, fitted, _fit
    marks = {_name("DGX-1", 8): "P"}
    return Reproduction(*given, within=0.06, points=True, marks=marks, verdicts=verdicts)


_K80, _P100 = _figures("p2.xlarge", "p2.8xlarge"), _figures("piz-daint")
_ONE_NODE = [_name("DGX-1", 8), *(_name("p2.8xlarge", gpus) for gpus in (2, 4, 8))]
_BEST: Figures = {_name("piz-daint", nodes): best for nodes, best in SERVERS.items()}
_ONLY: dict[str, Verdict] = dict.fromkeys(_BEST, "reproduced")
_ONLY[_name("piz-daint", 1)] = "by construction"
_LATER = [_name("p2.xlarge", gpus) for gpus in (16, 64, 128)]  # as above
_APART = {name: value for name, value in _K80.items() if name not in _LATER}

REPRODUCTIONS = (
    Reproduction(
        SOURCE,
        "R",
        "tensors by their shapes",
        "MB",
        {"InceptionV3": INCEPTION_MB},
        lambda parameters, name: nbytes(inception_v3()) / 1e6,
    ),
    Reproduction(
        SOURCE,
        "R",
        "best number of servers",
        "servers",
        _BEST,
        lambda parameters, name: busiest(_place(name)[1])[1],
        verdicts=_ONLY,
    ),
    _at("link at 32 of 1 K80 a node", _K80, "p2.xlarge", 32),
    _at("the same, messages of 8 GPUs apart", _APART, "p2.xlarge", 32, summed=False),
    _at("link at 32 of 1 P100 a node", _P100, "piz-daint", 32),
    _at("link at 128 of 1 P100 a node", _P100 | {_name("DGX-1", 8): DGX_1}, "piz-daint", 128),
)
