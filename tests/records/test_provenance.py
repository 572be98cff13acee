"""Test which inputs of a run are recorded, and which changes of them are found."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import labkit as lk
from labkit.common import reads
from labkit.common.errors import LabkitError
from labkit.figures import summarize_comparison
from labkit.records import provenance, store
from labkit.records.provenance import CHANGED, Inputs


@pytest.fixture(autouse=True)
def nothing_read() -> None:
    reads.forget()


def recorded(folder: Path, **fields: object) -> Path:
    """Write a record of inputs with the given fields."""
    empty = {"files": {}, "imports": [], "packages": {}, "repository": {}, "cells": None}
    folder.mkdir(parents=True, exist_ok=True)
    store.write_json(folder / provenance.FILE, empty | fields)
    return folder


def checksum_of(name: str) -> str:
    """Return the checksum that a run of this process would record for a file."""
    Path(name).read_bytes()
    return provenance.inputs().files[name]


def test_files_that_python_reads_are_recorded_and_results_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path.parent / f"{tmp_path.name}-data"
    for folder in (Path("sub"), Path(".hidden"), data):
        folder.mkdir()
        (folder / "x.csv").write_text("1")
    monkeypatch.setenv("LABKIT_DATA", str(data))
    Path("helper_of_mine.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    reads.forget()
    __import__("helper_of_mine")
    for path in (Path("sub/x.csv"), Path(".hidden/x.csv"), data / "x.csv", Path(__file__)):
        path.read_bytes()
    for mode in ("w", "a", "r"):
        Path("result.csv").open(mode).close()
    Path("new.tmp").write_text("1")
    Path("new.tmp").rename("renamed.csv")
    Path("renamed.csv").read_text()
    found = provenance.inputs()
    assert found.files.keys() == {"helper_of_mine.py", "sub/x.csv", "{data}/x.csv"}
    assert {"helper_of_mine", "pytest"} <= found.imports
    assert not {"labkit", "os"} & found.imports
    del sys.modules["helper_of_mine"]


def test_a_file_that_changed_after_it_was_read_has_no_checksum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("data.csv").write_text("1")
    reads.forget()
    Path("data.csv").read_text()
    Path("copy.csv").write_text("23")
    Path("copy.csv").rename("data.csv")
    reads.written.clear()  # as if another process had replaced the file
    assert provenance.inputs().files == {"data.csv": CHANGED}
    monkeypatch.setenv("LABKIT_JOB", "job")
    Path("data.csv").read_text()
    assert provenance.inputs().files == {"data.csv": CHANGED}


def test_a_changed_module_data_file_or_package_is_named(tmp_path: Path) -> None:
    for name in ("helper.py", "data.csv", "same.csv"):
        Path(name).write_text(name)
    reads.forget()
    files = {name: checksum_of(name) for name in ("helper.py", "data.csv", "same.csv")}
    versions = provenance.packages()
    packages = versions | {"numpy": "1.0", "pyyaml": "1.0", "pandas": "1.0", "left-out": "1.0"}
    imports = ["left_out", "numpy", "yaml"]
    run = recorded(tmp_path / "run", files=files, packages=packages, imports=imports)
    changed_packages = [
        "left-out 1.0 is now missing",
        f"numpy 1.0 is now {versions['numpy']}",
        f"pyyaml 1.0 is now {versions['pyyaml']}",
    ]
    assert provenance.changes(run) == changed_packages
    Path("helper.py").write_text("changed")
    Path("data.csv").unlink()
    assert provenance.changes(run) == [
        *("helper.py has changed", "data.csv is missing"),
        *changed_packages,
    ]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "helper.py").write_text("helper.py")
    assert "helper.py has changed" not in provenance.changes(run, elsewhere / "nb.ipynb")


def test_a_run_without_a_record_has_no_known_change(tmp_path: Path) -> None:
    assert provenance.changes(tmp_path) == []
    Path("provenance.json").write_text('{"schema": 1, "files": {"a": 1}}')
    with pytest.raises(LabkitError, match="a mapping from at most 10,000 names to texts"):
        provenance.changes(tmp_path)


def test_a_file_that_changed_during_the_run_is_a_change(tmp_path: Path) -> None:
    Path("data.csv").write_text("1")
    run = recorded(tmp_path / "run", files={"data.csv": CHANGED})
    assert provenance.changes(run) == [f"data.csv {CHANGED}"]


def test_large_files_are_known_by_size_and_time(tmp_path: Path) -> None:
    with open("large.bin", "wb") as file:
        file.truncate(provenance.LARGE + 1)
    reads.forget()
    run = recorded(tmp_path / "run", files={"large.bin": checksum_of("large.bin")})
    assert provenance.changes(run) == []
    os.utime("large.bin", (1, 1))
    assert provenance.changes(run) == ["large.bin has changed"]


def test_inputs_of_ranks_join_those_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "_OF_RANKS", Inputs({}, set()))
    monkeypatch.setenv("LABKIT_JOB", str(tmp_path / "job"))
    provenance.add(Inputs({"a.csv": "1", "b.csv": "1"}, {"of_a_rank"}))
    provenance.add(Inputs({"b.csv": "2"}, set()))
    run = tmp_path / "job" / "run"
    run.mkdir(parents=True)
    provenance.write(run, begin=True)
    found = lk.Run(run).provenance
    assert found["files"] == {"a.csv": "1", "b.csv": CHANGED}
    assert "of_a_rank" in found["imports"]
    assert found["packages"]["numpy"]
    assert found["repository"] == {}
    provenance.forget()
    assert "of_a_rank" not in provenance._OF_RANKS.imports


def test_a_comparison_names_inputs_only_where_they_differ(tmp_path: Path) -> None:
    runs = []
    for number in (1, 2):
        run = tmp_path / f"run{number}"
        files = {"same.csv": "1", "helper.py": f"{number}"} | (
            {"only.csv": "1"} if number == 1 else {}
        )
        recorded(
            run,
            files=files,
            packages={"keras": f"3.{number}"},
            repository={"commit": "abc" * 10},
        )
        store.start(run, {"notebook": "nb.ipynb", "rate": number})
        store.finish(run, {"test_accuracy": 0.5}, [])
        runs.append(lk.Run(run))
    line = "The runs used different inputs: `helper.py` (2 versions), keras 3.1 and 3.2"
    assert line in summarize_comparison(runs)
    assert "different inputs" not in summarize_comparison(runs[:1])
