"""Experiments given on the command line, as YAML files or names of models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.common.errors import InvalidInput, short

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON
    from labkit.experiment import Experiment


def experiment_of(path: Path, overrides: Mapping[str, JSON]) -> Experiment:
    """Return the experiment in a YAML or JSON file, with some fields replaced by `overrides`."""
    from labkit.common.canonical_json import SCHEMA
    from labkit.experiment import Experiment
    from labkit.jobs.parameters import read_text, read_yaml, value_of
    from labkit.records.renamed import rename_experiment

    fields = read_yaml(read_text(path), str(path))
    # The file may be the experiment.json of a run, which contains a schema version.
    schema = fields.pop("schema", SCHEMA)
    if not isinstance(schema, int) or not 1 <= schema <= SCHEMA:
        raise InvalidInput(
            f"{path} has the schema version {short(schema)}; this labkit reads versions 1 to "
            f"{SCHEMA}"
        )
    if schema < SCHEMA:
        fields = rename_experiment(fields)
    return Experiment(**fields | {name: value_of(value) for name, value in overrides.items()})


def experiment_named(model: str, overrides: Mapping[str, JSON]) -> Experiment:
    """Return the experiment of a file or of a model's name, with some fields replaced."""
    from labkit.experiment import Experiment
    from labkit.jobs.parameters import value_of

    if Path(model).suffix in (".yaml", ".yml", ".json"):
        return experiment_of(Path(model), overrides)
    return Experiment(model=model, **{name: value_of(value) for name, value in overrides.items()})
