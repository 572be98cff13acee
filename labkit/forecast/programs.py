"""Forecasts of strategies that consist of programs, run with vectors that have no values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.forecast.calibration import NOTHING, Provenance, add_spreads, percentile_range
from labkit.forecast.meta import AmountLog, MetaBackend, MetaRuntime
from labkit.forecast.neighbours import typical_interval
from labkit.forecast.query import Query, StepForecast, network_error_sources
from labkit.forecast.workers import (
    PLAYED,
    Crowd,
    Pace,
    ProgramWorkers,
    measured_distribution,
    meta_roles,
    run_deviation,
    sample_network,
    shapes_of,
    slowdowns_of,
)
from labkit.network import ComputeTime
from labkit.programs import EventLog, Roles
from labkit.programs.actions import TimingModel
from labkit.programs.event_log import Row
from labkit.programs.virtual_runtime import VirtualRuntime

# Times count as equal within this relative tolerance, which exceeds the rounding errors of a few
# sums.
SAME = 1e-11
COMPARED = (
    *("seconds", "compute_seconds", "codec_seconds", "communicate_seconds", "wait_seconds"),
    *("payload_bytes", "wire_bytes", "messages"),
)


class SteadyStateDetector:
    """A detector of the steady state in a run without random times.

    The detector compares the step times and the traffic of each worker's last two cycles, step by
    step. The detector needs two equal cycles of all workers. No worker may be a cycle ahead. No
    message in transit may be older than the last two cycles. If no older messages are in transit
    after two equal cycles, all later cycles are equal too. A simulation can stop early if all later
    cycles are equal.

    Args:
        workers: Number of simulated workers.
        cycle: Number of steps after which the communication pattern repeats.
        most: Number of cycles after which the detector gives up.

    Attributes:
        cycles: Number of completed cycles that the detector needs for a comparison.
    """

    def __init__(self, workers: int, cycle: int, most: int) -> None:
        self.cycles = 2
        self._workers, self._cycle, self._most = workers, cycle, most

    def reached(self, rows: Sequence[tuple[float, Row]]) -> bool:
        """Return whether the run is steady, given each step's end time (s) and history row."""
        steps = self.cycles * self._cycle
        if self.cycles > self._most or len(rows) < steps * self._workers:
            return False
        rows_of_worker: list[list[tuple[float, Row]]] = [[] for _ in range(self._workers)]
        for row in rows:
            rows_of_worker[int(row[1]["rank"])].append(row)
        if min(map(len, rows_of_worker)) < steps:
            return False  # Some workers have too few steps for a comparison.
        compared = [worker_rows[steps - 2 * self._cycle : steps] for worker_rows in rows_of_worker]
        is_steady = self._equal_cycles(compared)
        self.cycles += not is_steady
        return is_steady

    def _equal_cycles(self, compared: Sequence[Sequence[tuple[float, Row]]]) -> bool:
        """Return whether two cycles are equal, given end times and history rows of all steps."""
        shape = self._workers, 2, self._cycle, len(COMPARED)
        values = [
            [row[name] for name in COMPARED] for worker_rows in compared for _, row in worker_rows
        ]
        first, second = np.moveaxis(np.array(values).reshape(shape), 1, 0)
        ends = np.array([worker_rows[-1][0] for worker_rows in compared])  # s, shape (workers,)
        durations = second[:, :, 0].sum(1)
        tolerance = SAME * float(ends.max())
        equal = np.allclose(first, second, rtol=SAME, atol=tolerance)
        return bool(
            equal and np.ptp(durations) <= tolerance and np.ptp(ends) <= durations[0] + tolerance
        )


# Each worker does `WARM` steps before the measurement, and `STEPS` steps in the measurement.
WARM, STEPS = 10, 30


class _MeasurementDone(Exception):
    """The exception that ends a run when all steps of the measurement are done."""


@dataclass(frozen=True)
class ProgramRun:
    """A simulated run of a strategy's programs, whose vectors have sizes but no values.

    Attributes:
        rows: End time (s) and history row of each step of the workers.
        begin, end: Start and end of the measured interval, s.
        batches: Number of global batches in the measured interval.
        batch_seconds: Seconds of each global batch in the measured interval.
        tally: Amounts (such as bytes) that occur during the whole run, each with its time.
        event_log: Event log of the whole run.
        roles: Roles of the programs, such as worker and server.
        overheads: Whether the times of messages include labkit's measured overhead.
    """

    rows: Sequence[tuple[float, Row]]
    begin: float
    end: float
    batches: int
    batch_seconds: np.ndarray
    tally: AmountLog
    event_log: EventLog
    roles: Roles
    overheads: bool

    @property
    def seconds(self) -> float:
        """The mean seconds of a global batch in the measured interval."""
        return (self.end - self.begin) / self.batches


def of_program(
    query: Query, strategy: ProgramWorkers, cycle: int = 1, sample: Crowd | None = None
) -> StepForecast:
    """Return a strategy's forecast from a run of its programs with vectors that have only sizes.

    Args:
        query: Query with the experiment and the calibration.
        strategy: Strategy that creates the programs.
        cycle: Number of steps after which a worker's communication pattern repeats.
        sample: Sample of workers that represents all workers, or None if all workers run. A sample
            requires a network with one switch.
    """
    single_switch = query.network is None or (query.network.hosts, query.network.links) == (
        None,
        None,
    )
    if sample is None or not single_switch:
        sample = Crowd(strategy, query.workers)
    run = run_program(query, cycle, sample)
    step = query.compute_step(query.experiment.batch_size / query.workers)
    measured_rows = [row for now, row in run.rows if run.begin < now <= run.end]
    amounts = run.tally.between(run.begin, run.end)
    sums = {
        name: sum(row[f"{name}_seconds"] for row in measured_rows)
        for name in ("compute", "codec", "communicate", "wait")
    }
    part_seconds = {name: getattr(step, name).median for name in ("forward", "backward", "other")}
    total = sum(part_seconds.values())
    shares = (
        {n: seconds / total for n, seconds in part_seconds.items()} if total else {"backward": 1.0}
    )
    parts = {name: share * sums["compute"] for name, share in shares.items()}
    update, codec = (amounts.get(name, 0.0) for name in ("update", "codec"))
    parts |= {"update": update, "codec": sums["codec"] + codec, "wait": sums["wait"]}
    parts["wire"] = max(0.0, sums["communicate"] - update - codec)
    scale = run.seconds / (sum(parts.values()) or 1.0)
    parts = {name: scale * part for name, part in parts.items()}
    periods = run.batch_seconds.reshape(-1, cycle).mean(1)
    low, high = percentile_range(periods)
    message = query.overhead_cost("message") if run.overheads else NOTHING
    links = run.tally.between(run.begin, run.end, "link ")
    return StepForecast(
        parts=parts,
        rows=max(query.rows),
        spread=typical_interval(
            query, step, parts, message, math.sqrt(cycle) * run_deviation(periods)
        ),
        nbytes={name: link / run.batches for name, link in links.items()},
        memory=_memory(query, strategy),
        sources=_sources(query, sample, run),
        more={**_more(run, amounts, query.workers), "step_low": low, "step_high": high},
    )


def run_program(query: Query, cycle: int, sample: Crowd) -> ProgramRun:
    """Run the programs until the time of a global batch is known, or until two cycles are equal."""
    strategy, workers = sample.strategy, sample.workers
    if strategy.replica_cut != 1:
        raise InvalidInput(
            f"workers with model parallelism (stages or grid = {strategy.replica_cut}) have no "
            "forecast; give stages=1 and no grid, or use Pipeline or SpatialParallel"
        )
    roles = meta_roles(query, strategy, workers)
    rows = query.rows[:workers]
    outputs = query.model.layers[-1].out / query.dtype.itemsize if query.model.layers else 1.0
    backend = MetaBackend(
        rows, roles.weights.size, str(roles.weights.dtype), query.model.slots, outputs
    )
    event_log, tally = EventLog(backend, roles.steps, writers=range(workers)), AmountLog()
    network, represented = sample_network(query, roles, sample)
    pace = _pace(query, roles, rows, sample)
    runtime = MetaRuntime(
        {number: strategy.program(roles, number) for number in range(len(roles.hosts))},
        *(roles.hosts, backend, event_log, pace, tally),
        network=network,
        shapes=shapes_of(query),
        represented=represented,
        workers_per_worker=query.workers / workers,
    )
    backend.now = lambda: runtime.now
    warmup_steps, measured_steps = (WARM, STEPS) if workers <= 4 * PLAYED else (1, 1)
    warmup_steps, measured_steps = (
        cycle * math.ceil(count / cycle) for count in (warmup_steps, measured_steps)
    )
    row_limit = (warmup_steps + measured_steps) * workers

    # The detector gives up one cycle after the warm-up. Later, the detector could no longer shorten
    # the simulation.
    detector = SteadyStateDetector(workers, cycle, 1 + warmup_steps // cycle)
    active_detector = detector if _is_deterministic(query, strategy, pace) else None

    def stop_when_measured(runtime: VirtualRuntime) -> None:
        nonlocal warmup_steps, measured_steps, row_limit
        if active_detector is not None and active_detector.reached(backend.rows):
            warmup_steps, measured_steps = (active_detector.cycles - 1) * cycle, cycle
            row_limit = (warmup_steps + measured_steps) * workers
        if len(backend.rows) >= row_limit:
            raise _MeasurementDone

    with suppress(_MeasurementDone):
        runtime.play(stop_when_measured)
    ends = np.sort([now for now, _ in backend.rows])[workers - 1 : row_limit : workers]
    ends = ends[warmup_steps - 1 :]
    begin, end, batches = float(ends[0]), float(ends[-1]), len(ends) - 1
    batch_seconds, overheads = np.diff(ends), pace.overheads
    return ProgramRun(
        backend.rows, begin, end, batches, batch_seconds, tally, event_log, roles, overheads
    )


def _is_deterministic(query: Query, strategy: ProgramWorkers, pace: Pace) -> bool:
    """Return whether a run has no random times and no exceptionally long steps."""
    network, even = query.network, all(timing.even for timing in pace.laws)
    # A link with first-in-first-out sharing is excluded, because rounding errors decide the order
    # of two simultaneous messages.
    fair_links = network is None or (not network.jitter and network.sharing == "fair")
    return fair_links and even and strategy.recurs(query.experiment)


def _pace(query: Query, roles: Roles, rows: Sequence[int], sample: Crowd) -> Pace:
    """Return the timing of workers, servers and messages from measured costs."""
    experiment = query.experiment
    virtual = experiment.virtual
    compute_time = query.compute_time or ComputeTime()
    is_measured = compute_time.seconds is None and compute_time.trace is None
    timing_of_rows: dict[int, TimingModel] = {}
    slow = slowdowns_of(query, sample.workers)
    later = (
        {(worker, step): seconds for worker, step, seconds in virtual.message_delays}
        if virtual
        else {}
    )
    for row in set(rows):
        distribution, seconds, update = compute_time, 0.0, compute_time.update or 0.0
        if is_measured:
            step = query.step(max(1, row))
            spread = reduce(add_spreads, (step.forward, step.backward, step.other))
            distribution, seconds = (
                measured_distribution(query, compute_time, spread),
                spread.median,
            )
            update = step.update.median if compute_time.update is None else compute_time.update
        arguments = distribution, slow, experiment.seed, seconds, update, later
        timing_of_rows[row] = TimingModel(*arguments, experiment.faults)
    sizes = {n: roles.part(n).size / max(1, roles.weights.size) for n in roles.servers}
    if not is_measured:
        sizes = dict.fromkeys(sizes, 1.0)
    return Pace(
        *(query, [timing_of_rows[row] for row in rows], sizes, roles.hosts),
        *(sample.servers, sample.servers * sample.workers / query.workers, sample.everyone),
        overheads=not query.virtual and (query.emulated or query.network is None),
    )


def _memory(query: Query, strategy: ProgramWorkers) -> dict[str, float]:
    """Return the bytes per memory category on the worker or server that needs the most memory."""
    worker = query.memory(query.experiment.batch_size / query.workers)
    worker["buffers"] = worker["weights"]
    parts = strategy.parts(shapes_of(query))
    if not parts:
        return worker
    largest_share = max(part.size for part in parts) / max(1, query.model.parameters)
    server = {name: largest_share * worker[name] for name in ("weights", "gradients", "optimizer")}
    server["buffers"] = query.workers * server["weights"]
    worker["optimizer"] = 0.0
    return max((worker, server), key=lambda memory: sum(memory.values()))


def _more(run: ProgramRun, amounts: Mapping[str, float], workers: int) -> dict[str, float]:
    events = [e for e in run.event_log.events if run.begin < e["applied"] <= run.end]
    figures = {
        "played_workers": float(run.roles.workers),
        "sent": amounts.get("sent", 0.0) / run.batches,
    }
    staleness = [event["staleness"] for event in events]
    if staleness and run.roles.workers == workers:
        figures["staleness"] = float(np.mean(staleness))
        figures["dropped"] = sum(event["update"] < 0 for event in events) / len(events)
    return figures


def _sources(query: Query, sample: Crowd, run: ProgramRun) -> tuple[Provenance, ...]:
    compute_time = query.compute_time
    is_given = compute_time is not None and (
        compute_time.seconds is not None or compute_time.trace is not None
    )
    compute_source = query.compute_source(query.experiment.batch_size / query.workers, "by rows")
    figures = [
        Provenance("compute", "the distribution or trace that the experiment gives")
        if is_given
        else compute_source,
        Provenance("order and waiting", "the workers' programs, executed without arrays"),
        Provenance(
            "messages",
            "the network, which messages share" if query.network else "only measured overheads",
        ),
    ]
    if run.overheads:
        figures.append(query.overhead_source("message"))
    figures += network_error_sources(query)
    if sample.workers < query.workers:
        description = f"{sample.workers} simulated workers represent {query.workers}"
        figures.append(
            Provenance("crowd", f"{description}; their ranks carry the traffic of all workers")
        )
    return tuple(figures)
