"""Runs whose model was cut into stages: their steps as they were, and as they are predicted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.common.errors import InvalidInput, LabkitError
from labkit.network import Network
from labkit.records.run import Run
from labkit.records.store import Record
from labkit.records.timed_steps import steady
from labkit.schedules.pipeline import Table
from labkit.simulate.pipeline import PipelineSimulation, simulate_pipeline
from labkit.strategies import STRATEGIES
from labkit.strategies.staged import Staged

if TYPE_CHECKING:
    import pandas

COMPUTES = ("forward", "backward", "backward_input", "backward_weight")
ROWS = (*COMPUTES, "send", "receive")
ITERATIONS = 3  # of delayed gradients that are shown
SETTLED = 10  # iterations a module, after which modules are no further ahead of each other


def staged(run: Run) -> bool:
    """Whether the model of this run was cut into stages."""
    kind = STRATEGIES.get(run.experiment["strategy"]["name"])
    return kind is not None and issubclass(kind, Staged)


def strategy_of(run: Run) -> Staged:
    """The strategy of a run whose model was cut into stages."""
    fields = dict(run.experiment["strategy"])
    kind = STRATEGIES[fields.pop("name")]
    assert issubclass(kind, Staged)  # for the type checker: `staged` says so of these runs
    return kind(**fields)


def stage_events(run: Run) -> pandas.DataFrame:
    """What the ranks of the first replica did: rank, step, action, stage, number, start, stop.

    Of a run with repeats those of the first seed, of stages in slices the first slice of each.

    Raises: LabkitError, where the run has no such timeline.
    """
    timeline = next((r.timeline for r in (run, *run.seeds) if not r.timeline.empty), run.timeline)
    parts = timeline["kind"].astype(str).str.extract(r"^([a-z_]+) (\d+)$")
    known = parts[0].isin((*ROWS, "update"))
    if not known.any():
        raise LabkitError(
            f"{run.name} has no timeline of stages (state: {run.status['state']}); completed runs "
            "of lk.Pipeline, lk.Layerwise and lk.DelayedGradients have one"
        )
    # A timeline has one form for all strategies: here the bucket is a micro-batch.
    found = timeline[known].rename(columns={"bucket": "number"})
    found = found.assign(action=parts[0][known], stage=parts[1][known].astype(int))
    found = found[["rank", "step", "action", "stage", "number", "start", "stop"]]
    slices = strategy_of(run).slices if staged(run) else 1
    lane = (found["rank"] < _ranks(run) * slices) & (found["rank"] % slices == 0)
    return found[lane].reset_index(drop=True)


def measured_pipeline(run: Run, step: int | None = None) -> PipelineSimulation:
    """One step of a run, as it was, in the form of a simulation; of delayed gradients three.

    A message lasts from its sending until the receiver has it, where the network is emulated.

    Args:
        run: of `lk.Pipeline`, `lk.Layerwise` or `lk.DelayedGradients`; of several replicas the
            first one is taken.
        step: which; default: one that takes as long as is usual, without the first ten.

    Raises: LabkitError: no timeline of stages. InvalidInput: the run has no such step.
    """
    found = measured_steps(run, None if step is None else [step])
    if not found:
        raise InvalidInput(f"{run.name} has no whole step {'' if step is None else step}")
    # The median step, rather than a mean of several: each row of it has really been so.
    return sorted(found, key=lambda each: each.seconds)[len(found) // 2]


def measured_steps(run: Run, steps: Iterable[int] | None = None) -> list[PipelineSimulation]:
    """Each of these steps as `measured_pipeline` has one; default: all steady ones."""
    events = stage_events(run)
    events = events[events["action"] != "update"]
    strategy = strategy_of(run)
    many = ITERATIONS if strategy.unlocked else 1
    groups = {int(number): part for number, part in events.groupby("step")}
    wanted = steady(groups) if steps is None else list(steps)
    table = strategy.table(_ranks(run), max(groups) + 1)
    found = []
    for step in wanted:
        if all(each in groups for each in range(step, step + many)):
            parts = [groups[each] for each in range(step, step + many)]
            found.append(_as_simulation(run, table, parts))
    # A step of which the timeline has lost events has fewer rows.
    whole = max((len(each.table) for each in found), default=0)
    return [each for each in found if len(each.table) == whole]


def predicted_pipeline(run: Run) -> PipelineSimulation:
    """The simulation of a run's step, from what its stages took: median seconds of each action.

    The network is that of the run; what a computation takes is as measured, slow ranks included.

    Raises: LabkitError, where the run has no timeline of stages.
    """
    events, strategy = stage_events(run), strategy_of(run)
    modules = _ranks(run)
    iterations = SETTLED * modules + ITERATIONS
    table = strategy.table(modules, iterations)
    seconds = stage_seconds(events, table.stages)
    rows = strategy.rows(run.experiment["batch_size"], run.experiment["workers"])
    # What crosses a cut grows with the rows of a micro-batch.
    nbytes = rows * np.array(run.metrics["partition"]["bytes_a_row"], np.float64)
    if table.recurrent:  # a stretch is a part of all steps
        nbytes /= table.microbatches
    network = _network(run)
    # Slow ranks were slow when they were measured: to slow them once more would count that twice.
    free = None if network is None else network.model_copy(update={"slow": {}})
    whole = seconds["backward"] if seconds["backward"].any() else seconds["backward_input"]
    forward, weight = seconds["forward"], seconds["backward_weight"]
    found = simulate_pipeline(table, forward, whole, weight, network=free, nbytes=nbytes)
    found = replace(found, network=network)
    if not strategy.unlocked:
        return found
    last = iterations - 1  # whose messages are not all sent
    late = np.where(_gradients(table), modules - 1 - table.stage, 0)
    step = table.microbatch + late
    return _only(found, (step >= last - ITERATIONS) & (step < last))


def predicted_rows(run: Run) -> list[Record]:
    """What each rank is predicted to do, from where each step began: rows as of its timeline.

    Kinds are `predicted forward 0` …; of delayed gradients only steps from the first steady one.
    None for a run whose model was not cut into stages, or that has no timeline.
    """
    if not staged(run) or run.timeline.empty:
        return []
    found, events, strategy = predicted_pipeline(run), stage_events(run), strategy_of(run)
    begins = events[events["action"] != "update"].groupby("step")["start"].min()
    begins = begins.loc[steady(begins.index)[:1]] if strategy.unlocked else begins
    # A send lasts while its rank goes on: its receiver shows when it is there.
    ranks = (found.table.rank * strategy.slices).tolist()
    times = zip(ranks, found.table.rows(), found.start.tolist(), found.stop.tolist(), strict=True)
    rows = [
        (rank, f"predicted {action} {stage}", number, start, stop)
        for rank, (_, stage, action, number, _), start, stop in times
        if action != "send"
    ]
    names = ("rank", "kind", "bucket", "step", "start", "stop")
    return [
        dict(zip(names, (rank, kind, number, step, begin + start, begin + stop), strict=True))
        for step, begin in begins.items()
        for rank, kind, number, start, stop in rows
    ]


def stage_seconds(events: pandas.DataFrame, stages: int) -> dict[str, np.ndarray]:
    """Median seconds of each action by stage, shape (stages,), over the steady steps."""
    kept = events[events["step"].isin(steady(events["step"]))]
    lasts = (kept["stop"] - kept["start"]).groupby([kept["action"], kept["stage"]]).median()
    return {
        action: np.array([float(lasts.get((action, stage), 0.0)) for stage in range(stages)])
        for action in COMPUTES
    }


def _as_simulation(run: Run, table: Table, parts: list[pandas.DataFrame]) -> PipelineSimulation:
    """The rows of the table for which there are events, with their times."""
    import pandas as pd

    times: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    events = pd.concat(parts).sort_values("start", kind="stable")
    columns = ("action", "stage", "number", "start", "stop")
    for action, stage, number, start, stop in zip(*(events[c] for c in columns), strict=True):
        times.setdefault((action, int(stage), int(number)), []).append((start, stop))
    chosen, start, stop = [], [], []
    for place, (_, stage, action, number, _) in enumerate(table.rows()):
        # Of a micro-batch a stage receives first its activation, then its gradient.
        left = times.get((action, stage, number))
        if left:
            begin, end = left.pop(0)
            chosen.append(place)
            start.append(begin)
            stop.append(end)
    # Clocks begin with the step.
    begin = min(start)
    own = table.take(np.array(chosen))
    found = PipelineSimulation(
        own, _network(run), np.array(start) - begin, np.array(stop) - begin, measured=True
    )
    return _delivered(found)


def _delivered(found: PipelineSimulation) -> PipelineSimulation:
    """Messages that last until they are received; on a network that is not emulated no time."""
    rows = found.table.rows()
    received = {
        (peer, stage, number): place
        for place, (_, stage, action, number, peer) in enumerate(rows)
        if action == "receive"
    }
    stop = found.stop.copy()
    for place, (_, stage, action, number, peer) in enumerate(rows):
        if action == "send":
            # The send of one rank ends with the receive of another, which alone knows when.
            there = received.get((stage, peer, number))
            takes_time = found.network is not None and there is not None
            stop[place] = found.stop[there] if takes_time else found.start[place]
    return replace(found, stop=stop)


def _only(found: PipelineSimulation, rows: np.ndarray) -> PipelineSimulation:
    begin = found.start[rows].min()
    table = found.table.take(rows)
    return replace(
        found, table=table, start=found.start[rows] - begin, stop=found.stop[rows] - begin
    )


def _gradients(table: Table) -> np.ndarray:
    """Rows that belong to the way back."""
    back = np.where(table.action == "send", table.peer < table.stage, table.peer > table.stage)
    found: np.ndarray = np.where(table.computes, table.action == "backward", back)
    return found


def _ranks(run: Run) -> int:
    """The ranks of one replica; where stages have slices, those of one slice."""
    workers = int(run.experiment["workers"])
    return strategy_of(run).ranks(workers) if staged(run) else workers


def _network(run: Run) -> Network | None:
    """The network as the table's ranks see it, which are the first lane: one of each stage."""
    given: Any = run.experiment.get("network")
    network = Network(**given) if isinstance(given, dict) else Network.parse(given)
    if network is None:
        return network
    slices = strategy_of(run).slices
    lane = range(0, _ranks(run) * slices, slices)
    return network.part(lane, int(run.experiment["workers"]))
