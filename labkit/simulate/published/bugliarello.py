"""InceptionV3 on TensorFlow 1.1's parameter servers, whose speed one large variable limits.

A server shares its node with workers, and stores whole variables. In each step, a server sends its
variables to the n - 1 other nodes. A server receives as many bytes of gradients as it sends. In the
forward pass, the busiest server sends its bytes n - 1 times. In the backward pass, the busiest
server receives equally many bytes. The following formula gives the time T(n) of a training step on
n nodes:

    T(n) = max(F + σ · e(n), x) + max(B, x),    x = (n - 1) · busiest / link,

where F is the forward time of a step on one GPU. The backward time of a step on one GPU is B = 2 F.
Hosts begin their steps at different times, and some receive weights earlier. The differences
between hosts add σ · e(n) to the step time. The term e(n) is the mean of the maximum of n standard
normal numbers. One variable has shape 2048 × 1001 (8.2 MB) and cannot be divided. With enough
servers, the busiest server stores only the variable of 8.2 MB.

The formula for T(n) was chosen after all results were known. Each reproduction names the results to
which its parameters are fitted. On one node no rank waits, so T(1) equals the step time of one GPU
by construction.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cache, partial
from statistics import NormalDist

import numpy as np

from labkit.simulate.published.allreduce import inception_v3, nbytes
from labkit.simulate.published.reproduction import (
    DGX_1,
    INCEPTION_MB,
    PUBLISHED,
    SERVERS,
    Figures,
    Parameters,
    Reproduction,
    Verdict,
)

SOURCE = "Bugliarello 2017"
FORWARD = 1 / 3  # The forward pass takes the fraction `FORWARD` of a training step on one GPU.
SPREAD, LINK = "σ, steps", "link, MB/s"
BATCH = 64  # Each GPU processes `BATCH` images per step.
GPUS_A_NODE = {"piz-daint": 1, "p2.xlarge": 1, "p2.8xlarge": 8, "DGX-1": 8}
STEP = {name: BATCH / curve.base for name, curve in PUBLISHED.items() if curve.base}  # s per step
# DGX-1 and Piz Daint both have P100 GPUs, so their step times on one GPU are equal.
STEP["DGX-1"] = STEP["piz-daint"]


def variables() -> list[int]:
    """Return the bytes of each trainable tensor of InceptionV3 (1001 classes), in layer order."""
    return [tensor for layer in inception_v3() for tensor in layer.tensors]


def greedy(sizes: Sequence[int], servers: int) -> list[int]:
    """Return the bytes of each server if every variable goes to the server with the fewest bytes.

    TensorFlow offers such a greedy placement of variables on parameter servers.
    """
    loads = [(0, server) for server in range(servers)]
    for size in sizes:
        load, server = loads[0]
        heapq.heapreplace(loads, (load + size, server))
    return [size for size, _ in sorted(loads, key=lambda load: load[1])]


@cache
def busiest(nodes: int) -> tuple[int, int]:
    """Return the busiest server's bytes for the best server count (≤ nodes), and that count."""
    sizes = variables()
    return min((max(greedy(sizes, servers)), servers) for servers in range(1, nodes + 1))


def link_bytes(gpus: int, a_node: int = 1, summed: bool = True) -> int:
    """Return the bytes per direction on the link of the busiest server, without local traffic.

    Args:
        gpus: Number of GPUs.
        a_node: GPUs per node.
        summed: Whether a node adds up its GPUs' gradients, and fetches weights only once.
    """
    nodes = -(-gpus // a_node)
    return (nodes - 1 if summed else gpus - min(gpus, a_node)) * busiest(nodes)[0]


@cache
def largest_of(count: int) -> float:
    """Return the mean of the largest of `count` standard normal random numbers."""
    x = np.linspace(-8.0, 8.0, 4001)
    below = np.array([NormalDist().cdf(value) for value in x])
    return float(8.0 - np.trapezoid(below**count, x))


def seconds(gpus: int, platform: str, link: float, spread: float, summed: bool = True) -> float:
    """Return the step time T(n) in s for `link` bytes/s and σ = `spread` steps of one GPU."""
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
    """Fit the link bandwidth and the spread σ of step times to published results.

    The links limit the training step only in the last result.
    """
    *others, last = known
    excess = np.array([1 / known[name] - 1 for name in others])
    delays = np.array([largest_of(_place(name)[1]) for name in others])
    platform, gpus = _place(last)
    duration = 1 / known[last]
    # If a step exceeds two backward passes, the link limits the forward and backward pass. If the
    # link limits forward and backward pass, each exchange takes half the step.
    x = duration / 2 if duration > 4 * FORWARD else duration - 2 * FORWARD
    link = link_bytes(gpus, GPUS_A_NODE[platform]) / x / STEP[platform]
    return {SPREAD: float(excess @ delays / (delays @ delays)), LINK: link / 1e6}


def _efficiency(parameters: Parameters, name: str, summed: bool = True) -> float:
    platform, gpus = _place(name)
    link, spread = 1e6 * parameters[LINK], parameters[SPREAD]
    return STEP[platform] / seconds(gpus, platform, link, spread, summed)


def _at(name: str, figures: Figures, platform: str, at: int, summed: bool = True) -> Reproduction:
    """Return a reproduction of the published parallel efficiencies on one platform."""
    fitted = tuple(_name(platform, gpus) for gpus in (2, 4, 8, at))
    predict = partial(_efficiency, summed=summed)
    verdicts: dict[str, Verdict] = dict.fromkeys(_ONE_NODE, "by construction")
    verdicts |= {_name(platform, gpus): "predicted from a fit" for gpus in (64, 128) if gpus > at}
    fields = SOURCE, "R", name, "efficiency", figures, predict, fitted, _fit
    marks = {_name("DGX-1", 8): "P"}
    return Reproduction(*fields, within=0.06, points=True, marks=marks, verdicts=verdicts)


_K80, _P100 = _figures("p2.xlarge", "p2.8xlarge"), _figures("piz-daint")
_ONE_NODE = [_name("DGX-1", 8), *(_name("p2.8xlarge", gpus) for gpus in (2, 4, 8))]
_BEST: Figures = {_name("piz-daint", nodes): best for nodes, best in SERVERS.items()}
_ONLY: dict[str, Verdict] = dict.fromkeys(_BEST, "reproduced")
_ONLY[_name("piz-daint", 1)] = "by construction"
# Unlike `_K80`, the dict `_APART` has no published results for 16, 64 and 128 GPUs of p2.xlarge.
_LATER = [_name("p2.xlarge", gpus) for gpus in (16, 64, 128)]
_APART = {name: value for name, value in _K80.items() if name not in _LATER}

REPRODUCTIONS = (
    Reproduction(
        SOURCE,
        "R",
        "tensors from shapes",
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
    _at("link fitted at 32 nodes of 1 K80", _K80, "p2.xlarge", 32),
    _at("link fitted at 32 K80, separate GPU messages", _APART, "p2.xlarge", 32, summed=False),
    _at("link fitted at 32 nodes of 1 P100", _P100, "piz-daint", 32),
    _at("link fitted at 128 nodes of 1 P100", _P100 | {_name("DGX-1", 8): DGX_1}, "piz-daint", 128),
)
