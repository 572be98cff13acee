"""Search: each member is asked of Optuna, which knows what those before it came to."""

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
from labkit.jobs.sweep.plan import Member, Plan, next_member
from labkit.jobs.sweep.search import Search
from labkit.records import store
from labkit.records.analysis.search_results import STUDY, storage
from labkit.records.run import Run, flatten, load_runs
from labkit.records.stream import FOLDER, PRUNED, Reader

if TYPE_CHECKING:
    import optuna

WATCH_EVERY = 0.25  # seconds; ranks tell as often
PRUNERS = {
    "median": "MedianPruner",
    "halving": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
}
Study: TypeAlias = "optuna.Study"


class Trials:
    """The members of a search: asked, watched while they run, told when they have ended.

    Args:
        folder: of the sweep.
        found: its plan; members that are asked are added to it.
        search: what is searched for.
    """

    def __init__(self, folder: Path, found: Plan, search: Search) -> None:
        self.folder, self.plan, self.search = folder, found, search
        self._study = study(folder, search)
        self._distributions = {name: _distribution(axis) for name, axis in search.axes.items()}
        self._readers: dict[str, Reader] = {}
        self._watched_at: dict[str, float] = {}
        for member in found.members:  # whose end a sweep that was killed did not tell
            if self._is_open(member) and manifest.is_done(folder, found, member):
                self.tell(member, "completed")
        self.left = search.trials - self.done - len(self.open)

    @property
    def states(self) -> Counter[str]:
        """How many trials are in which of Optuna's states."""
        return Counter(trial.state.name for trial in self._study.get_trials(deepcopy=False))

    @property
    def done(self) -> int:
        """Trials that completed or were pruned; one that failed gives way when a sweep resumes."""
        return self.states["COMPLETE"] + self.states["PRUNED"]

    @property
    def open(self) -> list[Member]:
        """Members that were asked, and have not ended."""
        return [member for member in self.plan.members if self._is_open(member)]

    def ask(self) -> Member:
        """The next member."""
        self.left -= 1
        trial = self._study.ask(self._distributions)
        chosen = {name: _value(self.search.axes[name], trial.params[name]) for name in trial.params}
        member = next_member(self.plan, trial.number + 1, chosen, self.search.fixed)
        self.plan.members.append(member)
        manifest.update(self.folder, members=manifest.listed(self.plan))
        return member

    def watch(self, member: Member) -> None:
        """Report what the member's first run tells so far; ask it to end where it shall be pruned.

        Ranks end after the same step, and the notebook then ends, too.
        """
        now = time.monotonic()
        if not self.search.prune or now - self._watched_at.get(member.folder, 0.0) < WATCH_EVERY:
            return
        self._watched_at[member.folder] = now
        reader = self._reader(member)
        trial, news = self._trial(member), False
        for kind, record in reader.read() if reader else ():
            value = _told(record, self.search.metric) if kind == "epoch" else None
            if value is not None:
                trial.report(value, int(record["step"]))
                news = True
        if reader and news and trial.should_prune():
            reader.stop(PRUNED)

    def tell(self, member: Member, state: str) -> str | None:
        """Tell Optuna how a member ended; returns what is wrong with it, if anything is.

        One that was interrupted stays open: the sweep that is resumed runs it again.
        """
        import optuna

        self._readers.pop(member.folder, None)
        number = _number(member)
        if state == "pruned":
            self._study.tell(number, state=optuna.trial.TrialState.PRUNED)
        elif state == "completed":
            value = objective(load_runs(self.folder / member.folder), self.search.metric)
            if value is not None:
                self._study.tell(number, value)
                return None
            self._study.tell(number, state=optuna.trial.TrialState.FAIL)
            return f"{member.folder}: no run has a number {self.search.metric}"
        elif state == "failed":
            self._study.tell(number, state=optuna.trial.TrialState.FAIL)
        return None

    def best(self) -> str:
        """The best member so far, as a sentence; nothing before one has completed."""
        import optuna

        ended = self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        if not ended:
            return ""
        best = self._study.best_trial
        folder = next(m.folder for m in self.plan.members if _number(m) == best.number)
        return f"best {self.search.metric} {best.value:.6g}: {folder}"

    def _is_open(self, member: Member) -> bool:
        trials = self._study.get_trials(deepcopy=False)
        return _number(member) < len(trials) and not trials[_number(member)].state.is_finished()

    def _trial(self, member: Member) -> optuna.Trial:
        import optuna

        stored = self._study.get_trials(deepcopy=False)[_number(member)]
        return optuna.Trial(self._study, stored._trial_id)

    def _reader(self, member: Member) -> Reader | None:
        if member.folder not in self._readers:
            job = self.folder / member.folder
            found = [*job.glob(f"*/{FOLDER}"), *job.glob(f"*/seed*/{FOLDER}")]
            if not found:
                return None
            # By name: each look at the folder finds the same run, whatever the file system's order.
            self._readers[member.folder] = Reader(min(found))
        return self._readers[member.folder]


def study(folder: Path, search: Search) -> Study:
    """Optuna's study in a sweep's folder, made where there is none."""
    import optuna

    found = optuna.create_study(
        storage=storage(folder),
        study_name=STUDY,
        direction="maximize" if search.maximize else "minimize",
        pruner=getattr(optuna.pruners, PRUNERS.get(search.prune or "", "NopPruner"))(),
        load_if_exists=True,
    )
    # A search that is resumed shall not draw what it drew at first.
    seed = search.seed + len(found.get_trials(deepcopy=False))
    samplers = optuna.samplers
    if search.sampler == "random":
        found.sampler = samplers.RandomSampler(seed=seed)
    elif search.sampler == "qmc":
        # Its sequence goes on by itself, as long as the seed stays; the first trial is at random.
        found.sampler = samplers.QMCSampler(
            seed=search.seed, scramble=True, warn_independent_sampling=False
        )
    else:
        # Several members may run at a time: none shall be asked where another just looks.
        found.sampler = samplers.TPESampler(seed=seed, constant_liar=True)
    return found


def objective(runs: Sequence[Run], metric: str) -> float | None:
    """The number of the last of a notebook's completed runs that has it."""
    for run in reversed(runs):
        found = flatten(run.metrics)
        for name in (metric, f"test_{metric}"):
            if run.status["state"] == "completed" and is_number(found.get(name)):
                return float(found[name])
    return None


def _told(record: store.Record, metric: str) -> float | None:
    """The number in what a run tells after an epoch or a step; held-out data before others."""
    plain = metric.removeprefix("test_").removeprefix("val_")
    for name in (f"val_{plain}", f"test_{plain}", metric):
        if is_number(record.get(name)) and math.isfinite(record[name]):
            return float(record[name])
    return None


def _distribution(axis: Axis) -> optuna.distributions.BaseDistribution:
    from optuna import distributions

    if isinstance(axis, Draw):
        return distributions.FloatDistribution(axis.low, axis.high, log=axis.log)
    numbers = [each for each in axis if type(each) is int]
    if len(numbers) == len(axis) > 2 and len(steps := {*_steps(numbers)}) == 1 and min(steps) > 0:
        # As numbers: those near a good one are likely good, too.
        return distributions.IntDistribution(numbers[0], numbers[-1], step=steps.pop())
    return distributions.CategoricalDistribution([_choice(value) for value in axis])


def _steps(numbers: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise(numbers)]


def _choice(value: JSON) -> bool | int | float | str | None:
    """A value as Optuna keeps choices: a list or mapping as its text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return json.dumps(value)


def _value(axis: Axis, chosen: JSON) -> JSON:
    """The parameter that Optuna's choice stands for."""
    if isinstance(axis, Draw):
        return axis.rounded(float(chosen)) if is_number(chosen) else chosen
    return next((value for value in axis if _choice(value) == chosen), chosen)


def _number(member: Member) -> int:
    """Of its trial: members are numbered from 1."""
    return int(member.folder.split("_")[0]) - 1
