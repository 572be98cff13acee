"""Results of a hyperparameter search, read from Optuna's journal: trials and importances."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from labkit.common.errors import LabkitError, short
from labkit.common.safe_files import open_file
from labkit.records import store
from labkit.records.run import Run

if TYPE_CHECKING:
    import optuna
    import pandas as pd

JOURNAL = "optuna.journal"  # name of Optuna's journal file in a sweep's folder
STUDY = "labkit"
LONGEST_JOURNAL = 2**26  # maximum bytes; thousands of trials need some megabytes


class SearchResult(NamedTuple):
    """The results of a search: metric name, table of trials, and importances of hyperparameters."""

    metric: str
    trials: pd.DataFrame
    importances: dict[str, float]


def storage(folder: Path) -> optuna.storages.JournalStorage:
    """Return Optuna's journal storage in a sweep's folder."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    journal = folder / JOURNAL
    with suppress(FileNotFoundError):
        os.close(open_file(journal))  # rejects symbolic links, and pipes, which would block
    # Optuna's default lock would be a symbolic link, but labkit resumes no folder that contains a
    # link.
    lock = JournalFileOpenLock(str(journal))
    return JournalStorage(JournalFileBackend(str(journal), lock_obj=lock))


def folders(runs: Iterable[Run]) -> list[Path]:
    """Return the folders of all searches to which any of the runs belongs."""
    sweeps = dict.fromkeys(run.path.resolve().parent.parent for run in runs)
    journals = {folder: folder / JOURNAL for folder in sweeps}
    return [
        folder
        for folder, journal in journals.items()
        if journal.is_file() and not journal.is_symlink()
    ]


def search_result(folder: Path) -> SearchResult:
    """Return the results of a search, which may still be running.

    The table has one row for each trial that ended with a value. The columns are `trial` (number
    from 1), `value`, `state`, and `best` (the best value up to the trial, without pruned trials).

    Raises:
        LabkitError: If the sweep's record or Optuna's journal cannot be read.
    """
    try:
        if (size := (folder / JOURNAL).lstat().st_size) > LONGEST_JOURNAL:
            raise ValueError(f"it has {size:,} bytes; allowed: at most {LONGEST_JOURNAL:,}")
        return _read(folder, store.read_json(folder / "sweep.json")["search"])
    except LabkitError:
        raise
    # Optuna may raise any exception when it reads a damaged journal.
    except Exception as error:
        raise LabkitError(f"{folder.name}/{JOURNAL} cannot be read: {short(error)}") from error


def _read(folder: Path, record: store.Record) -> SearchResult:
    import optuna
    import pandas as pd

    study = optuna.load_study(study_name=STUDY, storage=storage(folder))
    rows = [
        (trial.number + 1, trial.value, trial.state.name.lower())
        for trial in study.get_trials(deepcopy=False)
        if trial.value is not None and trial.state.is_finished()
    ]
    trials = pd.DataFrame(rows, columns=["trial", "value", "state"])
    completed = trials["value"].where(trials["state"] == "complete")
    trials["best"] = (completed.cummax() if record["maximize"] else completed.cummin()).ffill()
    importances: dict[str, float] = {}
    if completed.nunique() > 1 and len(record["axes"]) > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            importances = optuna.importance.get_param_importances(study)
    return SearchResult(str(record["metric"]), trials, importances)
