"""Where the runs of this process go, and how the seeds of one experiment make one run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from labkit.experiment import Experiment
from labkit.records import store
from labkit.records.run import Run, aggregate


def directory(experiment: Experiment) -> Path:
    """A new run directory: in the folder of this process's job, else of interactive runs."""
    interactive = Path(os.environ.get("LABKIT_RUNS", "runs")) / "interactive"
    folder = Path(os.environ.get("LABKIT_JOB", interactive))
    folder.mkdir(parents=True, exist_ok=True)
    # Resolved: a Run is found also when the notebook has changed its folder.
    return store.new_run_directory(folder.resolve(), f"{experiment.label}-{experiment.hash8}")


def run_all(experiment: Experiment, run: Callable[[Experiment, Path], Run]) -> Run:
    """Run each seed into a directory of its own below one that holds what they say together."""
    import pandas as pd

    top = directory(experiment)
    store.start(top, experiment.to_json())
    seeds = []
    try:
        for seed in range(experiment.seed, experiment.seed + experiment.repeats):
            folder = top / f"seed{seed}"
            folder.mkdir()
            seeds.append(run(experiment.replace(repeats=1, seed=seed), folder))
            if (status := seeds[-1].status)["state"] == "interrupted":  # by the stop button
                store.interrupt(top, status["cause"])
                return Run(top)
    except KeyboardInterrupt:
        store.interrupt(top)
        raise
    except BaseException as error:
        store.fail(top, f"{type(error).__name__}: {error}", getattr(error, "rank", None))
        raise
    history = pd.concat([seed.history for seed in seeds], ignore_index=True)
    store.finish(top, aggregate(seeds), history)
    return Run(top)
