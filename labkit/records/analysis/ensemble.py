"""The test accuracy of an ensemble, which consists of several trained models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit import datasets
from labkit.records.run import Run


def ensemble_accuracy(runs: Sequence[Run]) -> float:
    """Return the test accuracy of an ensemble that averages the predictions of several models.

    Args:
        runs: Runs that saved their models, all trained on the same named data set with class
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
