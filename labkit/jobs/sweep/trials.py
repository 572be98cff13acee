"""Trials of a search: Optuna suggests each notebook run from the results of earlier ones."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from labkit.common.canonical_json import JSON, is_number
from labkit.jobs.sweep import manifest
from labkit.jobs.sweep.grid import Axis, Draw
from labkit.jobs.sweep.sweep_plan import Search, SweepMember, SweepPlan, next_member
from labkit.records import store
from labkit.records.analysis.curves import STUDY, storage
from labkit.records.run import Run, flatten, load_runs
from labkit.records.stream import FOLDER, PRUNED, StreamReader

if TYPE_CHECKING:
    import optuna

# Labkit reads a run's metrics every WATCH_EVERY seconds; ranks write the metrics at the same
# interval.
WATCH_EVERY = 0.25
PRUNERS = {
    "median": "MedianPruner",
    "halving": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
}
Study: TypeAlias = "optuna.Study"


class Trials:
    """The notebook runs of a search: suggested by Optuna, monitored, and reported to Optuna.

    Args:
        folder: Folder of the sweep.
        found: Plan of the search, to which each suggested notebook run is added.
        search: Objective of the search, and the possible values of each parameter.
    """

    def __init__(self, folder: Path, found: SweepPlan, search: Search) -> None:
        self.folder, self.plan, self.search = folder, found, search
        self._study = study(folder, search)
        if not self._study.get_trials(deepcopy=False):
            for values in search.enqueued:
                chosen = {name: _choice(value) for name, value in values.items()}
                self._study.enqueue_trial(chosen)
        self._distributions = {name: _distribution(axis) for name, axis in search.axes.items()}
        self._readers: dict[str, StreamReader] = {}
        self._watched_at: dict[str, float] = {}
        # The constructor reports notebook runs to Optuna that completed after the sweep was killed.
        for member in found.members:
            if self._is_open(member) and manifest.is_done(folder, found, member):
                self.tell(member, "completed")
        self.left = search.trials - self.done - len(self.open)

    @property
    def states(self) -> Counter[str]:
        """The number of trials in each of Optuna's states."""
        return Counter(trial.state.name for trial in self._study.get_trials(deepcopy=False))

    @property
    def done(self) -> int:
        """The number of completed or pruned trials; a resumed search replaces failed trials."""
        return self.states["COMPLETE"] + self.states["PRUNED"]

    @property
    def open(self) -> list[SweepMember]:
        """The notebook runs that Optuna suggested and that have not ended yet."""
        return [member for member in self.plan.members if self._is_open(member)]

    def ask(self) -> SweepMember:
        """Return the next notebook run, with the parameter values that Optuna suggests."""
        self.left -= 1
        trial = self._study.ask(self._distributions)
        chosen = {name: _value(self.search.axes[name], trial.params[name]) for name in trial.params}
        member = next_member(self.plan, trial.number + 1, chosen, self.search.fixed)
        self.plan.members.append(member)
        manifest.update(self.folder, members=manifest.member_records(self.plan))
        return member

    def watch(self, member: SweepMember) -> None:
        """Report a notebook run's metrics to Optuna; if Optuna prunes the run, request its end.

        After a request to prune the run, all ranks end after the same step. The notebook ends after
        its ranks.
        """
        now = time.monotonic()
        if not self.search.prune or now - self._watched_at.get(member.folder, 0.0) < WATCH_EVERY:
            return
        self._watched_at[member.folder] = now
        reader = self._reader(member)
        trial, news = self._trial(member), False
        (metric,) = self.search.objectives  # a search with several objectives does not prune
        for kind, record in reader.read() if reader else ():
            value = _reported_metric(record, metric) if kind == "epoch" else None
            if value is not None:
                trial.report(value, int(record["step"]))
                news = True
        if reader and news and trial.should_prune():
            reader.stop(PRUNED)

    def tell(self, member: SweepMember, state: str) -> str | None:
        """Report the result of a notebook run to Optuna; return an error message or None.

        The trial of an interrupted notebook run stays open, because a resumed sweep repeats it.
        """
        import optuna

        self._readers.pop(member.folder, None)
        number = _number(member)
        if state == "pruned":
            self._study.tell(number, state=optuna.trial.TrialState.PRUNED)
        elif state == "completed":
            runs = load_runs(self.folder / member.folder)
            values = {metric: objective(runs, metric) for metric in self.search.objectives}
            missing = [metric for metric, value in values.items() if value is None]
            if not missing:
                self._study.tell(number, [value for value in values.values() if value is not None])
                return None
            self._study.tell(number, state=optuna.trial.TrialState.FAIL)
            return f"{member.folder}: no run has a numeric result {', '.join(missing)}"
        elif state == "failed":
            self._study.tell(number, state=optuna.trial.TrialState.FAIL)
        return None

    def best(self) -> list[tuple[str, dict[str, float]]]:
        """Return folder and objectives of the best notebook run; [] if none has completed yet.

        With several objectives, the list contains each notebook run that no other dominates: no
        other is better in one objective and at least as good in all others.
        """
        import optuna

        ended = self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        if not ended:
            return []
        single = len(self.search.objectives) == 1
        folders = {_number(member): member.folder for member in self.plan.members}
        return [
            (folders[trial.number], dict(zip(self.search.objectives, trial.values, strict=True)))
            for trial in ([self._study.best_trial] if single else self._study.best_trials)
        ]

    def _is_open(self, member: SweepMember) -> bool:
        trials = self._study.get_trials(deepcopy=False)
        return _number(member) < len(trials) and not trials[_number(member)].state.is_finished()

    def _trial(self, member: SweepMember) -> optuna.Trial:
        import optuna

        stored = self._study.get_trials(deepcopy=False)[_number(member)]
        return optuna.Trial(self._study, stored._trial_id)

    def _reader(self, member: SweepMember) -> StreamReader | None:
        if member.folder not in self._readers:
            job = self.folder / member.folder
            streams = [*job.glob(f"*/{FOLDER}"), *job.glob(f"*/seed*/{FOLDER}")]
            if not streams:
                return None
            # The file system may list the paths in a different order in each call. The code
            # therefore chooses the alphabetically first path.
            self._readers[member.folder] = StreamReader(min(streams))
        return self._readers[member.folder]


def study(folder: Path, search: Search) -> Study:
    """Return Optuna's study in the sweep's folder, and create it if it is missing."""
    import optuna

    optuna_study = optuna.create_study(
        storage=storage(folder),
        study_name=STUDY,
        directions=[
            "maximize" if maximize else "minimize" for maximize in search.objectives.values()
        ],
        pruner=getattr(optuna.pruners, PRUNERS.get(search.prune or "", "NopPruner"))(),
        load_if_exists=True,
    )
    # The sampler's seed depends on the number of trials. A resumed search therefore does not repeat
    # earlier draws.
    seed = search.seed + len(optuna_study.get_trials(deepcopy=False))
    samplers = optuna.samplers
    if search.sampler == "random":
        optuna_study.sampler = samplers.RandomSampler(seed=seed)
    elif search.sampler == "qmc":
        # Optuna's QMCSampler continues its sequence if its seed is unchanged; the first trial of
        # the sequence is random.
        optuna_study.sampler = samplers.QMCSampler(
            seed=search.seed, scramble=True, warn_independent_sampling=False
        )
    else:
        # With Optuna's option `constant_liar`, simultaneous trials avoid parameter values that are
        # close to each other.
        optuna_study.sampler = samplers.TPESampler(seed=seed, constant_liar=True)
    return optuna_study


def objective(runs: Sequence[Run], metric: str) -> float | None:
    """Return a metric's value in the last completed run that has this metric, or None."""
    for run in reversed(runs):
        metrics = flatten(run.metrics)
        for name in (metric, f"test_{metric}"):
            if run.status["state"] == "completed" and is_number(metrics.get(name)):
                return float(metrics[name])
    return None


def _reported_metric(record: store.Record, metric: str) -> float | None:
    """Return a run's metric at an epoch or step, measured on held-out data if possible."""
    plain = metric.removeprefix("test_").removeprefix("val_")
    for name in (f"val_{plain}", f"test_{plain}", metric):
        if is_number(record.get(name)) and math.isfinite(record[name]):
            return float(record[name])
    return None


def _distribution(axis: Axis) -> optuna.distributions.BaseDistribution:
    from optuna import distributions

    if isinstance(axis, Draw):
        return distributions.FloatDistribution(axis.low, axis.high, log=axis.log)
    numbers = [value for value in axis if type(value) is int]
    if len(numbers) == len(axis) > 2 and len(steps := {*_steps(numbers)}) == 1 and min(steps) > 0:
        # Equally spaced integers become a numeric range instead of categories. The neighbours of a
        # good number are often also good.
        return distributions.IntDistribution(numbers[0], numbers[-1], step=steps.pop())
    return distributions.CategoricalDistribution([_choice(value) for value in axis])


def _steps(numbers: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise(numbers)]


def _choice(value: JSON) -> bool | int | float | str | None:
    """Return a value as a choice for Optuna; a list or mapping is converted to JSON text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return json.dumps(value)


def _value(axis: Axis, chosen: JSON) -> JSON:
    """Return the parameter value that Optuna's choice represents."""
    if isinstance(axis, Draw):
        return axis.rounded(float(chosen)) if is_number(chosen) else chosen
    return next((value for value in axis if _choice(value) == chosen), chosen)


def _number(member: SweepMember) -> int:
    """Return the number of Optuna's trial (from 0) for a notebook run (numbered from 1)."""
    return int(member.folder.split("_")[0]) - 1
