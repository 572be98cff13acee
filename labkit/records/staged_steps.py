"""Measured and predicted training steps of runs whose model is divided into pipeline stages."""

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
ITERATIONS = 3  # Figures of delayed gradients show three consecutive iterations.
# The simulation runs ten iterations per module, after which the delays of gradients are constant.
SETTLING_ITERATIONS = 10


def is_staged(run: Run) -> bool:
    """Return whether the model of a run is divided into stages."""
    kind = STRATEGIES.get(run.experiment["strategy"]["name"])
    return kind is not None and issubclass(kind, Staged)


def strategy_of(run: Run) -> Staged:
    """Return the strategy of a run with a model that is divided into stages."""
    fields = dict(run.experiment["strategy"])
    kind = STRATEGIES[fields.pop("name")]
    # The assertion only informs the type checker, because callers already check `is_staged`.
    assert issubclass(kind, Staged)
    return kind(**fields)


def stage_events(run: Run) -> pandas.DataFrame:
    """Return events of one replica, with rank, step, action, stage, number, start and stop.

    The events come from the first seed, its first replica, and the first tensor-parallel slice of
    each stage. The column `number` contains the number of the micro-batch.

    Raises:
        LabkitError: If the run has no timeline of stages.
    """
    timeline = next((r.timeline for r in (run, *run.seeds) if not r.timeline.empty), run.timeline)
    parts = timeline["kind"].astype(str).str.extract(r"^([a-z_]+) (\d+)$")
    is_stage_event = parts[0].isin((*ROWS, "update"))
    if not is_stage_event.any():
        raise LabkitError(
            f"{run.name} has no timeline of stages (state: {run.status['state']}); give a "
            "completed run of lk.Pipeline, lk.Layerwise or lk.DelayedGradients"
        )
    # In timelines of pipeline stages, the column `bucket` contains the micro-batch number. All
    # timelines have the same columns.
    events = timeline[is_stage_event].rename(columns={"bucket": "number"})
    events = events.assign(
        action=parts[0][is_stage_event], stage=parts[1][is_stage_event].astype(int)
    )
    events = events[["rank", "step", "action", "stage", "number", "start", "stop"]]
    slices = strategy_of(run).tensor_parallel_size if is_staged(run) else 1
    first_lane = (events["rank"] < _ranks(run) * slices) & (events["rank"] % slices == 0)
    return events[first_lane].reset_index(drop=True)


def measured_pipeline(run: Run, step: int | None = None) -> PipelineSimulation:
    """Return one measured step (three with delayed gradients) as a `PipelineSimulation`.

    On an emulated network, the send of a message ends when its receiver has received it.

    Args:
        run: Run of `lk.Pipeline`, `lk.Layerwise` or `lk.DelayedGradients`; only its first replica
            is used.
        step: Number of the training step. The default is the step of median duration among all
            steps after the first ten.

    Raises:
        LabkitError: If the run has no timeline of stages.
        InvalidInput: If the run has no complete events for the step with this number.
    """
    simulations = measured_steps(run, None if step is None else [step])
    if not simulations:
        raise InvalidInput(f"{run.name} has no complete step {'' if step is None else step}")
    # The function returns the step with the median duration, not a mean step. All returned times
    # were therefore really measured.
    return sorted(simulations, key=lambda step_simulation: step_simulation.seconds)[
        len(simulations) // 2
    ]


def measured_steps(run: Run, steps: Iterable[int] | None = None) -> list[PipelineSimulation]:
    """Return measured training steps as `PipelineSimulation` objects, see `measured_pipeline`.

    By default, all training steps after the first ten are returned.
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
    # A training step with incomplete events has fewer rows than other steps, and is omitted.
    most_rows = max((len(step_simulation.table) for step_simulation in simulations), default=0)
    return [
        step_simulation
        for step_simulation in simulations
        if len(step_simulation.table) == most_rows
    ]


def predicted_pipeline(run: Run) -> PipelineSimulation:
    """Simulate a run's training step with the measured compute time of each action.

    The simulated messages use the network of the run. The simulated computation times are medians
    of measured times, so they already include slowdowns of stragglers.

    Raises:
        LabkitError: If the run has no timeline of stages.
    """
    events, strategy = stage_events(run), strategy_of(run)
    modules = _ranks(run)
    iterations = SETTLING_ITERATIONS * modules + ITERATIONS
    table = strategy.table(modules, iterations)
    seconds = stage_seconds(events, table.stages)
    rows = strategy.rows(run.experiment["batch_size"], run.experiment["workers"])
    # A stage sends bytes in proportion to the number of samples in a micro-batch.
    nbytes = rows * np.array(run.metrics["partition"]["bytes_a_row"], np.float64)
    # A micro-batch of a recurrent model is a segment of the input's time steps.
    if table.recurrent:
        nbytes /= table.microbatches
    network = _network(run)
    # Measured times already include the slowdown of stragglers, so the simulation must not add it
    # again.
    free = None if network is None else network.model_copy(update={"stragglers": {}})
    backward = seconds["backward"] if seconds["backward"].any() else seconds["backward_input"]
    forward, weight = seconds["forward"], seconds["backward_weight"]
    simulation = simulate_pipeline(table, forward, backward, weight, network=free, nbytes=nbytes)
    simulation = replace(simulation, network=network)
    if not strategy.unlocked:
        return simulation
    # The last simulated iteration is omitted, because some of its messages are never sent.
    last = iterations - 1
    delays = np.where(_is_backward(table), modules - 1 - table.stage, 0)
    step = table.microbatch + delays
    return _select(simulation, (step >= last - ITERATIONS) & (step < last))


def predicted_rows(run: Run) -> list[Record]:
    """Return the predicted events of each rank as timeline rows from each step's start.

    The kind of a row names the pass, such as `predicted forward 0`. With delayed gradients, the
    rows begin with the first step after the warm-up steps. For a run that has no stages or no
    timeline, the list is empty.
    """
    if not is_staged(run) or run.timeline.empty:
        return []
    simulation, events, strategy = predicted_pipeline(run), stage_events(run), strategy_of(run)
    starts = events[events["action"] != "update"].groupby("step")["start"].min()
    starts = starts.loc[steady_steps(starts.index)[:1]] if strategy.unlocked else starts
    # Send events are omitted, because a send does not block the sender. Receive events already show
    # when messages arrive.
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
    """Return each action's median seconds over steps after the warm-up, for each stage."""
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
    """Return a simulation with measured times, limited to the schedule rows that have events."""
    import pandas as pd

    times: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    events = pd.concat(parts).sort_values("start", kind="stable")
    columns = ("action", "stage", "number", "start", "stop")
    for action, stage, number, start, stop in zip(*(events[c] for c in columns), strict=True):
        times.setdefault((action, int(stage), int(number)), []).append((start, stop))
    chosen, start, stop = [], [], []
    for index, (_, stage, action, number, _) in enumerate(table.rows()):
        # A stage receives the activation of a micro-batch before its gradient. Measured times are
        # therefore assigned in the order of events.
        remaining = times.get((action, stage, number))
        if remaining:
            event_start, event_stop = remaining.pop(0)
            chosen.append(index)
            start.append(event_start)
            stop.append(event_stop)
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
    """Return a copy of a simulation in which each send ends when its message is received.

    If the network is not emulated, each send takes 0 s.
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
            # On an emulated network, a send ends when the receiving rank's measured receive ends.
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
    """Return whether each row of a pipeline schedule belongs to the backward pass."""
    is_message_back = np.where(
        table.action == "send", table.peer < table.stage, table.peer > table.stage
    )
    is_gradient: np.ndarray = np.where(table.computes, table.action == "backward", is_message_back)
    return is_gradient


def _ranks(run: Run) -> int:
    """Return the number of ranks per replica; tensor-parallel slices of a stage count once."""
    workers = int(run.experiment["workers"])
    return strategy_of(run).ranks(workers) if is_staged(run) else workers


def _network(run: Run) -> Network | None:
    """Return the network between the ranks with the first tensor-parallel slice of each stage."""
    record: Any = run.experiment.get("network")
    network = Network(**record) if isinstance(record, dict) else Network.parse(record)
    if network is None:
        return network
    slices = strategy_of(run).tensor_parallel_size
    first_lane = range(0, _ranks(run) * slices, slices)
    return network.part(first_lane, int(run.experiment["workers"]))
