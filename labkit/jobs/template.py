"""The notebook that `labkit new` writes, with a question, parameters, runs and figures."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.common.errors import InvalidInput, cannot_write
from labkit.experiment import Experiment
from labkit.jobs.parameters import NotebookParameter

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON

STRATEGIES = '["AllReduce", {name: AllReduce, compressor: {name: ErrorFeedback, inner: TopK}}]'

_QUESTION = """\
# Which strategy trains {model} on {dataset} best?

Every strategy trains the same model on the same data from the same weights; one process alone is
the baseline. What do you expect, and why? Write your answer here before you run the cells.
"""
_PARAMETERS = """\
workers: int = 2  # MPI ranks
network: str | None = None  # emulated network of labkit.network.PRESETS; None for the real network
model: str = {model}  # a name of labkit.models.MODELS
model_options: dict = {{}}  # options of the model
dataset: str = {dataset}  # a name of labkit.datasets.DATASETS
dataset_options: dict = {{}}  # options of the data set
strategy: list[str | dict] = [
{strategies}
]  # names of labkit.strategies.STRATEGIES, or mappings of a name and its fields
epochs: int = 5  # passes over the training data
batch_size: int = 128  # global batch size: samples of all ranks in one step
optimizer: str = "sgd"  # a Keras optimizer
learning_rate: float = 0.1  # learning rate for one worker
seed: int = 0  # seed of the first run
repeats: int = 1  # number of seeds per run
"""
_EXPERIMENTS = """\
import labkit as lk

one = lk.Experiment(
    model=model, model_options=model_options, dataset=dataset, dataset_options=dataset_options,
    epochs=epochs, batch_size=batch_size, optimizer=optimizer, learning_rate=learning_rate,
    seed=seed, repeats=repeats,
)
many = [one.replace(workers=workers, network=network, strategy=each) for each in strategy]
"""
_RANKS = """\
One cluster of MPI engines serves all runs. Before labkit shows a speed, the *equivalence check*
trains 20 steps on the ranks, and compares the result with the one that the strategy promises.
"""
_RUNS = """\
with lk.Cluster(workers=workers) as cluster:
    runs = [cluster.run(experiment) for experiment in [one, *many]]
"""
_FIGURE = """\
## Results

Curves over *steps* compare learning per update. Curves over *seconds* compare the time to a given
accuracy, which matters in practice.
"""
_READING = "**Summary**, computed from the runs of this notebook:"
_NEXT = """\
**Next steps.** Other values: `labkit run {name} -p workers 4 -p network 1GbE`. One page
for a colleague: `labkit report runs -o report.html`. All methods and papers: `labkit methods`.
"""


def new(name: str, model: str = "mlp", dataset: str = "digits", strategies: str = "") -> Path:
    """Write `<name>.ipynb`, which compares strategies on a model and data set; do not run it.

    Args:
        name: Name or path of the new notebook, with or without ".ipynb".
        model: Name of a model in `labkit.models.MODELS`.
        dataset: Name of a data set in `labkit.datasets.DATASETS`.
        strategies: Strategies as YAML, for example `AllReduce, {name: Pipeline, schedule: gpipe}`;
            default: `STRATEGIES`.

    Raises:
        InvalidInput: The file exists, or its folder is missing. An unknown or incompatible model,
            data set or strategy also raises InvalidInput.
    """
    path = Path(name) if name.endswith(".ipynb") else Path(f"{name}.ipynb")
    kind = "list[str | dict]"
    declared = NotebookParameter("strategies", kind, None, "", f"strategy: {kind}")
    chosen = declared.convert(strategies or STRATEGIES)
    # The assertion only informs the type checker that `chosen` is a list.
    assert isinstance(chosen, list)
    # Experiments are created before the notebook file. An invalid strategy therefore raises an
    # error before anything is written.
    for strategy in chosen:
        Experiment(model=model, dataset=dataset, workers=2, strategy=strategy)
    # For an absolute path, only the file name is shown. Notebooks must not contain folder names of
    # this machine.
    shown = shlex.quote(path.name if path.is_absolute() else str(path))
    notebook = _notebook(list(_cells(shown, model, dataset, chosen)))
    # The notebook's text has the format in which Jupyter saves, so that Jupyter later changes only
    # edited lines.
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    try:
        # Mode "x" never overwrites an existing notebook, even if another command creates it at the
        # same time.
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise InvalidInput(f"{path} already exists; give another name") from None
    except OSError as error:
        # On a read-only disk, `unlink` may fail, but no incomplete file exists either.
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise cannot_write(path, error) from error
    return path


def _cells(
    name: str, model: str, dataset: str, strategies: Sequence[JSON]
) -> Iterator[dict[str, JSON]]:
    yield _markdown(_QUESTION.format(model=model, dataset=dataset))
    lines = "\n".join(f"    {_literal(strategy)}," for strategy in strategies)
    names = {"model": _literal(model), "dataset": _literal(dataset)}
    yield _code(_PARAMETERS.format(strategies=lines, **names), tags=["parameters"])
    yield _code(_EXPERIMENTS)
    yield _markdown(_RANKS)
    yield _code(_RUNS)
    yield _markdown(_FIGURE)
    yield _code("lk.compare(runs)")
    yield _code("lk.table(runs)")
    yield _markdown(_READING)
    yield _code("lk.summarize(runs)", tags=["answer"])
    yield _markdown(_NEXT.format(name=name))


def _markdown(text: str) -> dict[str, JSON]:
    return _cell("markdown", text, {})


def _code(text: str, **metadata: JSON) -> dict[str, JSON]:
    return _cell("code", text, metadata) | {"execution_count": None, "outputs": []}


def _cell(kind: str, text: str, metadata: dict[str, JSON]) -> dict[str, JSON]:
    """Return a notebook cell; its id is a hash of its text, which differs for each cell."""
    name = hashlib.sha256(text.encode()).hexdigest()[:8]
    lines = text.strip("\n").splitlines(keepends=True)
    return {"cell_type": kind, "id": name, "metadata": metadata, "source": lines}


def _notebook(cells: Sequence[dict[str, JSON]]) -> dict[str, JSON]:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _literal(value: JSON) -> str:
    """Return a value as Python source, with texts in double quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
