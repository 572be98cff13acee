"""What several trained models tell right together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit import datasets
from labkit.records.run import Run


def ensemble_accuracy(runs: Sequence[Run]) -> float:
    """The share of held-out rows that the mean of the runs' predictions tells right.

    Args:
        runs: of the same named data set, whose labels are classes; the model of each is predicted
            with.
    """
    from labkit.programs.soft_targets import Soft

    given = runs[0].experiment
    data = datasets.load(given["dataset"], **given["dataset_options"])
    found = []
    for run in runs:
        model = run.model()
        found.append(np.asarray(Soft(model).targets(model.predict(data.x_test, verbose=0))))
    return float(np.mean(np.mean(found, 0).argmax(-1) == data.y_test))
