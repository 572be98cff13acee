"""The equivalence check: exact strategies must reach the same weights as one process does."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_type_hints

import keras
import numpy as np

from labkit.common.canonical_json import digest
from labkit.common.errors import LabkitError
from labkit.common.files import cache_folder, fingerprint
from labkit.common.privacy import scrub
from labkit.communicator import Communicator
from labkit.compression import Compressor
from labkit.experiment.experiment import Experiment
from labkit.keras.replica_consistency import Division, why_not
from labkit.programs import CodecChannel
from labkit.records.run_metrics import FirstDifference, Verdict, place_text
from labkit.records.shape import verdict as is_verdict
from labkit.records.store import read_json, write_json
from labkit.worker import reference
from labkit.worker.feed import DataSource
from labkit.worker.gradient_log import (
    Audit,
    LoggingSession,
    StepLog,
    Violation,
    disagreement,
)
from labkit.worker.localization import ComparisonInputs, locate
from labkit.worker.server_replay import StalenessCorrection, replay, rule_of

LEAST = {"verdict", "max_abs_difference", "tolerance", "reason"}


def read_verdict(path: Path) -> Verdict | None:
    """Return the cached verdict; None if the file is missing or invalid (this prints a message)."""
    if not os.path.lexists(path):
        return None
    try:
        cached = read_json(path).get("equivalence")
    except LabkitError as error:
        _warn(f"{error}; the check runs again")
        return None
    if not (isinstance(cached, dict) and set(cached) >= LEAST and is_verdict(cached)):
        _warn(f"gates/{path.name} contains no verdict; the check runs again")
        return None
    if cached["verdict"] not in get_args(get_type_hints(Verdict)["verdict"]):
        _warn(f"gates/{path.name} contains an unknown verdict; the check runs again")
        return None
    return cast(Verdict, cached)


def write_verdict(path: Path, verdict: Verdict) -> None:
    """Write a verdict to the cache for later runs; if this fails, print a message."""
    try:
        write_json(path, {"equivalence": verdict})
    except OSError as error:
        _warn(f"gates/{path.name} cannot be written, so the next run checks again: {error}")


def _warn(text: str) -> None:
    print(f"labkit: the cache of the equivalence check: {scrub(text)}", file=sys.stderr, flush=True)


STEPS = 20
# The fields in `_IRRELEVANT` have no influence on whether a training strategy is exact.
_IRRELEVANT = (
    *("name", "epochs", "steps_per_epoch", "repeats", "threads", "seed", "verify", "callbacks"),
    *("faults", "on_nonfinite", "replica_check_interval", "checksums"),
)


def verify(experiment: Experiment, communicator: Communicator, source: DataSource) -> Verdict:
    r"""Train 20 steps on the ranks and in one process, in float64; compare all resulting weights.

    For a lossy exchange, an audit of its conservation law replaces the comparison of weights, see
    `labkit.worker.gradient_log`. The audit covers what happens to gradients between backpropagation
    and the optimizer. In every step, ranks with the same weights must also apply bitwise equal
    gradients.

    The check passes if \(\max|w_\mathrm{ranks} - w_\mathrm{one}| \le 10^{-9} \max|w|\). If a model
    uses float32 weights in spite of the float64 policy, the tolerance is \(10^{-4} \max|w|\). To
    save time, the check makes large batches smaller; see `labkit.worker.reference`. All ranks of
    the communicator call `verify` together, and receive the same verdict. The verdict of the check
    is cached for later runs. The weights from training in one process are also cached.

    Args:
        experiment: Experiment whose strategy is verified.
        communicator: Communicator of the experiment's ranks.
        source: Training data of the experiment.
    """
    reason = _why_not(experiment)
    if reason:
        return _verdict("not applicable", reason)
    place = cache_folder("gates") / f"{_key(experiment)}.json"
    cached = read_verdict(place) if communicator.rank == 0 else None
    cached_verdict: Verdict | None = communicator.broadcast_object(
        cached, label="the cached verdict"
    )
    if cached_verdict is not None:
        return cached_verdict
    short, first = _shorten(experiment, communicator, source)
    verdict_of_rank_0 = _compare(short, first, communicator)
    verdict: Verdict = communicator.broadcast_object(verdict_of_rank_0, label="the verdict")
    if verdict["verdict"] == "failed" and not short.uses_programs and short.strategy.lossy is None:
        sides = ComparisonInputs(
            LoggingSession(short, communicator, first, StepLog()), short, first
        )
        verdict = _with_location(verdict, locate(sides, communicator))
    if communicator.rank == 0:
        write_verdict(place, verdict)
    return verdict


def _with_location(verdict: Verdict, place: FirstDifference | None) -> Verdict:
    if place is None:
        return verdict
    reason = f"{verdict['reason']}; {place_text(place)}"
    return Verdict(**verdict | {"reason": reason}, place=place)


def _compare(short: Experiment, source: DataSource, communicator: Communicator) -> Verdict | None:
    ranks = LoggingSession(short, communicator, source)
    strategy, workers = short.strategy, short.workers
    parts = workers if short.uses_programs else ranks.readers.size
    if reason := why_not(ranks.model, _division(short, workers, parts)):
        ranks.close()
        return _verdict("not applicable", reason)
    if strategy.lossy is not None:
        return _audit(short, ranks, strategy.lossy)
    if strategy.uses_programs and not strategy.is_exact_in(short):
        return _verify_by_replay(short, ranks, communicator)
    strategy.train(ranks)
    disagreement_text = disagreement(ranks.applied.marks, ranks.readers)
    disagreements = communicator.allgather(disagreement_text, "the differences between replicas")
    ranks.close()
    if communicator.rank > 0:
        return None
    reference_weights = reference.weights(short, source, parts, ranks)
    variables = ranks.model.weights
    worst = _largest_difference(
        variables, [weight.numpy() for weight in variables], reference_weights
    )
    dtypes = {variable.dtype for variable in ranks.model.trainable_variables}
    scale = float(np.max([np.abs(b).max(initial=0) for b in reference_weights]))
    tolerance = reference.TOLERANCE["float64" if dtypes == {"float64"} else "float32"] * max(
        scale, 1.0
    )
    where = "virtual workers" if short.clock == "virtual" else "ranks"
    what = (
        f"{STEPS} steps of {short.batch_size} rows on {workers} {where} against one process, "
        f"{'/'.join(sorted(dtypes))}"
    )
    disagreement_text = next(filter(None, disagreements), "")
    # Weights that are NaN fail, because any comparison with NaN is false.
    if worst.difference <= tolerance and not disagreement_text:
        return _verdict("passed", what, worst.difference, tolerance)
    why = disagreement_text or f"{worst.name} has the largest difference"
    return _verdict("failed", f"{what}: {why}", worst.difference, tolerance)


def _verify_by_replay(
    short: Experiment, ranks: LoggingSession, communicator: Communicator
) -> Verdict | None:
    """Verify asynchronous training: independent NumPy servers replay its log of updates."""
    rule = rule_of(ranks.optimizer())
    if not short.strategy.replays:
        rule = "workers take local steps, which no independent implementation can replay"
    if isinstance(rule, str):
        ranks.close()
        return _verdict("not applicable", rule)
    short.strategy.train(ranks)
    logs = communicator.allgather(ranks.interleaving, "the update log")
    ranks.close()
    if communicator.rank > 0:
        return None
    stage, rates = ranks.stage, ranks.optimizer()
    # The assertion tells the type checker that training has set `ranks.stage`.
    assert stage is not None

    def rate(number: int) -> float:
        rates.iterations.assign(number)
        return float(rates.learning_rate)

    trained_weights = (
        stage.replica.weights
    )  # read before the replay, because the replay changes the weights of the same model
    events = [event for log in logs for event in log]
    correction = StalenessCorrection.of(short.strategy.to_json(), short.workers)
    make_channel = partial(CodecChannel, stage.compressor, stage.roles)
    replayed_weights = replay(
        stage.roles, events, rule, rate, stage.recompute_gradient, make_channel, correction
    )
    pieces = stage.replica.pieces
    worst = _largest_difference(
        stage.replica.model.trainable_variables, pieces(trained_weights), pieces(replayed_weights)
    )
    scale = max(1.0, float(np.abs(replayed_weights).max()))
    tolerance = reference.TOLERANCE[str(replayed_weights.dtype)] * scale
    what = (
        f"{len(events)} gradients on {len(stage.roles.parts)} servers, replayed by independent "
        f"servers, {replayed_weights.dtype}"
    )
    if worst.difference <= tolerance:
        return _verdict("passed", what, worst.difference, tolerance)
    why = f"{what}: {worst.name} has the largest difference"
    return _verdict("failed", why, worst.difference, tolerance)


def _division(short: Experiment, workers: int, replicas: int) -> Division:
    """Return how the experiment's strategy divides a global batch."""
    strategy = short.strategy
    rows = strategy.rows(short.batch_size, workers)
    in_parts = 0 < rows < -(-short.batch_size // replicas)
    return Division(replicas, in_parts, rows > 0, strategy.normalizes_globally)


@dataclass(frozen=True)
class _Difference:
    name: str
    difference: float


def _largest_difference(
    variables: Sequence[keras.Variable],
    local_values: Sequence[np.ndarray],
    reference_values: Sequence[np.ndarray],
) -> _Difference:
    """Return the variable that differs most from its reference values."""
    # Callers omit the states of random generators, because values up to 2³² would dwarf the
    # weights.
    pairs = zip(local_values, reference_values, strict=True)
    differences = [float(np.abs(a - b).max(initial=0)) for a, b in pairs]
    # NumPy's argmax returns the first NaN, while Python's max may ignore NaN.
    place = int(np.argmax(differences))
    return _Difference(variables[place].path, differences[place])


def _audit(short: Experiment, ranks: LoggingSession, compressor: Compressor) -> Verdict:
    """Verify that a compressor obeys its conservation law over the first training steps."""
    law = partial(compressor.expected_residual, ranks.communicator.size)
    remembers = law() is not None
    audit = Audit(ranks.communicator, remembers, compressor.rounding, law)
    ranks.watchers.append(audit.observe)
    short.strategy.train(ranks)
    more = (
        list(ranks.exchange_inputs.violations(ranks.applied))
        if ranks.exchange_inputs is not None
        else []
    )
    if disagreement_text := disagreement(ranks.applied.marks, ranks.readers):
        more.append(Violation(np.inf, 0.0, disagreement_text))
    worst = audit.verdict(more)
    law_text = "sent + residual = gradient, and " if remembers else ""
    what = (
        f"{STEPS} steps of {type(compressor).__name__}: {law_text}"
        "applied gradient = mean of values sent"
    )
    if worst.difference <= worst.allowed:
        return _verdict("passed", what, worst.difference, worst.allowed)
    return _verdict("failed", f"{what}; but {worst.what}", worst.difference, worst.allowed)


def _shorten(
    experiment: Experiment, communicator: Communicator, source: DataSource
) -> tuple[Experiment, DataSource]:
    """Return a short float64 experiment (few steps, small batches) and the data for it."""
    fields: dict[str, Any] = {"precision": "float64", "callbacks": None, "faults": ()}
    fields |= {"on_nonfinite": None, "replica_check_interval": 0, "checksums": False}
    if callable(source.train):  # If a function creates the data, the number of rows is unknown.
        return experiment.replace(epochs=1, steps_per_epoch=STEPS, **fields), source
    batch_size = experiment.batch_size
    at_once = experiment.strategy.rows(batch_size, experiment.workers)
    parts = -(-batch_size // at_once) if at_once else batch_size
    rows, size = reference.fewer(source.rows(communicator), batch_size, parts)
    steps = min(STEPS, -(-rows // size))
    short = experiment.replace(
        epochs=-(-STEPS // steps), steps_per_epoch=steps, batch_size=size, **fields
    )
    return short, source.first(rows)


def _why_not(experiment: Experiment) -> str | None:
    if not experiment.verify:
        return "verify=False"
    if experiment.workers == 1 and not experiment.strategy.uses_programs:
        return "a single process is itself the reference of the check"
    lossy = experiment.strategy.lossy
    if lossy is not None and experiment.uses_programs:
        return "the audit of compression needs ranks; use clock='wall'"
    strategy = experiment.strategy
    if lossy is None and not strategy.is_exact_in(experiment) and not strategy.uses_programs:
        return f"{type(experiment.strategy).__name__} is not exact"
    if lossy is not None and lossy.votes:
        return f"{type(lossy).__name__} is a majority vote, not a mean of the values sent"
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
