"""Small runs like real ones, written by labkit.records.store without TensorFlow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from labkit.records import store
from labkit.records.run import Run

ENVIRONMENT = {
    "labkit": "0.1.0",
    "python": "3.11.9",
    "platform": "Linux",
    "cpu": "a small one",
    "cores": 2,
    "tensorflow": "2.21.0",
}


def experiment(**changes: Any) -> dict[str, Any]:
    """Return the fields of `Experiment.to_json` for a small experiment."""
    fields: dict[str, Any] = {
        "name": "",
        "model": "mlp",
        "model_options": {"widths": [64]},
        "dataset": "digits",
        "strategy": {"name": "AllReduce", "algorithm": "ring", "compressor": None},
        "workers": 2,
        "threads": 1,
        "network": None,
        "clock": "wall",
        "epochs": 3,
        "batch_size": 256,
        "learning_rate": 0.1,
        "seed": 0,
        "repeats": 1,
    }
    return fields | changes


def history(
    workers: int, epochs: int, steps: int = 20, seed: int = 0, step_ms: float = 5.0
) -> dict[str, Any]:
    """Return a history with a falling loss on every rank and step times with a long tail."""
    random = np.random.default_rng(seed)
    step, rank = (grid.ravel() for grid in np.mgrid[0 : epochs * steps, 0:workers])
    time = random.gamma(20.0, step_ms / 20e3, epochs * steps)
    time[0] = 0.4  # the first step traces and compiles
    loss = 0.2 + 2.1 * np.exp(-step / 25.0) + random.normal(0, 0.05, step.size)
    zeros = np.zeros(step.size)
    return {
        "seed": np.full(step.size, seed),
        "epoch": step // steps,
        "step": step,
        "rank": rank,
        "loss": loss,
        "seconds": time[step],
        "compute_seconds": zeros + step_ms * 6e-4,
        "communicate_seconds": zeros + step_ms * 3e-4,
        "wait_seconds": zeros + step_ms * 1e-4,
        "payload_bytes": np.full(step.size, 40_000),
        "wire_bytes": np.full(step.size, 40_000),
        "messages": np.full(step.size, 2),
        "samples": np.full(step.size, 256 // workers),
    }


def metrics(workers: int, epochs: int, steps: int = 20, **changes: Any) -> dict[str, Any]:
    """Return the metrics record that belongs to such a history."""
    step_ms = changes.pop("step_milliseconds", 5.0)
    curve = [
        {
            "epoch": epoch,
            "step": (epoch + 1) * steps,
            "seconds": 0.4 + (epoch + 1) * steps * step_ms / 1000,
            "loss": 2.0 / (epoch + 1),
            "accuracy": 0.9 - 0.4 / (epoch + 1),
            "val_loss": 2.1 / (epoch + 1),
            "val_accuracy": 0.9 - 0.5 / (epoch + 1),
        }
        for epoch in range(epochs)
    ]
    record: dict[str, Any] = {
        "test_loss": curve[-1]["val_loss"],
        "test_accuracy": curve[-1]["val_accuracy"],
        "samples_per_second": 256 / step_ms * 1000,
        "step_ms": {"median": step_ms, "p10": step_ms * 0.8, "p90": step_ms * 1.4},
        "first_step_ms": 400.0,
        "train_seconds": epochs * steps * step_ms / 1000,
        "payload_bytes_per_step": 40_000.0,
        "wire_bytes_per_step": 40_000.0 * (workers > 1),
        "clock": "wall",
        "network": None,
        "oversubscribed": False,
        "workers": workers,
        "threads": 1,
        "equivalence": {
            "verdict": "passed",
            "max_abs_difference": 3.1e-16,
            "tolerance": 1e-9,
            "reason": "held against one process in float64",
        },
        "epochs": curve,
    }
    return record | changes


FAILED_GATE = {
    "verdict": "failed",
    "max_abs_difference": 0.25,
    "tolerance": 1e-9,
    "reason": "parameters differ from those of one process",
}


def write_run(
    parent: Path,
    name: str = "mlp-digits-allreduce-w2",
    *,
    seed: int = 0,
    steps: int = 20,
    step_ms: float = 5.0,
    measured: dict[str, Any] | None = None,
    **parameters: Any,
) -> Run:
    """Write a completed run; `parameters` change the experiment, `measured` the metrics."""
    fields = experiment(seed=seed, **parameters)
    workers, epochs = fields["workers"], fields["epochs"]
    directory = store.new_run_directory(parent, name)
    store.start(directory, fields, ENVIRONMENT)
    store.finish(
        directory,
        metrics(workers, epochs, steps, step_milliseconds=step_ms) | (measured or {}),
        history(workers, epochs, steps, seed=seed, step_ms=step_ms),
    )
    return Run(directory)


def write_job(root: Path, outputs: list[dict[str, Any]] | None = None, **parameters: Any) -> Path:
    """Write a job whose executed notebook holds these outputs, but no runs yet."""
    import nbformat
    from nbformat import v4

    job = store.new_job_directory(root, "notebooks/tour.ipynb", parameters)
    cells = [
        v4.new_markdown_cell("# Does it pay?\n\nA *question*. <script>window.hit = 1</script>"),
        v4.new_code_cell(
            "lk.compare(runs)", outputs=[v4.output_from_msg(o) for o in outputs or []]
        ),
    ]
    nbformat.write(v4.new_notebook(cells=cells), job / "output.ipynb")
    store.complete(job)
    return job


def output(**data: Any) -> dict[str, Any]:
    """Return a kernel's display message; an argument `text_html` is the data of type text/html."""
    bundle = {kind.replace("_", "/", 1): value for kind, value in data.items()}
    return {
        "header": {"msg_type": "display_data"},
        "content": {"data": bundle, "metadata": {}},
    }
