"""Costs of a run's steps: bytes, and times of computation, compression, transfer and waiting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.common.units import bits_text
from labkit.network import Network
from labkit.records.run import Run
from labkit.records.timed_steps import steady_steps, with_end_times
from labkit.schedules import ALLREDUCE
from labkit.simulate import modelled

if TYPE_CHECKING:
    import pandas


PARTS = ("compute", "codec", "wire", "wait")
_COLUMNS = {"wire": "communicate_seconds", "wait": "wait_seconds", "codec": "codec_seconds"}


@dataclass(frozen=True)
class StepCosts:
    """Costs of a training step, over all seeds and all steps except the first 10.

    Attributes:
        compute, codec, wire, wait: Seconds of computation, compression, transfer and waiting. Each
            time is an average over ranks and a median over steps. The value `compute` is the step
            time minus `codec`, `wire` and `wait`, but at least 0.
        work: Seconds of `compute` plus `codec` on the rank with the largest sum. The value is the
            median over steps.
        payload: Bytes per step that each rank passes to the gradient exchange, averaged over ranks
            and steps.
        sent: Total bytes that all ranks send per step, averaged over steps.
        busiest: Bytes per step from the rank that sends the most, averaged over steps.
        messages, busiest_messages: Messages per step of all ranks, and of the busiest rank. The
            numbers of messages are averages over steps.
    """

    compute: float
    codec: float
    wire: float
    wait: float
    work: float
    payload: float
    sent: float
    busiest: float
    messages: float
    busiest_messages: float


def step_costs(run: Run) -> StepCosts | None:
    """Return the costs of a run's steps after the first 10, or None without a history."""
    history = run.history
    if history.empty:
        return None
    history = with_end_times(history)
    rows = _parts(history[history["step"].isin(steady_steps(history["step"]))])
    steps = rows.groupby(["seed", "step"])
    # The median over training steps is used, because outliers hardly change a median.
    seconds = steps[list(PARTS)].mean().median()
    ranks = rows.groupby("rank")[["wire_bytes", "messages"]].mean()
    return StepCosts(
        **{part: float(seconds[part]) for part in PARTS},
        work=float(steps["work"].max().median()),
        payload=float(rows["payload_bytes"].mean()),
        sent=float(ranks["wire_bytes"].sum()),
        busiest=float(ranks["wire_bytes"].max()),
        messages=float(ranks["messages"].sum()),
        busiest_messages=float(ranks["messages"].max()),
    )


def _parts(rows: pandas.DataFrame) -> pandas.DataFrame:
    # Records of early labkit versions have no column for compression times.
    parts: dict[str, Any] = {
        part: rows[column].fillna(0.0) if column in rows else 0.0
        for part, column in _COLUMNS.items()
    }
    # A negative rest is replaced by 0, because the subtracted times include communication that
    # overlaps computation.
    rest = rows["seconds"] - parts["codec"] - parts["wire"] - parts["wait"]
    parts["compute"] = rest.clip(lower=0.0)
    return rows.assign(**parts, work=parts["compute"] + parts["codec"])


# The compared bandwidths, in bytes/s, range from 10 Mb/s to 100 Gb/s.
RANGE = (10e6 / 8, 100e9 / 8)
LATENCY = 50e-6  # A latency of 50 µs is typical of 1 Gb/s Ethernet.
_AS_COUNTED = 0.02  # Measured and computed bytes count as equal if they differ by at most 2 %.


@dataclass(frozen=True)
class MethodCost:
    r"""A training method, whose step time on a link is modelled as \(w + a\alpha + n/B\).

    Attributes:
        name: Name of the method.
        runs: Measured runs of the method, which differ only in their networks and seeds.
        work: The seconds \(w\) per training step in which the slowest rank computes, compresses and
            decompresses.
        hops: The number \(a\) of successive messages per training step, each of which takes the
            latency \(\alpha\).
        nbytes: The bytes \(n\) per training step on the busiest link, whose bandwidth is \(B\).
    """

    name: str
    runs: tuple[Run, ...]
    work: float
    hops: float
    nbytes: float

    def seconds(self, bandwidth: float, latency: float = LATENCY) -> float:
        """Return the step time in s for a bandwidth in bytes/s and a latency in s.

        The model assumes that computation and communication do not overlap.
        """
        return self.work + latency * self.hops + self.nbytes / bandwidth


@dataclass(frozen=True)
class Win:
    """The bandwidths, from `first` to `last` bytes/s, at which one training method is fastest."""

    method: MethodCost
    first: float
    last: float


def methods(groups: Mapping[str, Sequence[Run]]) -> list[MethodCost]:
    """Return the cost model of each named group of runs, with medians over its runs."""
    measured = []
    for name, runs in groups.items():
        links = [_link_costs(run, costs) for run in runs if (costs := step_costs(run))]
        if links:
            # A training method does the same work and sends the same bytes on every network.
            # Differences between the runs of one method are noise, which the median reduces.
            work, hops, nbytes = (median(column) for column in zip(*links, strict=True))
            measured.append(MethodCost(name, tuple(runs), work, hops, nbytes))
    return measured


def winners(methods: Sequence[MethodCost], latency: float, over: tuple[float, float]) -> list[Win]:
    r"""Return the fastest training method for each bandwidth, from the lowest to the highest.

    A training method's step time is a straight line as a function of 1/B. The symbol B denotes the
    bandwidth. The slope of the line is the number n of bytes. The fixed time of a step is the step
    time at unlimited bandwidth. At low bandwidth, the method that sends fewer bytes is faster. At
    high bandwidth, the method with the shorter fixed time is faster. Let two methods send n and n'
    bytes with fixed times f and f'. The two methods are equally fast at the bandwidth \(B = (n' -
    n) / (f - f')\).
    """
    first, high = over

    def fixed(method: MethodCost) -> float:
        return method.work + latency * method.hops

    # If two methods are equally fast, the method with less bandwidth-independent time is faster at
    # higher bandwidths.
    best = min(methods, key=lambda method: (method.seconds(first, latency), fixed(method)))
    wins: list[Win] = []
    while True:
        edges = [
            ((other.nbytes - best.nbytes) / (fixed(best) - fixed(other)), fixed(other), index)
            for index, other in enumerate(methods)
            if fixed(other) < fixed(best)
        ]
        # Several methods may be equally fast at one bandwidth. At higher bandwidths, the method
        # with the shortest fixed time is the fastest of them.
        edge, _, index = min(edges, default=(high, 0.0, 0))
        if edge >= high:
            return [*wins, Win(best, first, high)]
        # The result omits methods that are fastest only at a single bandwidth.
        if edge > first:
            wins.append(Win(best, first, edge))
            first = edge
        best = methods[index]


def prediction_errors(methods: Iterable[MethodCost]) -> dict[Run, float]:
    """Return each run's relative prediction error (predicted / measured - 1) of the step time.

    The result contains only runs on an emulated network with a single switch.
    """
    return {
        run: method.seconds(network.bandwidth, network.latency) / seconds - 1
        for method in methods
        for run, network, (seconds, _, _) in emulated_runs(method)
    }


def emulated_runs(method: MethodCost) -> list[tuple[Run, Network, tuple[float, float, float]]]:
    """Return (run, network, (median, p10, p90) of step seconds) for runs on emulated switches."""
    return [
        (run, network, (step["median"] / 1e3, step["p10"] / 1e3, step["p90"] / 1e3))
        for run in method.runs
        if (network := _switch(run)) is not None
        for step in [run.metrics["step_ms"]]
    ]


def winners_text(wins: Sequence[Win]) -> str:
    """Return the fastest methods as text, such as `TopK up to 1.2 Gb/s, then no compression`."""
    *before, last = wins
    texts = [f"{win.method.name} up to {bits_text(win.last)}" for win in before]
    return ", then ".join([*texts, last.method.name if texts else f"{last.method.name} throughout"])


def _link_costs(run: Run, costs: StepCosts) -> tuple[float, float, float]:
    """Return the costs of a step: work, messages, and bytes on the busiest link."""
    size = int(run.metrics["workers"])
    exchange = run.metrics.get("exchange") or run.experiment.get("strategy") or {}
    name = exchange.get("algorithm")
    if name in ALLREDUCE and costs.messages:
        formula = ALLREDUCE[name].counts(size)
        volume = float(formula.bytes(costs.payload).sum())
        if abs(volume - costs.sent) <= _AS_COUNTED * costs.sent:
            # If the sent bytes agree with the allreduce algorithm's formula, the payload keeps its
            # size along its route. If the allreduce algorithm has several phases, the cost model
            # uses the most expensive phase.
            phase = max(modelled(name, size), key=lambda schedule: (schedule.beta, schedule.alpha))
            times = costs.messages / float(formula.messages.sum())
            return costs.work, phase.alpha * times, phase.beta * costs.payload
    # If the sent bytes differ from the allreduce algorithm's formula, the payload's size changes
    # along its route. For a payload of changing size, the cost model uses counts of the busiest
    # rank. The counts are the busiest rank's messages and bytes.
    return costs.work, costs.busiest_messages, costs.busiest


def _switch(run: Run) -> Network | None:
    """Return a run's emulated network if it consists of a single switch, and otherwise None."""
    record = run.experiment.get("network")
    network = Network(**record) if isinstance(record, dict) else Network.parse(record)
    plain = network is not None and network.hosts is None and network.links is None
    return network if plain else None


# The kind "intra" means threads within an operation, and the kind "inter" means threads for
# parallel operations.
KINDS = ("intra", "inter")


class StepTime(NamedTuple):
    """The median step time in ms of one repeat, with its batch size and thread counts."""

    batch: int
    intra: int
    inter: int
    repeat: int
    step_ms: float


@dataclass(frozen=True)
class ThreadSweep:
    """Step times for all measured combinations of thread counts.

    Attributes:
        timed: One entry per batch size, pair of thread counts, and repeat.
        cores: Number of CPU cores that the measured processes may use.
    """

    timed: Sequence[StepTime]
    cores: int

    def to_dataframe(self) -> pandas.DataFrame:
        """Return the measurements as a table with columns batch, intra, inter, repeat, step_ms."""
        import pandas as pd

        return pd.DataFrame(list(self.timed))


def thread_costs(sweep: ThreadSweep) -> pandas.DataFrame:
    """Return median, minimum and maximum step times over repeats, by batch size and threads."""
    timed = sweep.to_dataframe().groupby(["batch", "intra", "inter"])["step_ms"]
    columns = {"step_ms": "median", "step_ms_low": "min", "step_ms_high": "max"}
    return timed.agg(**columns).reset_index()


def more_is_less(sweep: ThreadSweep) -> pandas.DataFrame:
    r"""Return the lowest thread count that slows steps down, by batch size and kind of thread.

    The function varies one thread count, and keeps the other at the value of the fastest step. Let
    \(t_r(k)\) be the step time with \(k\) threads in repeat \(r\). Let \(k^*\) be the thread count
    with the lowest median step time. The column `less_from` is the smallest \(k > k^*\) from which
    on steps are slower. For all measured \(j \geq k\) and all repeats, \(t_r(j)/t_r(k^*)\) exceeds
    1. The column `less_from` is empty if the highest thread count is not slower in every repeat.
    With only one repeat, the column `less_from` has no value either. The column `ratio` is the
    median of \(t_r(j)/t_r(k^*)\) over the repeats for \(j\) = `less_from`. The columns `ratio_low`
    and `ratio_high` are the minimum and maximum of \(t_r(j)/t_r(k^*)\).
    """
    import pandas as pd

    return pd.DataFrame([row for batch in _batches(sweep) for row in _slowdowns(sweep, batch)])


def _batches(sweep: ThreadSweep) -> list[int]:
    return list(dict.fromkeys(measurement.batch for measurement in sweep.timed))


def _slowdowns(sweep: ThreadSweep, batch: int) -> Iterator[dict[str, float | str]]:
    timed = sweep.to_dataframe()
    steps = timed[timed["batch"] == batch].pivot_table(
        index="repeat", columns=list(KINDS), values="step_ms"
    )
    best: tuple[int, int] = steps.median().idxmin()
    for index, kind in enumerate(KINDS):
        # A candidate is a pair of thread counts, one per kind of thread. A candidate may differ
        # from the fastest pair only in the count of `kind`.
        candidates = sorted(pair for pair in steps if pair[1 - index] == best[1 - index])
        row: dict[str, float | str] = {"batch": batch}
        row |= {"threads": kind, "best": best[index], "other": best[1 - index]}
        row |= {"best_ms": float(steps[best].median()), "most": candidates[-1][index]}
        row |= dict.fromkeys(("less_from", "ratio", "ratio_low", "ratio_high"), nan)
        # The search starts at the highest thread count and goes down. The search stops at a count
        # that is not slower than the best in some repeat.
        for pair in candidates[: candidates.index(best) : -1] if len(steps) > 1 else []:
            ratio = steps[pair] / steps[best]
            if ratio.min() <= 1:
                break
            row |= {"less_from": pair[index], "ratio": float(ratio.median())}
            row |= {"ratio_low": float(ratio.min()), "ratio_high": float(ratio.max())}
        yield row
