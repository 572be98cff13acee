"""Steps in the timeline of a run: steps after warm-up, step durations, and ranks' activities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from labkit.common.errors import InvalidInput, LabkitError
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas
    import pandas as pd


WARM_UP_STEPS = 10

Interval = tuple[float, float]


def steady_steps(steps: Iterable[int]) -> list[int]:
    """Return all step numbers except the first 10, or except the first half in a short run."""
    # In a run with fewer than 20 steps, the first half is warm-up. The second half remains for the
    # measurement.
    ordered = sorted(set(steps))
    return ordered[min(WARM_UP_STEPS, len(ordered) // 2) :]


def timeline_of(run: Run) -> pandas.DataFrame:
    """Return the timeline of a run, or of its first seed that has a timeline.

    Raises:
        LabkitError: If neither the run nor any of its seeds has a timeline of gradient exchanges.
    """
    for candidate in (run, *run.seeds):
        if (candidate.timeline["kind"] == "communicate").any():
            return candidate.timeline
    raise LabkitError(
        f"{run.name} has no timeline of an exchange (state: {run.status['state']}); a completed "
        "run on two or more workers that exchange gradients has one"
    )


def step_seconds(timeline: pandas.DataFrame) -> pandas.Series[float]:
    """Return the seconds of each step on its slowest rank, indexed by step number."""
    steps = timeline[timeline["kind"] == "step"]
    seconds: pandas.Series[float] = (steps["stop"] - steps["start"]).groupby(steps["step"]).max()
    return seconds


def typical_steps(timeline: pandas.DataFrame, count: int) -> list[int]:
    """Return the `count` consecutive steps whose total duration is the median of all groups."""
    steps = timeline[timeline["kind"] == "step"].groupby("step")
    starts, stops = steps["start"].min(), steps["stop"].max()
    numbers = steady_steps(starts.index)
    rows = [numbers[start : start + count] for start in range(max(len(numbers) - count + 1, 1))]
    durations = [float(stops[row[-1]] - starts[row[0]]) for row in rows]
    # An evaluation between two steps lengthens a group of steps. A group with an evaluation
    # therefore never has the median duration.
    return rows[int(np.argsort(durations)[len(durations) // 2])]


def activities(timeline: pandas.DataFrame, steps: Sequence[int]) -> pandas.DataFrame:
    """Return all ranks' activities in `steps`, with times since the start of the first step.

    The returned table has the same columns as a timeline. The returned table also has rows of kind
    "compute". The "compute" rows contain the time outside packing and waiting.

    Raises:
        InvalidInput: If the timeline contains none of the steps in `steps`.
    """
    import pandas as pd

    step_events = timeline[timeline["kind"] == "step"]
    chosen = step_events[step_events["step"].isin(steps)]
    if chosen.empty:
        recorded = step_events["step"]
        raise InvalidInput(
            f"none of steps {steps} is recorded; the timeline has steps {recorded.min()} to "
            f"{recorded.max()}"
        )
    begin, end = chosen["start"].min(), chosen["stop"].max()
    # Timeline events are selected by time, because ranks may still exchange a gradient bucket of
    # the previous step.
    events = timeline[(timeline["stop"] > begin) & (timeline["start"] < end)]
    # Communication events are not selected by step number. The communication thread may record the
    # number of the previous or next step.
    events = events[(events["kind"] == "communicate") | events["step"].isin(steps)]
    events = events.assign(start=events["start"] - begin, stop=events["stop"] - begin)
    computed = [
        (rank, "compute", step, -1, start, stop)
        for rank, rows in events.groupby("rank")
        for step, start, stop in _computations(rows)
    ]
    columns = ["rank", "kind", "step", "bucket", "start", "stop"]
    return pd.concat([events[columns], pd.DataFrame(computed, columns=columns)], ignore_index=True)


def _computations(rows: pandas.DataFrame) -> Iterable[tuple[int, float, float]]:
    """Yield (step, start, stop) of each interval in which a rank neither packs nor waits."""
    other = rows[rows["kind"].isin(["pack", "wait"])]
    others = sorted(zip(other["start"], other["stop"], strict=True))
    steps = rows[rows["kind"] == "step"]
    for step, *whole in zip(steps["step"], steps["start"], steps["stop"], strict=True):
        for start, stop in _subtract((whole[0], whole[1]), others):
            yield step, start, stop


def _subtract(whole: Interval, others: Iterable[Interval]) -> list[Interval]:
    """Return the parts of an interval outside all intervals in the sorted list `others`."""
    position, end = whole
    parts = []
    for start, stop in others:
        # The intervals in `others` may overlap one another, and may start or end outside of
        # `whole`.
        if start > position and position < end:
            parts.append((position, min(start, end)))
        position = max(position, stop)
    if position < end:
        parts.append((position, end))
    return parts


def is_asynchronous(history: pd.DataFrame) -> bool:
    """Return whether workers ran asynchronously, as with parameter servers or backup workers.

    In an asynchronous run, workers have different numbers of steps, or some gradients are stale or
    dropped.
    """
    # After a rank's failure, only the surviving ranks have steps, although the run is synchronous.
    if "ranks" in history:
        return False
    if history.groupby(["seed", "rank"]).size().nunique() > 1:
        return True
    has_staleness = "staleness" in history and bool(history["staleness"].notna().any())
    return has_staleness and bool((history["staleness"] != 0).any())


def is_applied(history: pd.DataFrame) -> pd.Series[bool]:
    """Return whether each gradient changed the weights; dropped gradients have no staleness."""
    was_applied = history["staleness"].notna() if "staleness" in history else history["step"] < 0
    return was_applied if was_applied.any() else history["step"] >= 0


def with_end_times(history: pd.DataFrame) -> pd.DataFrame:
    """Return the history with a column `ended`, the seconds of training until the end of each step.

    In synchronous runs, the slowest rank determines the duration of a training step. In
    asynchronous runs, steps are renumbered in order of completion. The number of applied gradients
    in each step then equals the number of workers.
    """
    rows = history.sort_values(["seed", "step", "rank"], kind="stable")
    if not is_asynchronous(rows):
        steps = rows.groupby(["seed", "step"])["seconds"].max().groupby("seed").cumsum()
        return rows.join(steps.rename("ended"), on=["seed", "step"])
    rows = rows.assign(ended=rows.groupby(["seed", "rank"])["seconds"].cumsum())
    rows = rows.sort_values(["seed", "ended", "rank"], kind="stable")
    counts = is_applied(rows)
    done = counts.astype(int).groupby(rows["seed"]).cumsum()
    # A rank that applies no gradients is another stage of a replica. A rank without gradient
    # updates does not count as a worker.
    workers = rows.loc[counts, "rank"].nunique()
    return rows.assign(step=(done - 1).clip(lower=0) // max(1, workers))


def steps_until(run: Run, step: float) -> float:
    """Convert a step number of an epoch record to a step number of `with_end_times`.

    With backup workers, `with_end_times` returns fewer steps than the epoch record has, because
    late gradients are dropped.
    """
    strategy = run.experiment.get("strategy") or {}
    backups = strategy.get("backup_workers") or 0 if isinstance(strategy, dict) else 0
    return step * (1 - float(backups) / int(run.experiment.get("workers") or 1))


# If less than 1 % of the communication could be hidden, the hidden fraction is only noise.
MIN_HIDDEN_FRACTION = 0.01
NO_SPEED: dict[str, float] = {"steps": 0, "buckets": 0} | dict.fromkeys(
    ("step_ms", "communication_ms", "exposed_ms", "hidden_ms", "ideal_ms", "reached"), math.nan
)


@dataclass(frozen=True)
class Overlap:
    """The exchange of all gradient buckets in one step, with the combined times of all ranks.

    All ranks of one host use the same clock. A bucket is ready when the last rank has packed it.
    The exchange of a bucket starts when the last rank joins the exchange. The time of waiting for
    slower ranks does not count as communication.
    """

    step: int
    # The list `ready` contains, for each gradient bucket, the time in s at which the bucket is
    # ready.
    ready: list[float]
    # The list `seconds` contains the duration of each gradient bucket's communication in s.
    seconds: list[float]
    # The list `waits` contains (bucket, start, stop) of each wait for communication on the rank
    # that waits least.
    waits: list[tuple[int, float, float]]

    @property
    def communication(self) -> float:
        """Total communication time in seconds, summed over the buckets."""
        return sum(self.seconds)

    @property
    def exposed(self) -> float:
        """Seconds for which training waits for communication; overlapping waits count once."""
        # Waiting time before `waited_until` has already been counted.
        exposed, waited_until = 0.0, self.waits[0][1]
        for _, start, stop in self.waits:
            exposed += max(0.0, stop - max(start, waited_until))
            waited_until = max(waited_until, stop)
        return exposed

    @property
    def ideal(self) -> float:
        """Seconds of waiting that would remain with the better of two orders of the buckets.

        The simulated exchange is never idle while any bucket is ready. The buckets are ordered by
        ready time or by urgency, whichever order leads to less waiting. The computation between two
        waits is assumed to take its measured time.
        """
        urgency = [0] * len(self.ready)
        for position, (bucket, _, _) in enumerate(self.waits):
            # A gradient bucket is more urgent if training waits for it earlier.
            urgency[bucket] = position
        # No single order of bucket exchanges is optimal in all cases, so two orders are compared.
        by_ready_time = sorted(range(len(self.ready)), key=lambda bucket: self.ready[bucket])
        from labkit.exchange.autotune import by_priority  # the import of `exchange` takes long

        orders = (by_ready_time, by_priority(self.ready, self.seconds, urgency))
        return min(self._exposed(self._finish(order)) for order in orders)

    def _finish(self, order: Iterable[int]) -> list[float]:
        finish, free = [0.0] * len(self.ready), float("-inf")
        for bucket in order:
            # The exchange of a bucket starts once the bucket is ready. Only one bucket exchange
            # runs at a time.
            free = max(self.ready[bucket], free) + self.seconds[bucket]
            finish[bucket] = free
        return finish

    def _exposed(self, finish: list[float]) -> float:
        now, waited_until, exposed = self.waits[0][1], self.waits[0][1], 0.0
        for bucket, start, stop in self.waits:
            # The simulated time `now` advances by the computation time between two waits.
            now += max(0.0, start - waited_until)
            exposed += max(0.0, finish[bucket] - now)
            now, waited_until = max(now, finish[bucket]), max(waited_until, stop)
        return exposed


def hidden_parts(run: Run) -> dict[str, float]:
    """Return how much communication a run hides behind computation, as medians over steps.

    `labkit.figures.overlap` shows the returned values as one row of a table. If verification of the
    run failed, the table row is `NO_SPEED` instead.

    Raises:
        LabkitError: If the run has no timeline of gradient exchanges.
    """
    timeline = timeline_of(run)
    exchanges = overlaps(timeline)
    chosen = set(steady_steps(overlap.step for overlap in exchanges))
    chosen_exchanges = [overlap for overlap in exchanges if overlap.step in chosen]
    seconds = step_seconds(timeline)
    parts = [
        (overlap.communication, overlap.exposed, overlap.ideal) for overlap in chosen_exchanges
    ]
    communication, exposed, ideal = 1e3 * np.array(parts).T
    possible = float(np.median(communication - ideal))
    reached = float(np.median(communication - exposed))
    # If very little communication can be hidden, the hidden fraction would be noise and is not
    # reported.
    significant = possible > MIN_HIDDEN_FRACTION * float(np.median(communication))
    return {
        "steps": len(chosen_exchanges),
        "buckets": len(chosen_exchanges[0].ready),
        "step_ms": 1e3 * float(seconds[seconds.index.isin(chosen)].median()),
        "communication_ms": float(np.median(communication)),
        "exposed_ms": float(np.median(exposed)),
        "hidden_ms": reached,
        "ideal_ms": possible,
        "reached": reached / possible if significant else math.nan,
    }


def overlaps(timeline: pandas.DataFrame) -> list[Overlap]:
    """Return all complete gradient exchanges of a timeline, from the oldest to the newest.

    Exchanges are counted from the end, because the timeline of a long run contains only its last
    events. Step numbers cannot identify the events of one exchange. The communication thread
    records the step in which an event ends. Communication may begin in one training step and end in
    the next step.

    Args:
        timeline: Events of all ranks, each with rank, kind, step, bucket, start and stop (in
            seconds).
    """
    events = timeline[timeline["kind"] != "step"].sort_values("start", kind="stable")
    # On every rank, the n-th last event of a bucket belongs to the n-th last exchange.
    back = events.groupby(["rank", "kind", "bucket"]).cumcount(ascending=False)
    buckets = sorted(events["bucket"].unique())
    # Each rank has three events per bucket: packing, communication, and waiting.
    whole = 3 * len(buckets) * events["rank"].nunique()
    exchanges = [_overlap(part) for _, part in events.groupby(back) if len(part) == whole]
    return exchanges[::-1]


def _overlap(part: pandas.DataFrame) -> Overlap:
    packs, serves = part[part["kind"] == "pack"], part[part["kind"] == "communicate"]
    by_bucket = serves.groupby("bucket")
    waits = part[part["kind"] == "wait"]
    waited = (waits["stop"] - waits["start"]).groupby(waits["rank"]).sum()
    # The rank that waits least is the slowest rank, for which the other ranks wait.
    critical_waits = waits[waits["rank"] == waited.idxmin()]
    positions = {
        bucket: position for position, bucket in enumerate(sorted(serves["bucket"].unique()))
    }
    return Overlap(
        step=int(packs["step"].max()),
        ready=packs.groupby("bucket")["stop"].max().tolist(),
        seconds=(by_bucket["stop"].max() - by_bucket["start"].max()).tolist(),
        waits=[
            (positions[bucket], start, stop)
            for bucket, start, stop in zip(
                critical_waits["bucket"],
                critical_waits["start"],
                critical_waits["stop"],
                strict=True,
            )
        ],
    )


SYNTHETIC, INSIDE = "synthetic", "in the step"
# Each input pipeline after "synthetic" adds one technique to the previous pipeline, so "cache" also
# includes prefetching.
WAYS = (SYNTHETIC, INSIDE, "map", "parallel calls", "prefetch", "cache")


class FedStep(NamedTuple):
    """A training step and its input batch, with times in seconds on the host's clock.

    Attributes:
        way: Name of the input pipeline, one of `WAYS`.
        repeat, step: Number of the repeat, and number of the step within the repeat.
        start, got, stop: Times at which the step requested its batch, received it, and ended.
        made_start, made_stop: Times at which the preparation of the batch began and ended. The
            times are NaN if the batch was prepared before the repeat.
    """

    way: str
    repeat: int
    step: int
    start: float
    got: float
    stop: float
    made_start: float
    made_stop: float


@dataclass(frozen=True)
class InputTrace:
    """Measurements of training steps with each of the input pipelines.

    Attributes:
        fed: Measured training steps (`FedStep`).
        nbytes: Size of the input file in bytes.
        filled: Seconds of the first pass over the data with the pipeline "cache", which fills the
            cache.
    """

    fed: Sequence[FedStep]
    nbytes: int
    filled: float

    @property
    def ways(self) -> list[str]:
        """Names of the measured input pipelines, in the order of `WAYS`."""
        measured = {step.way for step in self.fed}
        return [way for way in WAYS if way in measured]

    def to_dataframe(self) -> pandas.DataFrame:
        """Return one row per step with the columns `ready` (s), `idle_ms`, `compute_ms`, `step_ms`.

        The column `ready` is the time at which the training step received its batch. If the
        training step prepares the batch itself, `ready` is the time at which the preparation ended.
        """
        import pandas as pd

        table = pd.DataFrame(list(self.fed))
        inside = table["made_start"] >= table["got"]
        ready = table["got"].where(~inside, table["made_stop"])
        return table.assign(
            ready=ready,
            idle_ms=1e3 * (ready - table["start"]),
            compute_ms=1e3 * (table["stop"] - ready),
            step_ms=1e3 * (table["stop"] - table["start"]),
        )


def input_costs(trace: InputTrace) -> pandas.DataFrame:
    r"""Return step time, idle time and overhead over synthetic input, for each input pipeline.

    For each repeat \(r\), \(t_r\) is the median step time. The symbol \(s_r\) denotes the median
    step time with synthetic input. The I/O overhead is the relative difference \(t_r/s_r-1\), as
    the median over the repeats r. The columns `overhead_low` and `overhead_high` contain the
    smallest and largest overhead. A column in ms contains the median over repeats of the medians
    over steps. The column `idle_share` is the fraction of the step time for which the step waits
    for input.

    Source: TensorFlow's "Benchmarks" (2017) measures training first with synthetic data, then with
    real data. Murray et al. 2021, *tf.data: A machine learning data processing framework*
    (arXiv:2101.12127), describe TensorFlow's input pipelines. Unlike TensorFlow's benchmarks and
    Murray et al., labkit measures repeats as interleaved pairs. Input and training share the CPU
    cores.
    """
    import pandas as pd

    steps = trace.to_dataframe()
    medians = steps.groupby(["way", "repeat"])[["step_ms", "compute_ms", "idle_ms"]].median()
    base = medians.loc[SYNTHETIC, "step_ms"]
    sums = steps.groupby("way")[["idle_ms", "step_ms"]].sum()
    rows = {}
    for way in trace.ways:
        rows_of_way = medians.loc[way]
        row = {
            name: float(rows_of_way[name].median()) for name in ("step_ms", "compute_ms", "idle_ms")
        }
        row |= {
            "step_ms_low": rows_of_way["step_ms"].min(),
            "step_ms_high": rows_of_way["step_ms"].max(),
        }
        row["idle_share"] = sums.loc[way, "idle_ms"] / sums.loc[way, "step_ms"]
        overhead = np.array(rows_of_way["step_ms"] / base - 1, float)
        row |= {"overhead": float(np.median(overhead))}
        row |= {"overhead_low": overhead.min(), "overhead_high": overhead.max()}
        rows[way] = row
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("way")
