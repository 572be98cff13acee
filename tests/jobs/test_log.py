"""Test that `lk.log` records a run that tables, figures, reports and exports can read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import labkit as lk
from labkit.common.errors import InvalidInput
from labkit.jobs.glue import scraps
from labkit.jobs.log import RunLog, executed_parameters, experiment
from labkit.jobs.notebook import execute
from labkit.records import store
from labkit.records.export import points
from labkit.records.stream import FOLDER

PARAMETERS = 'rate: float = 0.1  # of learning\nmodel: str = "mine"\nstrategy: str = "adam"'


def notebook(path: Path, *sources: str) -> Path:
    """Write a notebook of a parameters cell and further cells."""
    cells = [
        {
            "cell_type": "code",
            "id": f"cell{place}",
            "metadata": {} if place else {"tags": ["parameters"]},
            "execution_count": None,
            "outputs": [],
            "source": source,
        }
        for place, source in enumerate((PARAMETERS, *sources))
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel}
    path.write_text(
        json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})
    )
    return path


def logged(folder: Path, fields: dict[str, object], **values: object) -> lk.Run:
    folder.mkdir(parents=True)
    log = RunLog(folder, experiment("mine.ipynb", fields))
    log.add(values)
    store.complete(folder)
    return log.run


def test_numbers_are_results_and_lists_are_curves(tmp_path: Path) -> None:
    run = logged(
        tmp_path / "one",
        {"rate": 0.1},
        accuracy=np.float32(0.5),
        loss=np.array([2.0, 1.0, 0.5]),
        f1=[0.1, 0.2],
        remark="of a small model",
    )
    assert run.metrics["test_accuracy"] == 0.5
    assert (run.metrics["f1"], run.metrics["loss"], run.metrics["remark"]) == (
        *(0.2, 0.5),
        "of a small model",
    )
    assert list(run.history["loss"]) == [2.0, 1.0, 0.5]
    assert [row.get("f1") for row in run.metrics["epochs"]] == [0.1, 0.2, None]
    curves = {(p.name, p.step, p.value) for p in points(run)}
    assert {("step/loss", 2, 0.5), ("epoch/f1", 2, 0.2)} <= curves
    assert run.experiment == {"notebook": "mine.ipynb", "rate": 0.1}


def test_points_of_curves_come_with_their_seconds(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    log = RunLog(tmp_path / "steps", {"seed": 3})
    for step in (1, 2, 3):
        log.add({"loss": 1 / step, "val_loss": 2 / step}, step)
    log.write()
    assert log.run.status["state"] == "running"
    assert list(log.run.history["seed"]) == [3, 3, 3]
    assert log.run.history["seconds"].notna().all()
    assert log.run.metrics["test_loss"] == 2 / 3


def test_logged_runs_stand_in_tables_figures_and_reports(tmp_path: Path) -> None:
    runs = [
        logged(tmp_path / f"{rate}", {"rate": rate}, accuracy=0.9 + rate / 10, f1=rate, loss=[2, 1])
        for rate in (0.1, 0.2)
    ]
    table = lk.table(runs)
    assert list(table["rate"]) == [0.1, 0.2]
    assert list(table["test_accuracy"]) == pytest.approx([0.91, 0.92])
    assert list(table["f1"]) == [0.1, 0.2]
    drawn = [list(t.y) for t in lk.compare(runs).data if t.y is not None and len(t.y) == 2]
    assert [2.0, 1.0] in drawn
    page = lk.report(runs, tmp_path / "report.html").read_text()
    assert "rate 0.2" in page
    assert "nan s" not in page


def test_numbers_and_curves_of_ones_own_are_read_out_and_drawn(tmp_path: Path) -> None:
    def run(rate: float, seed: int) -> lk.Run:
        values = {f"own {k}": [rate, 2.0] for k in range(7)}
        folder = tmp_path / f"{rate}-{seed}"
        f1 = [0.1, rate + seed / 100]
        return logged(folder, {"rate": rate, "seed": seed}, F1=f1, note="n", error=0.5, **values)

    runs = [run(rate, seed) for rate in (0.1, 0.2, 0.3) for seed in (1, 2)]
    text = lk.figures.summarize_comparison(runs)
    assert "No completed run has a test result" not in text
    assert (
        "Greatest F1: **rate 0.3**, 0.315 (2 seeds, 0.31 to 0.32); next rate 0.2, 0.215 "
        "(2 seeds, 0.21 to 0.22); least rate 0.1, 0.115 (2 seeds, 0.11 to 0.12): "
        "every seed is greater than every seed of the next run" in text
    )
    assert "No difference beyond the spread of the seeds in own 0: " in text
    assert "The table has 3 other user-defined metrics" in text
    assert "F1 0.315" in lk.figures.summarize(runs)
    figure = lk.compare(runs)
    titles = [annotation.text for annotation in figure.layout.annotations]
    assert "<b>F1</b>" in titles
    assert "<b>error</b>" not in titles  # this metric has no curve
    assert sum("own" in title for title in titles) == 5
    assert "curves of 6 of 8 user-defined metrics" in figure.layout.meta["alt"]
    drawn = [list(t.y) for t in figure.data if t.y is not None and len(t.y) == 2]
    assert any(each == pytest.approx([0.1, 0.315]) for each in drawn)
    page = lk.report(runs, tmp_path / "report.html").read_text()
    assert "<h4>F1</h4>" in page


@pytest.mark.parametrize("values", [{"loss": [[1.0]]}, {"model": object()}, {"epochs": 3}])
def test_what_is_no_result_is_refused(tmp_path: Path, values: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(values))):
        logged(tmp_path / "odd", {}, **values)


def test_parameters_of_any_type_make_a_record_that_is_read_without_paths(tmp_path: Path) -> None:
    fields = {"strategy": "adam", "epochs": [1, 2], "data": "/srv/lab/alice/set.csv"}
    run = logged(tmp_path / "own", fields, accuracy=0.5)
    assert run.experiment["strategy"] == {"name": "adam"}
    assert run.experiment["epochs (own)"] == [1, 2]
    assert "alice" not in (run.path / "experiment.json").read_text()
    assert [each.path for each in lk.load_runs(tmp_path)] == [run.path]


def test_scraps_of_scrapbook_and_records_of_papermill_are_read() -> None:
    scrap = {"name": "f1", "data": 0.5, "encoder": "json", "version": 1}
    outputs = [
        {"data": {"application/scrapbook.scrap.json+json": scrap}},
        {"data": {"application/papermill.record+json": {"auc": 0.7}}},
        {"data": {"text/plain": "0.1"}},
        {"name": "stdout", "text": "f1"},
    ]
    assert list(scraps(iter(outputs))) == [("f1", 0.5), ("auc", 0.7)]


LOGS = """\
import labkit as lk
for step in range(1, 4):
    run = lk.log(step=step, val_accuracy=step / 10)
run.status["state"]"""
GLUES = """\
from IPython.display import display
scrap = {"name": "f1", "data": 0.5, "encoder": "json", "version": 1}
display({"application/scrapbook.scrap.json+json": scrap}, raw=True)
import sys
assert not {"tensorflow", "mpi4py"} & {n for n in sys.modules if "." not in n}, "heavy"
"""


@pytest.mark.heavy  # a job's process
def test_a_notebook_of_ones_own_has_runs_with_its_parameters(tmp_path: Path) -> None:
    path = notebook(tmp_path / "mine.ipynb", LOGS, GLUES)
    job = execute(path, {"rate": "0.2"}, tmp_path / "runs")
    assert job.state == "completed", job.cause
    glued, mine = sorted(lk.load_runs(job.path), key=lambda run: run.name)
    for run in (glued, mine):
        assert run.status["state"] == "completed"
        named = {k: v for k, v in run.experiment.items() if k != "notebook"}
        assert named == {"rate": 0.2, "model": "mine", "strategy": {"name": "adam"}}
        assert "mine.ipynb" in run.experiment["notebook"]
    assert mine.metrics["test_accuracy"] == 0.3
    assert glued.metrics["f1"] == 0.5


@pytest.mark.heavy  # a job's process
def test_a_notebook_that_fails_leaves_a_run_that_says_so(tmp_path: Path) -> None:
    path = notebook(tmp_path / "mine.ipynb", LOGS, "1 / 0")
    job = execute(path, {}, tmp_path / "runs")
    [run] = lk.load_runs(job.path)
    assert (run.status["state"], run.status["cause"]) == (
        *("failed",),
        "ZeroDivisionError: division by zero",
    )
    assert run.metrics["test_accuracy"] == 0.3


@pytest.mark.slow
@pytest.mark.heavy  # a job's process
def test_a_notebook_that_fails_at_once_is_in_the_comparison(tmp_path: Path) -> None:
    path = notebook(tmp_path / "mine.ipynb", "if rate > 0.2: 1 / 0", LOGS)
    jobs = [execute(path, {"rate": rate}, tmp_path / "runs") for rate in ("0.3", "0.1")]
    assert [job.state for job in jobs] == ["failed", "completed"]
    runs = lk.load_runs(tmp_path / "runs")
    assert sorted(run.experiment["rate"] for run in runs) == [0.1, 0.3]
    [lost] = [run for run in runs if run.status["state"] == "failed"]
    assert lost.status["cause"] == jobs[0].cause
    page = lk.report(runs, tmp_path / "page.html").read_text()
    assert "division by zero" in page


@pytest.mark.slow
def test_a_script_logs_beside_other_interactive_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import labkit as lk\nlk.log('a', parameters={'rate': 1}, loss=[2.0, 1.0])\n")
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, check=True)
    [run] = lk.load_runs(tmp_path / "runs")
    assert run.status["state"] == "completed"
    assert run.experiment == {"notebook": "train.py", "name": "a", "rate": 1}
    assert run.environment["cores"] > 0


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize(
    ("end", "state", "cause"),
    [
        ("sys.exit(1)", "failed", "exit code 1"),
        ("sys.exit('no data')", "failed", "no data"),
        ("1 / 0", "failed", "ZeroDivisionError: division by zero"),
        ("threading.Thread(target=sys.exit, args=(1,)).start()", "completed", None),
    ],
)
def test_a_script_that_exits_with_an_error_has_failed(
    tmp_path: Path, end: str, state: str, cause: str | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import sys, threading\nimport labkit as lk\nlk.log(f1=0.5)\n{end}\n")
    ended = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True)
    assert bool(ended.returncode) == (state == "failed")
    [run] = lk.load_runs(tmp_path / "runs")
    assert (run.status["state"], run.status.get("cause")) == (state, cause)
    assert run.metrics["f1"] == 0.5


SESSION = """\
import os, sys
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in {cells!r}:
    shell.run_cell(cell, store_history=True).raise_error()
import labkit as lk
told = (
    f"{{r.experiment.get('rate')}} {{r.metrics.get('f1')}} {{len(r.history)}} {{r.status['state']}}"
    for r in lk.load_runs("runs")
)
Path("told").write_text("\\n".join(told))
"""
TRAINS = "for step in range(1, steps): lk.log(step=step, loss=rate / step)\nrate *= 0.5"
SCORES = "lk.log(f1=rate)"


@pytest.mark.battery(2, 2)
@pytest.mark.parametrize(
    ("cells", "runs"),
    [
        # A parameter that training changes, or that a function sets, starts no new run.
        ([TRAINS, "def f(): rate = 1", SCORES], ["0.1 0.05 3 running"]),
        (
            [TRAINS, "rate = 0.3", TRAINS, SCORES],
            ["0.1 None 3 completed", "0.3 0.15 3 running"],
        ),
        (
            [TRAINS, SCORES, PARAMETERS, "steps = 3", TRAINS],
            ["0.1 0.05 3 completed", "0.1 None 2 running"],
        ),
        # A cell that both sets a parameter and trains starts a new run each time.
        (
            [f"rate = 0.2\n{TRAINS}", SCORES, f"rate = 0.4\n{TRAINS}"],
            ["0.2 0.1 3 completed", "0.4 None 3 running"],
        ),
    ],
)
def test_in_a_session_of_cells_other_parameters_are_another_run(
    tmp_path: Path, cells: list[str], runs: list[str]
) -> None:
    path = notebook(tmp_path / "mine.ipynb", *cells)
    setup = f"{PARAMETERS}\nsteps = 4\nimport labkit as lk"
    script = tmp_path / "session.py"
    script.write_text(SESSION.format(cells=[setup, *cells]))
    environ = os.environ | {"JPY_SESSION_NAME": str(path)}
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environ, check=True)
    assert (tmp_path / "told").read_text().splitlines() == runs


INJECTED = "# Parameters\nrate = 0.4\nextra = [1]"
TRAINING = "import labkit as lk\nmodel = model.upper()\nlk.log(f1=rate)"
OF_NOTEBOOK = {"rate": 0.1, "model": "mine", "strategy": "adam"}


@pytest.mark.parametrize(
    ("history", "name", "values"),
    [
        # nbconvert, `jupyter execute` and nbmake execute the cells of the file.
        ([PARAMETERS, TRAINING], "mine.ipynb", OF_NOTEBOOK),
        # papermill injects a cell after the parameters.
        (
            [PARAMETERS, INJECTED, TRAINING],
            "mine.ipynb",
            OF_NOTEBOOK | {"rate": 0.4, "extra": [1]},
        ),
        # The file of the notebook is unknown.
        (
            ["import labkit as lk", "rate = 0.3\nsize = len('abc')", INJECTED, "lk.log(f1=1)"],
            *("", {"rate": 0.4, "size": 3, "extra": [1]}),
        ),
        (["import labkit as lk", "rate = 0.3\nsize = len('abc')"], "", {"rate": 0.3, "size": 3}),
        (["import labkit as lk; lk.log(f1=1)"], "", {}),
    ],
)
def test_parameters_are_those_of_the_cells_that_an_executor_executes(
    tmp_path: Path, history: list[str], name: str, values: dict[str, object]
) -> None:
    notebook(tmp_path / "a_copy.ipynb", "another cell")
    notebook(tmp_path / "mine.ipynb", TRAINING)
    namespace = {"rate": 99, "model": "MINE", "size": 3, "unrelated": 1}
    assert executed_parameters(["", *history], namespace) == (name, values)


@pytest.mark.slow
@pytest.mark.heavy  # kernels
def test_every_executor_makes_the_same_run(tmp_path: Path) -> None:
    def run(*command: str) -> int:
        here = {"cwd": tmp_path, "capture_output": True, "check": False}
        return subprocess.run([sys.executable, "-m", *command], **here).returncode  # type: ignore[call-overload]

    notebook(tmp_path / "mine.ipynb", "computed = 2 * rate", "import labkit as lk\nlk.log(f1=1)")
    (tmp_path / "out").mkdir()
    assert run("papermill", "mine.ipynb", "out/1.ipynb", "-p", "rate", "0.2") == 0
    assert run("jupyter", "execute", "mine.ipynb", "--output", "out/2") == 0
    assert run("nbconvert", "--execute", "--to", "notebook", "mine.ipynb", "--output-dir=out") == 0
    execute(tmp_path / "mine.ipynb", {"rate": 0.2}, tmp_path / "runs")
    runs = sorted(lk.load_runs(tmp_path / "runs"), key=lambda run: run.name)
    assert sorted(str(run.experiment["rate"]) for run in runs) == ["0.1", "0.1", "0.2", "0.2"]
    assert len({run.name.removesuffix("-2") for run in runs}) == 2
    assert {run.status["state"] for run in runs} == {"completed"}
    notebook(tmp_path / "bad.ipynb", "import labkit as lk\nlk.log(f1=1)", "1 / 0")
    assert run("papermill", "bad.ipynb", "out/3.ipynb") != 0
    [bad] = [run for run in lk.load_runs(tmp_path / "runs") if "bad" in run.experiment["notebook"]]
    assert (bad.status["state"], bad.experiment["rate"]) == ("failed", 0.1)


@pytest.mark.slow
def test_other_given_parameters_are_another_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import labkit as lk\n"
        "for rate in (0.1, 0.2):\n"
        "    lk.log(parameters={'rate': rate}, f1=rate)\n"
        "    lk.log(auc=2 * rate)\n"
        "    lk.log(parameters={'rate': rate}, error=0.5)\n"
    )
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, check=True)
    runs = lk.load_runs(tmp_path / "runs")
    assert [(r.experiment["rate"], r.metrics["f1"], r.metrics["auc"]) for r in runs] == [
        (0.1, 0.1, 0.2),
        (0.2, 0.2, 0.4),
    ]
    assert {run.status["state"] for run in runs} == {"completed"}


def test_a_run_that_is_asked_to_end_while_it_ends_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RunLog(store.new_run_directory(tmp_path, "run"), {})
    log.add({"accuracy": 0.9})
    plain = os.rmdir

    def rmdir(path: str, *, dir_fd: int | None = None) -> None:
        # A search writes this file after the folder is checked and before it is removed.
        (log.run.path / FOLDER / "stop").write_text("")
        plain(path, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", rmdir)
        log.end()
    assert log.run.status["state"] == "completed"


@pytest.mark.battery(1, 1)
@pytest.mark.heavy  # a job's process
@pytest.mark.parametrize("ends", ["time.sleep, 4", "os._exit, 0"], ids=["late", "never"])
def test_a_notebooks_runs_end_with_it_whenever_its_kernel_does(tmp_path: Path, ends: str) -> None:
    # Python calls the last registered function first: labkit's own runs after this one, or never.
    end = f"import atexit, os, time\natexit.register({ends})"
    steps = "for step in range(5): lk.log(step=step + 1, accuracy=(step + 2) / 20)"
    job = execute(notebook(tmp_path / "mine.ipynb", LOGS, steps, end), {}, tmp_path / "runs")
    [run] = lk.load_runs(job.path)
    assert (run.status["state"], run.metrics["test_accuracy"]) == ("completed", 0.3)
