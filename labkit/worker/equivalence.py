"""The equivalence gate: an exact strategy must do what one process does, or has no speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import keras
import numpy as np

from labkit.common.canonical_json import digest
from labkit.common.paths import cache_folder, fingerprint
from labkit.communicator import Communicator
from labkit.compression import Compressor
from labkit.exchange.hooks import seam
from labkit.experiment.experiment import Experiment
from labkit.keras.equivalence_exceptions import Division, why_not
from labkit.programs import CodecChannel
from labkit.records.result import Place, Verdict, told
from labkit.worker import reference
from labkit.worker.conservation import Audit, Found
from labkit.worker.feed import Source
from labkit.worker.gradient_log import Applied, Brought, disagreement
from labkit.worker.localization import Sides, locate
from labkit.worker.server_replay import Mending, replay, rule_of
from labkit.worker.session import TrainingSession
from labkit.worker.step_log import Own, StepLog
from labkit.worker.verdicts import read_verdict, write_verdict

STEPS = 20
# What does not change whether the method is exact.
_IRRELEVANT = (
    *("name", "epochs", "steps", "repeats", "threads", "seed", "gate", "callbacks"),
    *("faults", "bad_numbers", "check_every", "checksums"),
)


def verify(experiment: Experiment, communicator: Communicator, source: Source) -> Verdict:
    r"""Train 20 steps on the ranks and in one process, in float64, and compare every weight.

    A lossy exchange is held against its conservation law instead, see `labkit.worker.conservation`,
    from the gradients that backpropagation has made to those that the optimizer applies. In both
    cases ranks that hold the same weights must have applied the same bits, step by step.

    Passed when \(\max|w_\mathrm{ranks} - w_\mathrm{one}| \le 10^{-9} \max|w|\); a model that keeps
    float32 weights in spite of the policy is held to 1e-4. Large batches are made smaller, so that
    they leave the same remainders, see `labkit.worker.reference`. Collective over the communicator;
    the verdict is the same on all ranks and is cached by what it depends on, and so are the
    weights of the one process, for all strategies on the same batches.
    """
    reason = _why_not(experiment)
    if reason:
        return _verdict("not applicable", reason)
    place = cache_folder("gates") / f"{_key(experiment)}.json"
    cached = read_verdict(place) if communicator.rank == 0 else None
    known: Verdict | None = communicator.share(cached, what="the gate's cache")
    if known is not None:
        return known
    short, first = _shortened(experiment, communicator, source)
    found = _hold(short, first, communicator)
    verdict: Verdict = communicator.share(found, what="the gate")
    if verdict["verdict"] == "failed" and not short.plays and short.strategy.lossy is None:
        sides = Sides(Watched(short, communicator, first, StepLog()), short, first)
        verdict = _placed(verdict, locate(sides, communicator))
    if communicator.rank == 0:
        write_verdict(place, verdict)
    return verdict


def _placed(verdict: Verdict, place: Place | None) -> Verdict:
    if place is None:
        return verdict
    reason = f"{verdict['reason']}; {told(place)}"
    return Verdict(**verdict | {"reason": reason}, place=place)


class Watched(TrainingSession):
    """A session that writes down what its optimizers are given to apply."""

    def __init__(
        self,
        short: Experiment,
        communicator: Communicator,
        source: Source,
        track: StepLog | None = None,
    ) -> None:
        super().__init__(short, communicator, source)
        self.feed.validation = None
        lossy = short.strategy.lossy
        # Who is the only one to hold its weights has nobody to differ from.
        together = self.readers.size > 1 and not short.plays
        self.applied = track or Applied(marks=together, sums=lossy is not None)
        self.brought: Brought | None = None
        self.own = Own(self.model) if track is not None else None

    def optimizer(self) -> keras.optimizers.Optimizer:
        """As without a gate, but for the notes."""
        return self.applied.watch(super().optimizer())

    def compile(self, optimizer: keras.optimizers.Optimizer) -> None:
        """As without a gate; gradients to be compressed are written down on their way there."""
        super().compile(optimizer)
        if self.own is not None:
            seam(self.model).put_on(self.own)
        if self.experiment.strategy.lossy is not None:
            self.brought = Brought(self.communicator, optimizer.exchange)
            seam(self.model).put_on(self.brought)
            optimizer.exchange.watchers.append(self.brought.look)


def _hold(short: Experiment, source: Source, communicator: Communicator) -> Verdict | None:
    ranks = Watched(short, communicator, source)
    strategy, workers = short.strategy, short.workers
    parts = workers if short.plays else ranks.readers.size
    if reason := why_not(ranks.model, _division(short, workers, parts)):
        ranks.close()
        return _verdict("not applicable", reason)
    if strategy.lossy is not None:
        return _audit(short, ranks, strategy.lossy)
    if strategy.plays and not strategy.exact_of(short):
        return _replayed(short, ranks, communicator)
    strategy.train(ranks)
    differ = disagreement(ranks.applied.marks, ranks.readers)
    everyones = communicator.allgather(differ, "what replicas differ in")
    ranks.close()
    if communicator.rank > 0:
        return None
    one = reference.weights(short, source, parts, ranks)
    own = ranks.model.weights
    worst = _furthest(own, [weight.numpy() for weight in own], one)
    kept = {variable.dtype for variable in ranks.model.trainable_variables}
    scale = float(np.max([np.abs(b).max(initial=0) for b in one]))
    tolerance = reference.TOLERANCE["float64" if kept == {"float64"} else "float32"] * max(
        scale, 1.0
    )
    where = "virtual workers" if short.clock == "virtual" else "ranks"
    what = (
        f"{STEPS} steps of {short.batch_size} rows on {workers} {where} against one process, "
        f"{'/'.join(sorted(kept))}"
    )
    differ = next(filter(None, everyones), "")
    if worst.difference <= tolerance and not differ:  # False where a weight is not a number
        return _verdict("passed", what, worst.difference, tolerance)
    why = differ or f"{worst.name} is furthest apart"
    return _verdict("failed", f"{what}: {why}", worst.difference, tolerance)


def _replayed(short: Experiment, ranks: Watched, communicator: Communicator) -> Verdict | None:
    """Hold an asynchronous run against servers written anew, which replay what it wrote down."""
    rule = rule_of(ranks.optimizer())
    if not short.strategy.replays:
        rule = "workers take steps of their own, which nobody else can play again"
    if isinstance(rule, str):
        ranks.close()
        return _verdict("not applicable", rule)
    short.strategy.train(ranks)
    told = communicator.allgather(ranks.interleaving, "the interleaving")
    ranks.close()
    if communicator.rank > 0:
        return None
    stage, rates = ranks.stage, ranks.optimizer()
    assert stage is not None  # for the type checker: it has just played

    def rate(number: int) -> float:
        rates.iterations.assign(number)
        return float(rates.learning_rate)

    ours = stage.replica.weights  # before gradients are computed anew, in the same model
    events = [event for each in told for event in each]
    mending = Mending.of(short.strategy.to_json(), short.workers)
    talks = partial(CodecChannel, stage.compressor, stage.roles)
    found = replay(stage.roles, events, rule, rate, stage.gradient_anew, talks, mending)
    pieces = stage.replica.pieces
    worst = _furthest(stage.replica.model.trainable_variables, pieces(ours), pieces(found))
    scale = max(1.0, float(np.abs(found).max()))
    tolerance = reference.TOLERANCE[str(found.dtype)] * scale
    what = (
        f"{len(events)} gradients on {len(stage.roles.parts)} servers, replayed by servers written "
        f"anew, {found.dtype}"
    )
    if worst.difference <= tolerance:
        return _verdict("passed", what, worst.difference, tolerance)
    why = f"{what}: {worst.name} is furthest apart"
    return _verdict("failed", why, worst.difference, tolerance)


def _division(short: Experiment, workers: int, replicas: int) -> Division:
    """Into what the strategy divides a batch."""
    strategy = short.strategy
    rows = strategy.rows(short.batch_size, workers)
    in_parts = 0 < rows < -(-short.batch_size // replicas)
    return Division(replicas, in_parts, rows > 0, strategy.normalizes_globally)


@dataclass(frozen=True)
class _Furthest:
    name: str
    difference: float


def _furthest(
    whose: Sequence[keras.Variable], ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]
) -> _Furthest:
    """The weight that differs most."""
    # Not all variables: beside weights whose size is 1, states of random numbers reach 2³².
    pairs = zip(ours, theirs, strict=True)
    apart = [float(np.abs(a - b).max(initial=0)) for a, b in pairs]
    # NumPy's choice, unlike Python's, is what is not a number where there is one.
    place = int(np.argmax(apart))
    return _Furthest(whose[place].path, apart[place])


def _audit(short: Experiment, ranks: Watched, compressor: Compressor) -> Verdict:
    """Hold a compressor against its conservation law."""
    law = partial(compressor.waiting, ranks.communicator.size)
    remembers = law() is not None
    audit = Audit(ranks.communicator, remembers, compressor.rounding, law)
    ranks.watchers.append(audit.look)
    short.strategy.train(ranks)
    more = list(ranks.brought.found(ranks.applied)) if ranks.brought is not None else []
    if differ := disagreement(ranks.applied.marks, ranks.readers):
        more.append(Found(np.inf, 0.0, differ))
    worst = audit.verdict(more)
    kept = "sent + residual = gradient, and " if remembers else ""
    what = f"{STEPS} steps of {type(compressor).__name__}: {kept}applied = mean of what was sent"
    if worst.difference <= worst.allowed:
        return _verdict("passed", what, worst.difference, worst.allowed)
    return _verdict("failed", f"{what}; but {worst.what}", worst.difference, worst.allowed)


def _shortened(
    experiment: Experiment, communicator: Communicator, source: Source
) -> tuple[Experiment, Source]:
    """The first steps of an experiment in float64, with batches of fewer rows, and their data."""
    fields: dict[str, Any] = {"precision": "float64", "callbacks": None, "faults": ()}
    fields |= {"bad_numbers": None, "check_every": 0, "checksums": False}
    if callable(source.train):  # who knows where it ends
        return experiment.replace(epochs=1, steps=STEPS, **fields), source
    given = experiment.batch_size
    at_once = experiment.strategy.rows(given, experiment.workers)
    parts = -(-given // at_once) if at_once else given
    rows, size = reference.fewer(source.rows(communicator), given, parts)
    steps = min(STEPS, -(-rows // size))
    short = experiment.replace(epochs=-(-STEPS // steps), steps=steps, batch_size=size, **fields)
    return short, source.first(rows)


def _why_not(experiment: Experiment) -> str | None:
    if not experiment.gate:
        return "gate=False"
    if experiment.workers == 1 and not experiment.strategy.plays:
        return "one process has nothing to be held against"
    lossy = experiment.strategy.lossy
    if lossy is not None and experiment.plays:
        return "what compression leaves out is looked at on ranks: run it on clock='wall' for that"
    strategy = experiment.strategy
    if lossy is None and not strategy.exact_of(experiment) and not strategy.plays:
        return f"{type(experiment.strategy).__name__} is not exact"
    if lossy is not None and lossy.votes:
        return f"{type(lossy).__name__} is a vote, not a mean of what ranks have sent"
    return None


def _key(experiment: Experiment) -> str:
    record = {k: v for k, v in experiment.to_json().items() if k not in _IRRELEVANT}
    return digest([record, fingerprint(), keras.__version__, experiment.strategy.environment_key])


def _verdict(
    verdict: Literal["passed", "failed", "not applicable"],
    reason: str,
    difference: float | None = None,
    tolerance: float | None = None,
) -> Verdict:
    return Verdict(
        verdict=verdict, max_abs_difference=difference, tolerance=tolerance, reason=reason
    )
