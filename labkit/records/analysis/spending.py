"""Tables of the costs of training: seconds, bytes, effects of faults, and precision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError
from labkit.records.compressors import compressor_of
from labkit.records.run import Run, equivalence_failed
from labkit.records.timed_steps import is_applied, with_end_times
from labkit.records.verdict import accuracies, arrivals, completed_seeds, judge_runs

if TYPE_CHECKING:
    import pandas
    import pandas as pd


MEASURES = ("accuracy", "bytes", "seconds")


def spending(runs: Mapping[str, Run]) -> pd.DataFrame:
    """Return the accuracy and the costs of each run that has a test accuracy, one row per run.

    The columns are run, network, clock, and three columns per measure. For each measure, the
    columns contain mean, minimum (`_low`) and maximum (`_high`) over seeds. The measures are test
    accuracy, total bytes, and seconds of training. The test accuracy lies between 0 and 1. The
    total bytes are those that all ranks send. Bytes and seconds exclude the first training step,
    which also compiles the model and sends one-time data. The seconds are missing if verification
    failed, or if a seed has only one training step.
    """
    import pandas as pd

    rows = []
    for name, run in runs.items():
        seeds = [s for s in completed_seeds(run) if s.metrics.get("test_accuracy") is not None]
        if seeds:
            spent = np.array([_spent(seed, equivalence_failed(run)) for seed in seeds])
            # The arrays are stacked along the last axis. The mean, minimum and maximum of each
            # measure are therefore adjacent.
            bands = np.stack([spent.mean(axis=0), spent.min(axis=0), spent.max(axis=0)], axis=1)
            link = str(run.metrics.get("network")), run.metrics.get("clock") or "wall"
            rows.append([name, *link, *bands.ravel()])
    columns = [f"{measure}{end}" for measure in MEASURES for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=["run", "network", "clock", *columns])


def to_target(
    runs: Mapping[str, Run], target: float, measure: str = "val_accuracy"
) -> pd.DataFrame:
    """Return the costs of each run until it reached a target accuracy or loss.

    The first columns are run, clock, network, seeds and reached. The column seeds contains the
    number of seeds. The column reached contains the number of seeds that reached the target. The
    columns for seconds, bytes and samples contain mean, minimum (`_low`) and maximum (`_high`).
    Mean, minimum and maximum are taken over seeds that reached the target. Bytes are the sum over
    all ranks. The seconds are missing for runs that failed verification.

    Args:
        runs: Runs by name.
        target: Accuracy or loss to be reached, see `labkit.records.verdict.arrivals`.
        measure: Metric to which the target applies, "val_accuracy" or "val_loss".
    """
    import pandas as pd

    rows = []
    for name, run in runs.items():
        arrivals_by_seed = arrivals(run, target, measure)
        reached = [arrival for arrival in arrivals_by_seed.values() if arrival is not None]
        row = {
            "run": name,
            "clock": run.metrics.get("clock"),
            "network": run.metrics.get("network"),
        }
        row |= {"seeds": len(arrivals_by_seed), "reached": len(reached)}
        for column, field in _SPENT.items():
            timed = column == "seconds" and equivalence_failed(run)
            values = [] if timed else [float(getattr(arrival, field)) for arrival in reached]
            band = (np.mean(values), min(values), max(values)) if values else (np.nan,) * 3
            row |= {f"{column}{suffix}": band[k] for k, suffix in enumerate(("", "_low", "_high"))}
        rows.append(row)
    return pd.DataFrame(rows)


_SPENT = {"seconds": "seconds", "bytes": "wire_bytes", "samples": "samples"}


def front(table: pd.DataFrame, measures: Sequence[str]) -> pd.DataFrame:
    """Return the Pareto front of the complete rows: all rows that no other row dominates.

    A row that dominates another row is at least as good in all measures. One row dominates another
    row only if at least one measure is better. Times are compared only between runs with the same
    network and clock.
    """
    complete_rows = table.dropna(subset=list(measures))
    # Columns in which smaller values are better are multiplied by -1, so that greater scores are
    # always better.
    signs = [1 if name == "accuracy" else -1 for name in measures]
    scores = complete_rows[list(measures)].to_numpy(float) * signs
    # The comparison of all pairs of rows is fast enough for a few hundred runs.
    first, second = scores[:, None, :], scores[None, :, :]
    beaten = (second >= first).all(axis=2) & (second > first).any(axis=2)
    if "seconds" in measures:
        for same in (complete_rows["network"].to_numpy(), complete_rows["clock"].to_numpy()):
            beaten &= same[:, None] == same[None, :]
    return complete_rows[~beaten.any(axis=1)]


def steps_of(run: Run) -> int | None:
    """Return the number of training steps until the end of the last epoch, or None."""
    epochs = run.metrics.get("epochs") or []
    return int(epochs[-1]["step"]) if epochs else None


def _spent(seed: Run, failed: bool) -> tuple[float, float, float]:
    """Return a seed's accuracy, and its bytes and seconds after the first training step."""
    metrics = seed.metrics
    # The metric `train_seconds` is missing in runs that only log results.
    total_seconds = metrics.get("train_seconds") or 0.0
    seconds = total_seconds - metrics.get("first_step_ms", 0.0) / 1e3
    # If a run has only one training step, no time remains after the first step.
    is_valid = not failed and seconds > 1e-9 * total_seconds
    # Sent bytes are computed from the metrics. The histories of a thousand runs would take too long
    # to read.
    bytes_per_step = float(metrics.get("wire_bytes_per_step") or 0.0)
    steps_after_first = (steps_of(seed) or 1) - 1
    nbytes = bytes_per_step * int(metrics.get("workers") or 1) * steps_after_first
    return float(metrics["test_accuracy"]), nbytes, seconds if is_valid else np.nan


def compare_faults(pairs: Mapping[str, tuple[Run, Run | None]]) -> pd.DataFrame:
    """Return one row per pair of a run without faults and a run with faults.

    Goodput is the number of samples whose gradients changed the weights, per second of training
    time. The goodput is 0 if the run failed. Recovery is the time by which faults extend the
    longest time between two applied gradients. If training survives dead ranks, labkit uses the
    recorded recovery time.

    Args:
        pairs: For each name, a run without faults (undisturbed) and a run with faults (disturbed).
            The run with faults is None if the strategy cannot run with the fault.

    Returns: A table with name, clock, `finished`, `goodput` (samples/s), `kept`, `lost` (samples),
        `accuracy` and `recovery` (seconds). The column `kept` is `goodput` divided by
        `calm_goodput`. The column `recovery` is NaN if the run did not finish. The columns
        `calm_goodput` and `calm_accuracy` contain the values of the run without faults.
    """
    import pandas as pd

    return pd.DataFrame([{"name": name} | _row(*pair) for name, pair in pairs.items()])


def _row(calm: Run, disturbed_run: Run | None) -> dict[str, object]:
    samples, seconds, gap = _applied_samples(calm)
    finished = disturbed_run is not None and disturbed_run.status["state"] == "completed"
    row = {
        "clock": calm.experiment["clock"],
        "finished": finished,
        "calm_goodput": samples / seconds,
        "calm_accuracy": calm.metrics.get("test_accuracy", math.nan),
    }
    if disturbed_run is None or not finished:
        return row | {
            "goodput": 0.0,
            "kept": 0.0,
            "lost": samples,
            "accuracy": math.nan,
            "recovery": math.nan,
        }
    counted_samples, disturbed_seconds, disturbed_gap = _applied_samples(disturbed_run)
    # History rows of dead ranks may be missing. The number of samples is therefore computed from
    # the run without faults. A step has the same number of samples with and without faults. Either
    # all ranks or no ranks complete a step.
    if disturbed_run.metrics["faults"]:
        counted = calm.history[calm.history["step"].isin(disturbed_run.history["step"])]
        counted_samples = int(counted["samples"].sum())
    recovery = sum(
        sum(
            seconds_of_part for part, seconds_of_part in fault["seconds"].items() if part != "trace"
        )
        for fault in disturbed_run.metrics["faults"]
    )
    return row | {
        "goodput": counted_samples / disturbed_seconds,
        "kept": counted_samples / disturbed_seconds / (samples / seconds),
        "lost": max(0, samples - counted_samples),
        "accuracy": disturbed_run.metrics.get("test_accuracy", math.nan),
        "recovery": recovery or max(0.0, disturbed_gap - gap),
    }


def _applied_samples(run: Run) -> tuple[int, float, float]:
    """Return the applied samples, the total time, and the longest gap between gradients (s)."""
    history = with_end_times(run.history)
    counted_rows = history[is_applied(history)]
    # A gap is the time between two step ends. No gap includes the first step, which is slow
    # because TensorFlow traces the model.
    ended = np.sort(counted_rows["ended"].unique())
    gaps = np.diff(ended)
    return (
        int(counted_rows["samples"].sum()),
        float(history["ended"].max()),
        float(gaps.max(initial=0.0)),
    )


# Weights, gradients and optimizer state occupy memory throughout training.
PERSISTENT_MEMORY = ("weights", "gradients", "optimizer")
_VERDICTS = {"loss": "loss", "no loss": "no loss", "none": "no verdict"}


def precisions(runs: Mapping[str, Run], baseline: Run) -> pandas.DataFrame:
    """Return one row per run: precision, accuracy, verification, bytes and times.

    The columns `weights_bytes`, `gradients_bytes`, `optimizer_bytes` and `peak_bytes` contain
    maxima over ranks. For runs that failed verification, the times are missing.

    Args:
        runs: Completed runs by name, which may include the baseline.
        baseline: Run whose accuracy is compared with the accuracies of the other runs.
    """
    import pandas as pd

    rows = {name: _precisions_row(run, baseline) for name, run in runs.items()}
    return pd.DataFrame(list(rows.values()), index=pd.Index(rows, name="run"))


def loss_scales(rows: Iterable[Mapping[str, float]]) -> pandas.DataFrame:
    """Return a table of loss scales and update counts, with one row per step.

    Args:
        rows: Records of all ranks and steps, each with `step`, `rank`, `loss_scale` and `updates`.
    """
    import pandas as pd

    return pd.DataFrame(list(rows)).pivot(
        index="step", columns="rank", values=["loss_scale", "updates"]
    )


def _precisions_row(run: Run, baseline: Run) -> dict[str, JSON]:
    metrics, fields = run.metrics, run.experiment
    values = list(accuracies(run).values())
    missing = float("nan")
    is_baseline, failed = run.path == baseline.path, equivalence_failed(run)
    return {
        "compute": fields["precision"],
        "wire": (compressor_of(run) or {}).get("name", "as the gradients"),
        "test_accuracy": sum(values) / len(values) if values else missing,
        "verdict": "baseline" if is_baseline else _VERDICTS[judge_runs(run, baseline).kind],
        **{f"{kind}_bytes": metrics["memory_bytes"][kind] for kind in (*PERSISTENT_MEMORY, "peak")},
        "payload_bytes_per_step": metrics["payload_bytes_per_step"],
        "wire_bytes_per_step": metrics["wire_bytes_per_step"],
        "step_ms": missing if failed else metrics["step_ms"]["median"],
        "codec_ms": missing if failed else metrics["codec_ms_per_step"],
    }


LAST_STEPS = 20  # The training loss is averaged over several last steps to reduce noise.
LOSSES = ("training_loss", "test_loss")


def seed_by_seed(candidate: Run, baseline: Run) -> pandas.DataFrame:
    """Return two runs' final losses for each common seed, and whether the candidate's are lower.

    The column `training_loss` contains means over all ranks and the last 20 training steps. The
    column `test_loss` contains the losses of the trained models on the test data.

    Raises:
        LabkitError: If there is no seed with which both runs completed.
    """
    candidate_losses, baseline_losses = _ends(candidate), _ends(baseline)
    # With the same seed, two runs start from the same weights and train on the same batches.
    table = candidate_losses.join(baseline_losses.add_prefix("baseline_"), how="inner")
    if table.empty:
        raise LabkitError(
            f"{candidate.name} and {baseline.name} have no completed seed in common; run both with "
            "the same seed and repeats"
        )
    for name in LOSSES:
        table[f"lower_{name}"] = table[name] < table[f"baseline_{name}"]
    return table[[f"{part}{name}" for name in LOSSES for part in ("", "baseline_", "lower_")]]


def _ends(run: Run) -> pandas.DataFrame:
    """Return a table of the final losses of a run, with one row per completed seed."""
    import pandas as pd

    rows = {}
    for seed_run in completed_seeds(run):
        history = with_end_times(seed_run.history)
        last_rows = history[history["step"] > history["step"].max() - LAST_STEPS]
        ends = (float(last_rows["loss"].mean()), float(seed_run.metrics["test_loss"]))
        rows[int(seed_run.experiment["seed"])] = ends
    table = pd.DataFrame.from_dict(rows, orient="index", columns=list(LOSSES))
    return table.rename_axis("seed")
