"""Formulas from textbooks and from labkit's network model for the time of each allreduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.network import Network
from labkit.network.topology import Seconds
from labkit.schedules import AlphaBetaCost, get_collective, tree

# In the schedules of `EVEN`, no rank sends before all ranks finish earlier rounds. The rule holds
# for any number of ranks.
EVEN = (
    *("all_to_all", "master_worker", "round_robin", "ring", "spanning_trees"),
    *("allgather_ring", "reduce_scatter_ring"),
)


def textbook(name: str, size: int) -> AlphaBetaCost:
    """Return the textbook cost on p ranks, plus the cost of folding if the schedule needs folding.

    Raises:
        InvalidInput: If the schedule has no formula.

    Source: Thakur, Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009.
    """
    return get_collective(name).cost(size)


def modelled(name: str, size: int) -> tuple[AlphaBetaCost, ...]:
    """Return the costs of critical paths on one switch; the slowest path sets the simulated time.

    Let each link serve one message at a time. The time of the slowest path is then exact for any
    number of ranks. With shared links, the slowest path's time is exact under one condition. Only
    one round at a time may use a link. For 2ᵐ ranks, the time of the slowest path is always exact.
    For numbers of ranks other than 2ᵐ, messages of two rounds may share a link. No formula for the
    time is known if two rounds share a link. For example, no formula is known for a tree of 3 ranks
    with shared links.

    The costs of the critical paths differ from the textbook in two cases. First, a rank may submit
    all messages of a round to its link at once. The latency α then counts once per round, not p - 1
    times. Second, the critical paths differ if the number of ranks is not a power of two. Each
    schedule documents its own critical paths.

    Raises:
        InvalidInput: If the schedule has no formula.
    """
    return get_collective(name).critical_paths(size)


def closed_form(name: str, size: int, nbytes: float, network: Network, gamma: float = 0.0) -> float:
    """Return the time in s of an allreduce by formula: the slowest path of `modelled`."""
    return max(path.seconds(nbytes, network, gamma) for path in modelled(name, size))


def exact_form(
    name: str, size: int, nbytes: float, network: Network, gamma: float = 0.0
) -> float | None:
    r"""Return the simulated time in s from an exact formula, or None if there is no such formula.

    On one switch with equal links, the formula is `closed_form`. For the schedules in `EVEN`,
    `closed_form` is exact for any number of ranks. For other schedules, `closed_form` is exact if
    the number of ranks is a power of two. The function `closed_form` is also exact if links serve
    one message at a time.

    On h equal hosts with P ranks each, there are formulas for two schedules. The time of
    "hierarchical" is the time of its tree plus the time of its ring. The tree connects ranks inside
    a host, and the ring connects hosts. The formula for "two_level" requires γ = 0 and shared
    links. For n bytes, "two_level" takes \(2 (α_i + (P - 1) n / P b) + 2 (h - 1) (α + n / P h c)\).
    Here \(α_i\) and b are the latency and the bandwidth of a link inside a host. An uplink of
    bandwidth B is shared by P rings. Each ring gets the bandwidth \(c = \min(b, B / P)\).
    """
    slow = any(s.transfer != 1.0 for s in network.stragglers.values())
    if network.links is not None or network.jitter or slow:
        return None
    if network.hosts is None:
        power = size & (size - 1) == 0
        exact = power or network.sharing == "fifo" or name in EVEN
        return closed_form(name, size, nbytes, network, gamma) if exact else None
    if not isinstance(network.hosts, int) or size % network.hosts:
        return None
    return _on_hosts(name, network.hosts, size // network.hosts, nbytes, network, gamma)


def _on_hosts(
    name: str, ranks: int, hosts: int, nbytes: float, network: Network, gamma: float
) -> float | None:
    """Return the time in s on equal hosts of `ranks` ranks each; None if no formula is exact."""
    latency = network.latency if network.host_latency is None else network.host_latency
    inside = network.host_bandwidth or network.bandwidth
    if name == "hierarchical" and ranks & (ranks - 1) == 0:
        flat = {"hosts": None, "host_latency": None, "host_bandwidth": None}
        inner = network.model_copy(update=flat | {"latency": latency, "bandwidth": inside})
        outer = network.model_copy(update=flat | {"bandwidth": min(inside, network.bandwidth)})
        inside_hosts = max(
            path.seconds(nbytes, inner, gamma) for path in tree.critical_paths(ranks)
        )
        return inside_hosts + closed_form("ring", hosts, nbytes, outer, gamma)
    if name == "two_level" and network.sharing == "fair":
        part = nbytes / ranks
        piece = part / hosts
        ring_bandwidth = min(inside, network.bandwidth / ranks)
        gather = (latency + (ranks - 1) * part / inside) if ranks > 1 else 0.0
        between = 2 * (network.latency + piece / ring_bandwidth) + gamma * piece
        return 2 * gather + gamma * (ranks - 1) * part + (hosts - 1) * between
    return None


@dataclass(frozen=True)
class Measurement:
    """A measured allreduce: median time in seconds for `nbytes` bytes on `size` ranks."""

    nbytes: float
    seconds: float
    algorithm: str = "ring"
    size: int = 2


@dataclass(frozen=True)
class Fit:
    """The parameters that fit the measurements best.

    Args:
        alpha: Latency α in s.
        beta, gamma: Time in s to send one byte (β), and to add one byte (γ).
        error: Median of |predicted / measured - 1|.
        worst: Maximum of |predicted / measured - 1|.
        count: Number of measurements.
    """

    alpha: float
    beta: float
    gamma: float
    error: float
    worst: float
    count: int

    def network(self, name: str = "calibrated") -> Network:
        """Return a network with the fitted latency and bandwidth.

        Raises:
            InvalidInput: If the measured times do not grow with the number of bytes.
        """
        if self.beta == 0:
            raise InvalidInput(
                "the measured times do not grow with the bytes sent, so no bandwidth can be "
                "fitted; measure larger buffers"
            )
        return Network(name=name, latency=self.alpha, bandwidth=1 / self.beta)


def calibrate(measurements: Sequence[Measurement]) -> Fit:
    """Fit α, β, γ to measured times by non-negative relative least squares.

    The fit minimizes Σ (predicted / measured - 1)². Measurements of one algorithm and one size have
    the same ratio b : c. With one ratio b : c, the fit cannot separate sending time from addition
    time. The ratios b : c may differ so little that noise would make β zero. The times of sending
    and of addition are then inseparable, too. If the times of sending and of addition are
    inseparable, γ is set to 0. With γ = 0, the parameter β contains the times of sending and of
    addition.

    Raises:
        InvalidInput: If there are fewer than two measurements. Each measured time must be above 0,
            and each measurement needs two ranks or more.
    """
    if len(measurements) < 2 or any(
        measurement.seconds <= 0 or measurement.size < 2 for measurement in measurements
    ):
        raise InvalidInput(
            f"these {len(measurements)} measurements allow no fit; give at least two, with times "
            f"above 0, on two ranks or more"
        )
    # The list `paths` holds one array of shape (paths, 3) per measurement.
    paths = [_path_rows(measurement) for measurement in measurements]
    critical = [0] * len(paths)
    parameters = _nonnegative_fit(_rows(paths, critical))
    # The predicted time of an allreduce is the time of its slowest path. Each fit can change the
    # slowest path, so a few iterations alternate between the path and the fit.
    for _ in range(10):
        slowest = [int(np.argmax(path @ parameters)) for path in paths]
        if slowest == critical:
            break
        critical = slowest
        parameters = _nonnegative_fit(_rows(paths, critical))
    error = np.abs([float((path @ parameters).max()) - 1 for path in paths])
    alpha, beta, gamma = (float(value) for value in parameters)
    return Fit(alpha, beta, gamma, float(np.median(error)), float(error.max()), len(error))


def _path_rows(measurement: Measurement) -> Seconds:
    """Return the rows (a, b·n, c·n)/t of all paths, for n bytes and measured time t."""
    costs = modelled(measurement.algorithm, measurement.size)
    rows = [
        (cost.alpha, cost.beta * measurement.nbytes, cost.gamma * measurement.nbytes)
        for cost in costs
    ]
    return np.array(rows) / measurement.seconds


def _rows(paths: list[Seconds], critical: list[int]) -> Seconds:
    return np.stack([path[index] for path, index in zip(paths, critical, strict=True)])


def _nonnegative_fit(rows: Seconds) -> Seconds:
    """Return the vector x without negative elements for which rows @ x is closest to 1.

    The function fits x by least squares to one subset of the columns after another.
    The fit never uses columns that depend linearly on each other. Among equally good subsets, the
    smaller and then the earlier one is chosen. A subset with the column of γ also has the column of
    β. The reduction adds only bytes that ranks have sent.
    """
    best, residual = np.zeros(3), np.inf
    subsets = [
        list(combination) for count in (1, 2, 3) for combination in combinations(range(3), count)
    ]
    for subset in (
        measurement for measurement in subsets if 2 not in measurement or 1 in measurement
    ):
        scale = np.linalg.norm(rows[:, subset], axis=0)
        columns = rows[:, subset] / np.where(scale > 0, scale, 1)
        answer, _, rank, _ = np.linalg.lstsq(columns, np.ones(len(rows)), rcond=1e-9)
        squares = float(np.sum((columns @ answer - 1) ** 2))
        if rank == len(subset) and (answer >= 0).all() and squares < residual - 1e-12:
            best, residual = np.zeros(3), squares
            best[subset] = answer / scale
    return best
