"""Figure of the distribution of class labels among the samples of each worker."""

from __future__ import annotations

import numpy as np
import pandas as pd

from labkit import datasets
from labkit.common.errors import InvalidInput
from labkit.experiment import Experiment
from labkit.experiment.batches import plan_of
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import lines
from labkit.figures.kit.marks import bars
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import sheet


def shard_labels(experiment: Experiment) -> Figure:
    """Draw the fractions of class labels in each worker's samples, one stacked bar per worker.

    Args:
        experiment: An experiment whose data set has class labels. The function loads the data.

    Raises:
        InvalidInput: The labels of the data are not integers.
    """
    labels = _labels(experiment)
    shares = experiment.batch_weights or (1.0,) * experiment.workers
    plan = plan_of(experiment, len(labels), shares, labels)
    by_worker = [np.bincount(labels[plan.own_rows(worker)]) for worker in range(experiment.workers)]
    rows = [
        {"label": str(label), "worker": f"worker {worker}", "share": count / counts.sum()}
        | {"hover": f"worker {worker}: {count} of {counts.sum()} samples have the label {label}"}
        for worker, counts in enumerate(by_worker)
        for label, count in enumerate(counts)
        if count
    ]
    looks = lines(map(str, np.unique(labels)))
    panel = Panel(
        title=f"Labels of the samples of each worker\ndata_partition={experiment.data_partition}",
        x="",
        y="share of the worker's samples",
        traces=bars(pd.DataFrame(rows), "worker", "share", looks, by="label"),
        x_axis={"type": "category"},
        y_axis={"tickformat": ".0%"},
    )
    words = [
        f"worker {worker}: {np.count_nonzero(counts)} labels, {counts.max() / counts.sum():.0%} "
        f"of the worker's samples have the label {counts.argmax()}"
        for worker, counts in enumerate(by_worker)
    ]
    figure = sheet([[panel]], looks.values(), "Labels by worker", [], words, plot=240)
    figure.update_layout(barmode="stack")
    return figure


def _labels(experiment: Experiment) -> np.ndarray:
    y: object = None
    if isinstance(experiment.dataset, str):
        y = datasets.load(experiment.dataset, **experiment.dataset_options).y_train
    elif isinstance(experiment.dataset, tuple):
        y = experiment.dataset[1]
    if not isinstance(y, np.ndarray) or y.ndim != 1 or y.dtype.kind not in "iu":
        raise InvalidInput(
            "the data have no class labels (one integer per sample) to draw; give a data set of "
            "classes, or arrays (x, y) with integer labels y"
        )
    return y
