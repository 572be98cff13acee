"""Experiments as commands are given them: files, or names of models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.common.errors import InvalidInput, short

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON
    from labkit.experiment import Experiment


def experiment_of(path: Path, given: Mapping[str, JSON]) -> Experiment:
    """The experiment of a file, with other values for some fields."""
    from labkit.experiment import Experiment
    from labkit.experiment.experiment import SCHEMA
    from labkit.jobs.parameters import read_text, read_yaml, value_of

    fields = read_yaml(read_text(path), str(path))
    # The experiment.json of a run is a file to start from, too.
    if (schema := fields.pop("schema", SCHEMA)) not in range(1, SCHEMA + 1):
        raise InvalidInput(f"{path} has schema {short(schema)}; allowed: 1 to {SCHEMA}")
    return Experiment(**fields | {name: value_of(value) for name, value in given.items()})


def experiment_named(model: str, given: Mapping[str, JSON]) -> Experiment:
    """The experiment of a file, or one with this model, with these values for some fields."""
    from labkit.experiment import Experiment
    from labkit.jobs.parameters import value_of

    if Path(model).suffix in (".yaml", ".yml", ".json"):
        return experiment_of(Path(model), given)
    return Experiment(model=model, **{name: value_of(value) for name, value in given.items()})
