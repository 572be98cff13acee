"""Loss curves of runs, of averaged models, and of the trials of a search."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from labkit import datasets
from labkit.common.errors import LabkitError, short
from labkit.common.files import open_file
from labkit.common.imports import optional
from labkit.records import store
from labkit.records.run import Run
from labkit.records.timed_steps import steps_until, with_end_times

if TYPE_CHECKING:
    import optuna
    import pandas as pd


def loss_curve(history: pd.DataFrame) -> pd.DataFrame:
    r"""Return a run's loss per step, as the mean over ranks r weighted by sample counts \(n_r\).

    Seconds and bytes are counted from the end of the first training step. The first training step
    also traces and compiles the model. In the first training step, ranks also send one-time data
    such as initial weights. The algorithm `auto` also sends its trial messages in the first
    training step. The slowest rank determines the duration of a training step. For asynchronous
    workers, a step applies as many gradients as there are workers. Training steps that some seeds
    did not reach are omitted.

    Returns: A table with step, seconds of training, bytes and number of seeds. Steps have the
        numbers 1, 2, 3, … as in epoch records. Bytes are the sum over all ranks. The columns
        `loss`, `loss_low` and `loss_high` contain the mean, minimum and maximum over seeds. The
        columns smooth, smooth_low and smooth_high are moving means over about one twentieth of the
        run's steps.
    """
    import pandas as pd

    if history.empty:
        return pd.DataFrame(columns=["step", "seconds", "bytes", "loss", "smooth", "seeds"])
    rows = with_end_times(history)
    seeds, seed = np.unique(rows["seed"], return_inverse=True)
    step, column = np.unique(rows["step"], return_inverse=True)
    shape = (len(seeds), len(step))
    # NumPy computes the curves, because pandas groups are slower. For a page of 100 curves, pandas
    # groups would take ten times as long.
    cell = seed * len(step) + column
    losses, ended, wire = (rows[name].to_numpy(float) for name in ("loss", "ended", "wire_bytes"))
    # The loss of a rank with an empty batch is NaN, so its weight is 0. If the history has no
    # sample counts, each rank with a loss has weight 1.
    weight = np.where(np.isnan(losses), 0.0, rows["samples"].fillna(1).to_numpy(float))

    def summed(values: np.ndarray) -> np.ndarray:
        return np.bincount(cell, values, minlength=seed_steps).reshape(shape)

    seed_steps = shape[0] * shape[1]
    seconds = np.full(seed_steps, np.nan)
    np.fmax.at(seconds, cell, ended)
    # Only steps that all seeds reached are used. The mean would jump at a step where one seed ends.
    reached = (np.bincount(cell, minlength=seed_steps).reshape(shape) > 0).all(axis=0)
    # Losses with weight 0 are replaced by 0 before the multiplication, because NaN times 0 is NaN.
    weights = summed(weight)[:, reached]
    weighted = summed(np.where(weight > 0, losses, 0.0) * weight)[:, reached]
    loss = np.divide(weighted, weights, out=np.full_like(weights, np.nan), where=weights > 0)
    seconds = seconds.reshape(shape)[:, reached]
    nbytes = summed(np.nan_to_num(wire))[:, reached].cumsum(axis=1)
    lines = {"loss": loss.mean(axis=0)}
    lines |= {"loss_low": np.fmin.reduce(loss), "loss_high": np.fmax.reduce(loss)}
    smooth = smoothed(lines["loss"])
    # With only one seed, the minimum and the maximum curve are the same as the mean curve.
    bands = [smoothed(line) if len(seeds) > 1 else smooth for line in [*lines.values()][1:]]
    return pd.DataFrame(
        {
            "step": step[reached] - step[reached][:1] + 1,
            "seconds": (seconds - seconds[:, :1]).mean(axis=0),
            "bytes": (nbytes - nbytes[:, :1]).mean(axis=0),
            **lines,
            **dict(zip(("smooth", "smooth_low", "smooth_high"), (smooth, *bands), strict=True)),
            "seeds": len(seeds),
        }
    )


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the centred moving mean over 1/20 of all values, or over fewer values at the ends.

    The mean of a window ignores infinite and NaN values. At the indices of such values, the result
    is NaN.
    """
    import pandas as pd

    # A smoothed value is the mean of a window with `width` values on each side of its centre.
    width = len(values) // 40
    finite = pd.Series(values, dtype=float).where(np.isfinite(values))
    mean = finite.rolling(2 * width + 1, center=True, min_periods=1).mean()
    return np.asarray(mean.where(finite.notna()))


def epoch_results(run: Run, curve: pd.DataFrame) -> pd.DataFrame:
    """Return the metrics after each epoch, with steps, seconds and bytes until the epoch's end.

    Args:
        run: Run whose epoch metrics are returned.
        curve: Result of `loss_curve` for the run, from which seconds and bytes are interpolated.
            For epochs after the curve's last step, seconds are those of rank 0. For epochs after
            the curve's last step, bytes are NaN.
    """
    import pandas as pd

    metrics = run.metrics
    table = pd.DataFrame(metrics.get("epochs") or [])
    if table.empty:
        return pd.DataFrame(columns=["step", "seconds", "bytes"])
    # The duration of the first training step is subtracted, because this step also traces and
    # compiles the model.
    first = (metrics.get("first_step_ms") or 0.0) / 1e3
    step = np.array([steps_until(run, step) for step in table["step"]])
    spent = {"seconds": np.clip(table["seconds"].to_numpy(float) - first, 0.0, None)}
    spent["bytes"] = np.full(len(step), np.nan)
    if len(curve):
        reached = step <= curve["step"].iloc[-1]
        # The curve's times are preferred over rank 0's times. The curve contains the times of the
        # slowest rank.
        for name, rank0_seconds in spent.items():
            spent[name] = np.where(
                reached, np.interp(step, curve["step"], curve[name]), rank0_seconds
            )
    return table.assign(step=step, **spent)


def ensemble_accuracy(runs: Sequence[Run]) -> float:
    """Return the test accuracy of an ensemble that averages the predictions of several models.

    Args:
        runs: Runs that saved their models after training on the same named data set with class
            labels.
    """
    from labkit.programs.soft_targets import Soft

    experiment = runs[0].experiment
    data = datasets.load(experiment["dataset"], **experiment["dataset_options"])
    predictions = []
    for run in runs:
        model = run.model()
        predictions.append(np.asarray(Soft(model).targets(model.predict(data.x_test, verbose=0))))
    return float(np.mean(np.mean(predictions, 0).argmax(-1) == data.y_test))


JOURNAL = "optuna.journal"
STUDY = "labkit"
LONGEST_JOURNAL = 2**26  # The journal of thousands of Optuna trials has only some megabytes.


class SearchResult(NamedTuple):
    """The results of a search for one objective: metric, trials, and parameter importances."""

    metric: str
    trials: pd.DataFrame
    importances: dict[str, float]


def storage(folder: Path) -> optuna.storages.JournalStorage:
    """Return Optuna's journal storage in a sweep's folder."""
    optuna = optional("optuna")
    journals = optional("optuna.storages.journal")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    journal = folder / JOURNAL
    with suppress(FileNotFoundError):
        # The function `open_file` rejects symbolic links, and pipes, on which reads would block.
        os.close(open_file(journal))
    # Optuna's default lock is a symbolic link. However, labkit refuses to resume a sweep whose
    # folder contains a link.
    lock = journals.JournalFileOpenLock(str(journal))
    backend = journals.JournalFileBackend(str(journal), lock_obj=lock)
    return optuna.storages.JournalStorage(backend)  # type: ignore[no-any-return]


def folders(runs: Iterable[Run]) -> list[Path]:
    """Return the folders of all searches to which any of the runs belongs."""
    sweeps = dict.fromkeys(run.path.resolve().parent.parent for run in runs)
    journals = {folder: folder / JOURNAL for folder in sweeps}
    return [
        folder
        for folder, journal in journals.items()
        if journal.is_file() and not journal.is_symlink()
    ]


def objectives(record: store.Record) -> dict[str, bool]:
    """Return the metrics in a record of a search, and whether the search maximizes each metric."""
    if "metric" in record:  # Older labkit versions recorded one metric.
        return {str(record["metric"]): bool(record["maximize"])}
    return {str(name): bool(maximize) for name, maximize in record["objectives"].items()}


def search_results(folder: Path) -> list[SearchResult]:
    """Return the results of a search for each objective; the search may still be running.

    The table has one row for each trial that ended with a value. The columns are `trial` (number
    from 1), `value`, `state`, and `best`. The column `best` contains the best value up to the
    trial. Pruned trials do not count for the column `best`.

    Raises:
        LabkitError: If the sweep's record or Optuna's journal cannot be read.
    """
    try:
        if (size := (folder / JOURNAL).lstat().st_size) > LONGEST_JOURNAL:
            raise ValueError(
                f"the journal has {size:,} bytes; allowed: at most {LONGEST_JOURNAL:,}"
            )
        return _read(folder, store.read_json(folder / "sweep.json")["search"])
    except LabkitError:
        raise
    # Optuna may raise any exception when it reads a damaged journal.
    except Exception as error:
        raise LabkitError(f"{folder.name}/{JOURNAL} cannot be read: {short(error)}") from error


def _read(folder: Path, record: store.Record) -> list[SearchResult]:
    study = optional("optuna").load_study(study_name=STUDY, storage=storage(folder))
    several = len(record["axes"]) > 1
    return [
        _result(study, place, metric, maximize, several)
        for place, (metric, maximize) in enumerate(objectives(record).items())
    ]


def _result(
    study: optuna.Study, place: int, metric: str, maximize: bool, several: bool
) -> SearchResult:
    """Return the results for the objective with the index `place`."""
    import pandas as pd

    optuna = optional("optuna")

    rows = [
        (trial.number + 1, trial.values[place], trial.state.name.lower())
        for trial in study.get_trials(deepcopy=False)
        if trial.values is not None and trial.state.is_finished()
    ]
    trials = pd.DataFrame(rows, columns=["trial", "value", "state"])
    completed = trials["value"].where(trials["state"] == "complete")
    trials["best"] = (completed.cummax() if maximize else completed.cummin()).ffill()
    importances: dict[str, float] = {}
    if completed.nunique() > 1 and several:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            # Without `target`, Optuna knows the direction. The importances of `target` are those
            # for low values, which Optuna's warning explains.
            warnings.filterwarnings("ignore", message="PedAnova", category=UserWarning)
            sign = -1 if maximize else 1
            target = None if len(study.directions) == 1 else lambda t: sign * t.values[place]
            importances = optuna.importance.get_param_importances(study, target=target)
    return SearchResult(metric, trials, importances)
