"""Measured and predicted steps of runs whose model is cut into stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.common.errors import InvalidInput, LabkitError
from labkit.network import Network
from labkit.records.run import Run
from labkit.records.store import Record
from labkit.records.timed_steps import steady_steps
from labkit.schedules.pipeline import ScheduleTable
from labkit.simulate.pipeline import PipelineSimulation, simulate_pipeline
from labkit.strategies import STRATEGIES
from labkit.strategies.staged import Staged

if TYPE_CHECKING:
    import pandas

COMPUTES = ("forward", "backward", "backward_input", "backward_weight")
ROWS = (*COMPUTES, "send", "receive")
ITERATIONS = 3  # number of iterations that figures show for delayed gradients
SETTLING_ITERATIONS = 10  # iterations per module (stage) until their delays are constant


def is_staged(run: Run) -> bool:
    """Return True if the model of this run is cut into stages."""
    kind = STRATEGIES.get(run.experiment["strategy"]["name"])
    return kind is not None and issubclass(kind, Staged)


def strategy_of(run: Run) -> Staged:
    """Return the strategy of a run whose model is cut into stages."""
    fields = dict(run.experiment["strategy"])
    kind = STRATEGIES[fields.pop("name")]
    assert issubclass(kind, Staged)  # for the type checker; callers have called `is_staged`
    return kind(**fields)


def stage_events(run: Run) -> pandas.DataFrame:
    """Return the events of the first replica: rank, step, action, stage, number, start, stop.

    The events come from the first seed, and from the first tensor-parallel slice of each stage.
    `number` is the micro-batch.

    Raises:
        LabkitError: The run has no timeline of stages.
    """
    timeline = next((r.timeline for r in (run, *run.seeds) if not r.timeline.empty), run.timeline)
    parts = timeline["kind"].astype(str).str.extract(r"^([a-z_]+) (\d+)$")
    is_stage_event = parts[0].isin((*ROWS, "update"))
    if not is_stage_event.any():
        raise LabkitError(
            f"{run.name} has no timeline of stages (state: {run.status['state']}); give a "
            "completed run of lk.Pipeline, lk.Layerwise or lk.DelayedGradients"
        )
    # Timelines have the same columns for all strategies; with stages, bucket is the micro-batch.
    events = timeline[is_stage_event].rename(columns={"bucket": "number"})
    events = events.assign(
        action=parts[0][is_stage_event], stage=parts[1][is_stage_event].astype(int)
    )
    events = events[["rank", "step", "action", "stage", "number", "start", "stop"]]
    slices = strategy_of(run).tensor_parallel_size if is_staged(run) else 1
    first_lane = (events["rank"] < _ranks(run) * slices) & (events["rank"] % slices == 0)
    return events[first_lane].reset_index(drop=True)


def measured_pipeline(run: Run, step: int | None = None) -> PipelineSimulation:
    """Return one measured step (three with delayed gradients) in the form of a simulation.

    On an emulated network, a message lasts from its send until its receipt.

    Args:
        run: Run of `lk.Pipeline`, `lk.Layerwise` or `lk.DelayedGradients`; only its first replica
            is used.
        step: Number of the step; default: the step of median duration, of all steps after the first
            ten.

    Raises:
        LabkitError: The run has no timeline of stages.
        InvalidInput: The run has no complete step of this number.
    """
    simulations = measured_steps(run, None if step is None else [step])
    if not simulations:
        raise InvalidInput(f"{run.name} has no complete step {'' if step is None else step}")
    # The result is the median step and not a mean, so that every time was measured.
    return sorted(simulations, key=lambda step_simulation: step_simulation.seconds)[
        len(simulations) // 2
    ]


def measured_steps(run: Run, steps: Iterable[int] | None = None) -> list[PipelineSimulation]:
    """Return measured steps in the form of simulations, see `measured_pipeline`.

    By default, all steady steps are returned (all steps after the first ten).
    """
    events = stage_events(run)
    events = events[events["action"] != "update"]
    strategy = strategy_of(run)
    iterations = ITERATIONS if strategy.unlocked else 1
    groups = {int(number): part for number, part in events.groupby("step")}
    chosen_steps = steady_steps(groups) if steps is None else list(steps)
    table = strategy.table(_ranks(run), max(groups) + 1)
    simulations = []
    for step in chosen_steps:
        if all(step_simulation in groups for step_simulation in range(step, step + iterations)):
            parts = [groups[step_simulation] for step_simulation in range(step, step + iterations)]
            simulations.append(_as_simulation(run, table, parts))
    # A step with lost events has fewer rows than the other steps, and is left out.
    most_rows = max((len(step_simulation.table) for step_simulation in simulations), default=0)
    return [
        step_simulation
        for step_simulation in simulations
        if len(step_simulation.table) == most_rows
    ]


def predicted_pipeline(run: Run) -> PipelineSimulation:
    """Return the simulation of a run's step, from the median seconds of each stage's actions.

    The simulation uses the run's network. Its computation times are measured, and so include the
    slowdown of stragglers.

    Raises:
        LabkitError: The run has no timeline of stages.
    """
    events, strategy = stage_events(run), strategy_of(run)
    modules = _ranks(run)
    iterations = SETTLING_ITERATIONS * modules + ITERATIONS
    table = strategy.table(modules, iterations)
    seconds = stage_seconds(events, table.stages)
    rows = strategy.rows(run.experiment["batch_size"], run.experiment["workers"])
    # The bytes across a cut are proportional to the samples of a micro-batch.
    nbytes = rows * np.array(run.metrics["partition"]["bytes_a_row"], np.float64)
    if table.recurrent:  # Each micro-batch is a range of time steps.
        nbytes /= table.microbatches
    network = _network(run)
    # Measured times include the slowdown of stragglers, so the simulation must not add it again.
    free = None if network is None else network.model_copy(update={"stragglers": {}})
    backward = seconds["backward"] if seconds["backward"].any() else seconds["backward_input"]
    forward, weight = seconds["forward"], seconds["backward_weight"]
    simulation = simulate_pipeline(table, forward, backward, weight, network=free, nbytes=nbytes)
    simulation = replace(simulation, network=network)
    if not strategy.unlocked:
        return simulation
    last = iterations - 1  # left out: some of its messages are never sent
    delays = np.where(_is_backward(table), modules - 1 - table.stage, 0)
    step = table.microbatch + delays
    return _select(simulation, (step >= last - ITERATIONS) & (step < last))


def predicted_rows(run: Run) -> list[Record]:
    """Return the predicted events of each rank, from the start of each step, as timeline rows.

    The rows' kinds are `predicted forward 0` and so on. With delayed gradients, rows exist only
    from the first steady step. The list is empty for a run without stages or without a timeline.
    """
    if not is_staged(run) or run.timeline.empty:
        return []
    simulation, events, strategy = predicted_pipeline(run), stage_events(run), strategy_of(run)
    starts = events[events["action"] != "update"].groupby("step")["start"].min()
    starts = starts.loc[steady_steps(starts.index)[:1]] if strategy.unlocked else starts
    # Sends are left out, because they do not block the sender, and the receive shows the arrival.
    ranks = (simulation.table.rank * strategy.tensor_parallel_size).tolist()
    times = zip(
        ranks,
        simulation.table.rows(),
        simulation.start.tolist(),
        simulation.stop.tolist(),
        strict=True,
    )
    rows = [
        (rank, f"predicted {action} {stage}", number, start, stop)
        for rank, (_, stage, action, number, _), start, stop in times
        if action != "send"
    ]
    names = ("rank", "kind", "bucket", "step", "start", "stop")
    return [
        dict(
            zip(
                names,
                (rank, kind, number, step, step_start + start, step_start + stop),
                strict=True,
            )
        )
        for step, step_start in starts.items()
        for rank, kind, number, start, stop in rows
    ]


def stage_seconds(events: pandas.DataFrame, stages: int) -> dict[str, np.ndarray]:
    """Return each action's median seconds over steady steps, by stage: shape (stages,)."""
    steady_events = events[events["step"].isin(steady_steps(events["step"]))]
    medians = (
        (steady_events["stop"] - steady_events["start"])
        .groupby([steady_events["action"], steady_events["stage"]])
        .median()
    )
    return {
        action: np.array([float(medians.get((action, stage), 0.0)) for stage in range(stages)])
        for action in COMPUTES
    }


def _as_simulation(
    run: Run, table: ScheduleTable, parts: list[pandas.DataFrame]
) -> PipelineSimulation:
    """Return those rows of the schedule table that have events, with the times of the events."""
    import pandas as pd

    times: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    events = pd.concat(parts).sort_values("start", kind="stable")
    columns = ("action", "stage", "number", "start", "stop")
    for action, stage, number, start, stop in zip(*(events[c] for c in columns), strict=True):
        times.setdefault((action, int(stage), int(number)), []).append((start, stop))
    chosen, start, stop = [], [], []
    for index, (_, stage, action, number, _) in enumerate(table.rows()):
        # A stage receives a micro-batch's activation before its gradient, so times match in order.
        remaining = times.get((action, stage, number))
        if remaining:
            event_start, event_stop = remaining.pop(0)
            chosen.append(index)
            start.append(event_start)
            stop.append(event_stop)
    # Times count from the step's first event.
    first_start = min(start)
    rows = table.take(np.array(chosen))
    simulation = PipelineSimulation(
        rows,
        _network(run),
        np.array(start) - first_start,
        np.array(stop) - first_start,
        measured=True,
    )
    return _with_deliveries(simulation)


def _with_deliveries(simulation: PipelineSimulation) -> PipelineSimulation:
    """Return the simulation with sends that end when the message is received.

    Without an emulated network, sends take 0 s.
    """
    rows = simulation.table.rows()
    received = {
        (peer, stage, number): index
        for index, (_, stage, action, number, peer) in enumerate(rows)
        if action == "receive"
    }
    stop = simulation.stop.copy()
    for index, (_, stage, action, number, peer) in enumerate(rows):
        if action == "send":
            # A send ends when its receive ends, which the receiving rank measures.
            receive_index = received.get((stage, peer, number))
            takes_time = simulation.network is not None and receive_index is not None
            stop[index] = simulation.stop[receive_index] if takes_time else simulation.start[index]
    return replace(simulation, stop=stop)


def _select(simulation: PipelineSimulation, rows: np.ndarray) -> PipelineSimulation:
    first_start = simulation.start[rows].min()
    table = simulation.table.take(rows)
    return replace(
        simulation,
        table=table,
        start=simulation.start[rows] - first_start,
        stop=simulation.stop[rows] - first_start,
    )


def _is_backward(table: ScheduleTable) -> np.ndarray:
    """Return a mask of the rows that belong to the backward pass."""
    is_message_back = np.where(
        table.action == "send", table.peer < table.stage, table.peer > table.stage
    )
    is_gradient: np.ndarray = np.where(table.computes, table.action == "backward", is_message_back)
    return is_gradient


def _ranks(run: Run) -> int:
    """Return the number of ranks of a replica; with tensor parallelism, of one slice of it."""
    workers = int(run.experiment["workers"])
    return strategy_of(run).ranks(workers) if is_staged(run) else workers


def _network(run: Run) -> Network | None:
    """Return the network between the ranks that hold the first slice of each stage."""
    record: Any = run.experiment.get("network")
    network = Network(**record) if isinstance(record, dict) else Network.parse(record)
    if network is None:
        return network
    slices = strategy_of(run).tensor_parallel_size
    first_lane = range(0, _ranks(run) * slices, slices)
    return network.part(first_lane, int(run.experiment["workers"]))
