"""Verdicts that know noise: accuracy judged by its seeds, time and bytes to a target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, variance
from typing import Literal

from labkit.common.nearest import refuse_unknown
from labkit.records.pace import applied, in_order, own_pace, steps_until
from labkit.records.run import Run

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Judgement:
    r"""What the seeds of a candidate and of its baseline say about a loss of accuracy.

    Attributes:
        candidate, baseline: accuracies, one a seed, between 0 and 1.
        kind: "loss", where Welch's interval of the difference lies below 0; else "no loss", where
            the interval of the candidate's mean lies within the baseline's seed spread or above
            it; else "none".
        difference: \(\bar c - \bar b\).
        low, high: Welch's interval of the difference, \(\bar c - \bar b \pm t_\nu
            \sqrt{s_c^2/n_c + s_b^2/n_b}\), at 95 %; NaN with fewer than two seeds.
        mean_low, mean_high: the interval of the candidate's mean, \(\bar c \pm t_{n_c-1}
            s_c/\sqrt{n_c}\).

    Source: B. L. Welch: The generalization of "Student's" problem when several different
    population variances are involved, Biometrika 34, 1947.
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
        """The least and the greatest of the baseline's seeds."""
        return min(self.baseline), max(self.baseline)

    @property
    def sentence(self) -> str:
        """The verdict in words, with the numbers on which it rests."""
        counts = f"{len(self.candidate)} against {len(self.baseline)} seeds"
        if not self.candidate or not self.baseline:
            return "no verdict: no test accuracy"
        if math.isnan(self.low):
            who = "one seed" if len(self.candidate) == 1 else "one seed of the baseline"
            means = f"{mean(self.candidate):.2%} against {mean(self.baseline):.2%}"
            return f"no verdict: {who} ({means}); repeats=8 would tell noise from loss"
        least, greatest = self.spread
        if self.kind == "no loss":
            return (
                f"no loss of accuracy: the interval of its mean, {self.mean_low:.2%} to "
                f"{self.mean_high:.2%}, lies within the baseline's seeds or above them, "
                f"{least:.2%} to {greatest:.2%} ({counts})"
            )
        interval = f"95 % interval {_points(self.low)} to {_points(self.high)}, {counts}"
        if self.kind == "loss":
            small = -self.difference < greatest - least
            less = ", which is less than the baseline's seeds differ by" if small else ""
            return f"a loss of {_points(-self.difference)} points of accuracy ({interval}){less}"
        return (
            f"no verdict: the seeds' spread is too wide; accuracy differs by "
            f"{_points(self.difference)} points ({interval}), and the interval of the mean, "
            f"{self.mean_low:.2%} to {self.mean_high:.2%}, reaches below the baseline's seeds, "
            f"{least:.2%} to {greatest:.2%}"
        )


def judge(candidate: Sequence[float], baseline: Sequence[float]) -> Judgement:
    """Judge accuracies, one a seed each; two seeds on both sides are the least for a verdict."""
    own, other = tuple(candidate), tuple(baseline)
    nan = math.nan
    if not own or not other:
        return Judgement(own, other, "none", nan, nan, nan, nan, nan)
    # statistics.mean is exact: equal seeds in another order or number differ by exactly nothing.
    difference = mean(own) - mean(other)
    # One seed has no variance: chance cannot be told from loss.
    if min(len(own), len(other)) < 2:
        return Judgement(own, other, "none", difference, nan, nan, nan, nan)
    reach = _welch(own, other)
    low, high = difference - reach, difference + reach
    # The candidate's own interval, for its seeds need not vary as the baseline's do.
    half = _quantile(len(own) - 1) * math.sqrt(variance(own) / len(own))
    mean_low, mean_high = mean(own) - half, mean(own) + half
    kind: Literal["loss", "no loss", "none"] = "none"
    if high < 0:
        kind = "loss"
    elif mean_low >= min(other):
        kind = "no loss"
    return Judgement(own, other, kind, difference, low, high, mean_low, mean_high)


def judge_runs(candidate: Run, baseline: Run) -> Judgement:
    """Judge a run's test accuracy against a baseline's, over the seeds that completed."""
    return judge(list(accuracies(candidate).values()), list(accuracies(baseline).values()))


def accuracies(run: Run) -> dict[int, float]:
    """Test accuracy by seed, of the seeds that completed; empty where none was measured."""
    found = {
        each.experiment.get("seed", 0): each.metrics.get("test_accuracy") for each in seeds_of(run)
    }
    return {seed: value for seed, value in found.items() if value is not None}


def seeds_of(run: Run) -> list[Run]:
    """The run's repeats that completed; the run itself where it has no repeats."""
    return [each for each in run.seeds or [run] if each.status["state"] == "completed"]


@dataclass(frozen=True)
class Arrival:
    """Where one seed reached a target: all that was spent since step 0, warm-up included.

    Attributes:
        step: steps done.
        seconds: of training, without evaluation; the first step, which compiles, is in it.
        codec_seconds: of these, what encoding and decoding took, mean over ranks.
        payload_bytes, wire_bytes: sent by all ranks together.
        samples: whose gradients had changed the weights.
    """

    step: int
    seconds: float
    codec_seconds: float
    payload_bytes: int
    wire_bytes: int
    samples: int


def arrivals(run: Run, target: float, measure: str = "val_accuracy") -> dict[int, Arrival | None]:
    """For each seed the first validation that reaches a target; None: not reached.

    Args:
        run: of one seed or several.
        target: the least accuracy, or the greatest loss, that counts as reached.
        measure: "val_accuracy" or "val_loss".
    """
    refuse_unknown("measure", [measure], ("val_accuracy", "val_loss"))
    return {each.experiment["seed"]: _arrival(each, target, measure) for each in seeds_of(run)}


def _arrival(run: Run, target: float, measure: str) -> Arrival | None:
    # A loss is reached from above.
    sign = -1 if measure == "val_loss" else 1
    for epoch in run.metrics.get("epochs") or []:
        value = epoch.get(measure)
        if value is not None and sign * value >= sign * target:
            break
    else:
        return None
    history = run.history
    # At their own pace workers end an epoch together, whatever their own steps are.
    paced = own_pace(history)
    history = in_order(history) if paced else history
    spent = history[history["step"] < (steps_until(run, epoch["step"]) if paced else epoch["step"])]
    # Runs before there were codecs have no such column.
    codec = spent["codec_seconds"].sum() if "codec_seconds" in spent else 0.0
    return Arrival(
        step=int(epoch["step"]),
        seconds=float(spent["ended"].max() if paced else epoch["seconds"]),
        codec_seconds=float(codec) / max(1, spent["rank"].nunique()),
        payload_bytes=int(spent["payload_bytes"].sum()),
        wire_bytes=int(spent["wire_bytes"].sum()),
        samples=int(spent["samples"].where(applied(spent), 0).sum()),
    )


def _welch(own: Sequence[float], other: Sequence[float]) -> float:
    r"""Half of the interval, \(\nu = 1 / (q^2/(n_c-1) + (1-q)^2/(n_b-1))\), q the first's share."""
    first, second = variance(own) / len(own), variance(other) / len(other)
    total = first + second
    # Seeds that all agree leave no doubt, and Welch's formula divides by their variance.
    if total == 0:
        return 0.0
    share = first / total
    freedom = 1 / (share**2 / (len(own) - 1) + (1 - share) ** 2 / (len(other) - 1))
    return _quantile(freedom) * math.sqrt(total)


def _quantile(freedom: float) -> float:
    """Student's t that 95 % of draws do not exceed in size."""
    # In the function: SciPy takes long to import, and most verdicts are never asked for.
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def _points(share: float) -> str:
    """A difference of accuracies in hundredths."""
    return f"{100 * share:.2g}"
