"""Test the first cluster of a notebook, which labkit reads before the notebook runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from labkit.jobs.first_cluster import first_cluster

PARAMETERS = "workers: int = 3  # ranks\nthreads: int = 2\nnames: list = [1]"


def notebook(folder: Path, *sources: str) -> Path:
    def cell(source: str, tags: list[str]) -> dict[str, Any]:
        metadata = {"tags": tags}
        return {"cell_type": "code", "source": source, "metadata": metadata, "outputs": []}

    cells = [cell(PARAMETERS, ["parameters"]), *(cell(source, []) for source in sources)]
    path = folder / "asked.ipynb"
    path.write_text(
        json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4})
    )
    return path


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("cluster = lk.Cluster(workers=workers)\ncluster", (3, 1)),
        ("cluster = lk.Cluster(workers, threads=threads)", (3, 2)),
        ("with Cluster(workers=2) as cluster:\n    pass", (2, 1)),
        ("lk.Cluster(workers=4)", (4, 1)),
        ("cluster = lk.Cluster(workers=max(names))", None),
        ("cluster = lk.Cluster(workers=names)", None),
        ("cluster = lk.Cluster(workers=unknown)", None),
        ("cluster = lk.Cluster(workers=True)", None),
        ("cluster = lk.Cluster(workers=0)", None),
        ("cluster = lk.Cluster()", None),
        ("cluster = lk.Cluster(workers=2, fault_tolerant=True)", None),
        ("cluster = lk.Cluster(**{'workers': 2})", None),
        ("if workers:\n    cluster = lk.Cluster(workers=2)", None),
        ("%time cluster = lk.Cluster(workers=2)", None),
        ("cluster = lk.Cluster(2, 1, 'mine')", None),
        ("cluster = lk.Cluster({} / 2)", None),
        ("workers = 7\ncluster = lk.Cluster(workers=workers)", None),
        ("print(workers)", None),
    ],
)
def test_it_is_read_where_its_shape_is_a_number_or_a_parameter(
    tmp_path: Path, source: str, expected: tuple[int, int] | None
) -> None:
    found = first_cluster(notebook(tmp_path, "import labkit as lk", source), {})
    assert (None if found is None else (found.workers, found.threads)) == expected


def test_values_that_are_given_win_and_the_first_cluster_counts(tmp_path: Path) -> None:
    path = notebook(tmp_path, "a = Cluster(workers=workers)", "b = Cluster(workers=9)")
    found = first_cluster(path, {"workers": 5})
    assert found is not None
    assert found.workers == 5


def test_one_that_comes_late_or_behind_other_values_is_not_read(tmp_path: Path) -> None:
    made = "cluster = lk.Cluster(workers=workers)"
    assert first_cluster(notebook(tmp_path, "1", made), {}) is not None
    assert first_cluster(notebook(tmp_path, "1", "2", made), {}) is None
    assert first_cluster(notebook(tmp_path, "workers = max(names)", made), {}) is None


def test_clusters_elsewhere_are_not_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABKIT_LAUNCHER", "slurm")
    found = first_cluster(notebook(tmp_path, "Cluster(workers=2)"), {})
    assert found is not None
    assert not found.is_local
