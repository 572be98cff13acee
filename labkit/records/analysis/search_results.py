"""What a search tried, what it came to, and which parameters mattered: Optuna's own record."""

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

JOURNAL = "optuna.journal"  # in the sweep's folder: Optuna's storage
STUDY = "labkit"
LONGEST_JOURNAL = 2**26  # bytes; one of thousands of trials, each with its curve, has some millions


class Searched(NamedTuple):
    """A search: what for, its trials, and the importance of each parameter, if it can be told."""

    metric: str
    trials: pd.DataFrame
    importances: dict[str, float]


def storage(folder: Path) -> optuna.storages.JournalStorage:
    """Optuna's storage in a sweep's folder."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    journal = folder / JOURNAL
    with suppress(FileNotFoundError):
        os.close(open_file(journal))  # refuses a link, and a pipe, which Optuna would wait for
    # Optuna's usual lock is a link, and a folder with links is not resumed.
    lock = JournalFileOpenLock(str(journal))
    return JournalStorage(JournalFileBackend(str(journal), lock_obj=lock))


def folders(runs: Iterable[Run]) -> list[Path]:
    """The folders of searches in which these runs lie."""
    sweeps = dict.fromkeys(run.path.resolve().parent.parent for run in runs)
    journals = {folder: folder / JOURNAL for folder in sweeps}
    return [
        folder
        for folder, journal in journals.items()
        if journal.is_file() and not journal.is_symlink()
    ]


def searched(folder: Path) -> Searched:
    """What a search came to so far.

    Trials have a row each that has ended with a value: trial (from 1), value, state, best (so far,
    of those that were not pruned).

    Raises:
        LabkitError: its record or its journal cannot be read.
    """
    try:
        if (size := (folder / JOURNAL).lstat().st_size) > LONGEST_JOURNAL:
            raise ValueError(f"it has {size:,} bytes; at most {LONGEST_JOURNAL:,} are read here")
        return _read(folder, store.read_json(folder / "sweep.json")["search"])
    except LabkitError:
        raise
    # Optuna lets through whatever a journal that it has not written makes its parts raise.
    except Exception as error:
        raise LabkitError(f"{folder.name}/{JOURNAL} cannot be read: {short(error)}") from error


def _read(folder: Path, record: store.Record) -> Searched:
    import optuna
    import pandas as pd

    study = optuna.load_study(study_name=STUDY, storage=storage(folder))
    rows = [
        (trial.number + 1, trial.value, trial.state.name.lower())
        for trial in study.get_trials(deepcopy=False)
        if trial.value is not None and trial.state.is_finished()
    ]
    trials = pd.DataFrame(rows, columns=["trial", "value", "state"])
    whole = trials["value"].where(trials["state"] == "complete")
    trials["best"] = (whole.cummax() if record["maximize"] else whole.cummin()).ffill()
    importances: dict[str, float] = {}
    if whole.nunique() > 1 and len(record["axes"]) > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            importances = optuna.importance.get_param_importances(study)
    return Searched(str(record["metric"]), trials, importances)
