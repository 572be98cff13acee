"""Statistical verdicts on accuracy over seeds, and costs until a run reaches a target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, variance
from typing import Literal

from labkit.common.nearest import refuse_unknown
from labkit.records.run import Run
from labkit.records.timed_steps import is_applied, is_asynchronous, steps_until, with_end_times

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Judgement:
    r"""A verdict over several seeds on whether a candidate is less accurate than a baseline.

    Attributes:
        candidate, baseline: Test accuracies between 0 and 1, one per seed.
        kind: "loss" if Welch's interval of the difference is entirely below 0. The kind is "no
            loss" if the bound `mean_low` is at least the baseline's lowest accuracy. Otherwise
            "none".
        difference: Mean accuracy of the candidate minus mean accuracy of the baseline, \(\bar c -
            \bar b\).
        low, high: Bounds of Welch's 95 % interval of the difference. The bounds are \(\bar c - \bar
            b \pm t_\nu \sqrt{s_c^2/n_c + s_b^2/n_b}\). The symbol s denotes a standard deviation,
            and n denotes a number of seeds. With fewer than two seeds, `low` and `high` are NaN.
        mean_low, mean_high: Bounds of the 95 % interval of the candidate's mean. The bounds are
            \(\bar c \pm t_{n_c-1} s_c/\sqrt{n_c}\), with standard deviation \(s_c\) over \(n_c\)
            seeds.

    Source: B. L. Welch: The generalization of "Student's" problem when several different population
    variances are involved, Biometrika 34, 1947.
    """

    candidate: tuple[float, ...]
    baseline: tuple[float, ...]
    kind: Literal["loss", "no loss", "none"]
    difference: float
    low: float
    high: float
    mean_low: float
    mean_high: float

    @property
    def spread(self) -> tuple[float, float]:
        """The minimum and the maximum of the baseline's accuracies over its seeds."""
        return min(self.baseline), max(self.baseline)

    @property
    def sentence(self) -> str:
        """The verdict as an English sentence with the numbers that explain it."""
        counts = f"{len(self.candidate)} against {len(self.baseline)} seeds"
        if not self.candidate or not self.baseline:
            return "no verdict, because there is no test accuracy"
        if math.isnan(self.low):
            shortage = "one seed" if len(self.candidate) == 1 else "one seed of the baseline"
            means = f"{mean(self.candidate):.2%} against {mean(self.baseline):.2%}"
            return f"no verdict: {shortage} ({means}); give repeats=8 to separate noise from loss"
        least, greatest = self.spread
        if self.kind == "no loss":
            return (
                f"no loss of accuracy: the 95 % interval of the mean, {self.mean_low:.2%} to "
                f"{self.mean_high:.2%}, lies within or above the range of the baseline's seeds, "
                f"{least:.2%} to {greatest:.2%} ({counts})"
            )
        interval = f"95 % interval {_points(self.low)} to {_points(self.high)}, {counts}"
        if self.kind == "loss":
            small = -self.difference < greatest - least
            less = ", which is less than the range of the baseline's seeds" if small else ""
            return f"a loss of {_points(-self.difference)} points of accuracy ({interval}){less}"
        return (
            f"no verdict: the seeds vary too much; accuracy differs by "
            f"{_points(self.difference)} points ({interval}), and the interval of the mean, "
            f"{self.mean_low:.2%} to {self.mean_high:.2%}, reaches below the range of the "
            f"baseline's seeds, {least:.2%} to {greatest:.2%}"
        )


def judge(candidate: Sequence[float], baseline: Sequence[float]) -> Judgement:
    """Judge whether a candidate is less accurate than a baseline; each needs two seeds."""
    candidate_values, baseline_values = tuple(candidate), tuple(baseline)
    nan = math.nan
    if not candidate_values or not baseline_values:
        return Judgement(candidate_values, baseline_values, "none", nan, nan, nan, nan, nan)
    # The function `statistics.mean` is exact for any order and number of accuracies. The difference
    # of equal accuracies is therefore exactly 0.
    difference = mean(candidate_values) - mean(baseline_values)
    # A single seed has no variance, so that no verdict is possible.
    if min(len(candidate_values), len(baseline_values)) < 2:
        return Judgement(candidate_values, baseline_values, "none", difference, nan, nan, nan, nan)
    half_width = _welch(candidate_values, baseline_values)
    low, high = difference - half_width, difference + half_width
    # The interval of the candidate's mean uses only the candidate's variance, because the baseline
    # may have another variance.
    mean_half_width = _quantile(len(candidate_values) - 1) * math.sqrt(
        variance(candidate_values) / len(candidate_values)
    )
    mean_low, mean_high = (
        mean(candidate_values) - mean_half_width,
        mean(candidate_values) + mean_half_width,
    )
    kind: Literal["loss", "no loss", "none"] = "none"
    if high < 0:
        kind = "loss"
    elif mean_low >= min(baseline_values):
        kind = "no loss"
    return Judgement(
        candidate_values, baseline_values, kind, difference, low, high, mean_low, mean_high
    )


def judge_runs(candidate: Run, baseline: Run) -> Judgement:
    """Judge whether a run's test accuracies differ from those of a baseline run."""
    return judge(list(accuracies(candidate).values()), list(accuracies(baseline).values()))


def accuracies(run: Run) -> dict[int, float]:
    """Return a dict from seeds to test accuracies, for all completed seeds with a test accuracy."""
    measured = {
        seed_run.experiment.get("seed", 0): seed_run.metrics.get("test_accuracy")
        for seed_run in completed_seeds(run)
    }
    return {seed: value for seed, value in measured.items() if value is not None}


def completed_seeds(run: Run) -> list[Run]:
    """Return the completed seeds of a run; a run without repeats counts as one seed."""
    return [seed_run for seed_run in run.seeds or [run] if seed_run.status["state"] == "completed"]


@dataclass(frozen=True)
class Arrival:
    """The step in which a seed reaches a target, and the costs from step 0 until this step.

    Attributes:
        step: Number of training steps completed when the target is reached.
        seconds: Seconds of training until the target is reached. The value of `seconds` includes
            the compilation in the first step, but no evaluations.
        codec_seconds: The part of `seconds` that is spent on gradient compression and
            decompression, averaged over ranks.
        payload_bytes, wire_bytes: Bytes that all ranks passed to the gradient exchange, and bytes
            that all ranks sent.
        samples: Number of training samples whose gradients changed the weights.
    """

    step: int
    seconds: float
    codec_seconds: float
    payload_bytes: int
    wire_bytes: int
    samples: int


def arrivals(run: Run, target: float, measure: str = "val_accuracy") -> dict[int, Arrival | None]:
    """Return the first evaluation of each seed that reaches a target, or None if none does.

    Args:
        run: Run with one seed or several.
        target: Validation accuracy that must be reached or exceeded, or validation loss that must
            not be exceeded.
        measure: Metric to compare with the target, "val_accuracy" or "val_loss".
    """
    refuse_unknown("measure", [measure], ("val_accuracy", "val_loss"))
    return {
        seed_run.experiment["seed"]: _arrival(seed_run, target, measure)
        for seed_run in completed_seeds(run)
    }


def _arrival(run: Run, target: float, measure: str) -> Arrival | None:
    # A lower loss is better, so the sign of the loss is reversed.
    sign = -1 if measure == "val_loss" else 1
    for epoch in run.metrics.get("epochs") or []:
        value = epoch.get(measure)
        if value is not None and sign * value >= sign * target:
            break
    else:
        return None
    history = run.history
    # All asynchronous workers end an epoch at the same time, although their step numbers differ.
    asynchronous = is_asynchronous(history)
    history = with_end_times(history) if asynchronous else history
    spent = history[
        history["step"] < (steps_until(run, epoch["step"]) if asynchronous else epoch["step"])
    ]
    # Records of early labkit versions have no column for compression times.
    codec = spent["codec_seconds"].sum() if "codec_seconds" in spent else 0.0
    return Arrival(
        step=int(epoch["step"]),
        seconds=float(spent["ended"].max() if asynchronous else epoch["seconds"]),
        codec_seconds=float(codec) / max(1, spent["rank"].nunique()),
        payload_bytes=int(spent["payload_bytes"].sum()),
        wire_bytes=int(spent["wire_bytes"].sum()),
        samples=int(spent["samples"].where(is_applied(spent), 0).sum()),
    )


def _welch(candidate: Sequence[float], baseline: Sequence[float]) -> float:
    r"""Return half the width of Welch's interval, computed with \(\nu\) degrees of freedom.

    The degrees of freedom are \(\nu = 1 / (q^2/(n_c-1) + (1-q)^2/(n_b-1))\) for \(n_c\) and \(n_b\)
    seeds. The number \(q\) is the candidate's share of the variance of the difference.
    """
    first, second = variance(candidate) / len(candidate), variance(baseline) / len(baseline)
    total = first + second
    # If all seeds have the same accuracy, the variance is 0, and Welch's formula would divide by 0.
    if total == 0:
        return 0.0
    share = first / total
    freedom = 1 / (share**2 / (len(candidate) - 1) + (1 - share) ** 2 / (len(baseline) - 1))
    return _quantile(freedom) * math.sqrt(total)


@cache
def _quantile(freedom: float) -> float:
    r"""Return the 95 % quantile of |t| for Student's t distribution; relative error below 1e-9.

    With \(t = \sqrt{\nu} \tan\theta\), the density of \(\theta\) is proportional to
    \(\cos^{\nu-1}\theta\). Gauss's quadrature integrates this density.
    """
    # NumPy is imported inside the function, because most runs need no verdict.
    from numpy import cos
    from numpy.polynomial.legendre import leggauss

    nodes, weights = leggauss(40)

    def probability(angle: float) -> float:
        density = cos(angle * (nodes + 1) / 2) ** (freedom - 1)
        return angle / 2 * float(weights @ density) / whole

    logarithms = math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2)
    whole = math.sqrt(math.pi) / 2 * math.exp(logarithms)
    low, high = 0.0, math.pi / 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if probability(middle) < CONFIDENCE else (low, middle)
    return math.sqrt(freedom) * math.tan(middle)


def _points(share: float) -> str:
    """Return a difference of accuracies as text in percentage points."""
    return f"{100 * share:.2g}"
