"""Test the command line: one-line errors, exit codes, and the place of results."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sample_runs import FAILED_GATE, write_job, write_run

from labkit.cli.app import SECTIONS, app
from labkit.records import store

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
LABKIT = Path(sys.executable).parent / "labkit"
PATIENCE = 240.0  # timeout for tasks that take a few seconds


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def labkit(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def process(*arguments: object) -> subprocess.Popen[str]:
    """Start the installed command; the folder of this command is not on PATH."""
    return subprocess.Popen(
        [str(LABKIT), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PATH": "/usr/bin:/bin"},
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "wrkers", "2"], "has no parameter 'wrkers' (did you mean 'workers'?)"),
        (["-p", "workers", "two"], "workers = 'two' is not int"),
        (["-p", "workers", "0"], "workers=0 is impossible"),
        (["-p", "dataset", "mnits"], "unknown data set 'mnits'"),
        (["-y", "workers: 2.5"], "workers = 2.5 is not int"),
        (["-y", "workers"], "expected `name: value`"),
        (["-f", "nothing.yaml"], "nothing.yaml cannot be read"),
    ],
)
def test_a_parameter_that_cannot_work_ends_with_2_and_one_line_before_a_kernel_starts(
    arguments: list[str], words: str
) -> None:
    result = labkit("run", NOTEBOOKS / "trains.ipynb", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert not Path("runs").exists()


def test_the_same_holds_for_a_notebook_or_an_experiment_that_is_not_there() -> None:
    for target in ("nothing.ipynb", "nothing.yaml"):
        result = labkit("run", target)
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1


def test_an_experiment_file_is_checked_as_the_experiment_is() -> None:
    Path("e.yaml").write_text("dataset: digits\nworkers: 2\n")
    for name, value in (("workers", "0"), ("wrkers", "1"), ("strategy", "none")):
        result = labkit("run", "e.yaml", "-p", name, value)
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1
        assert name in result.stderr


def test_a_newer_record_is_no_experiment_of_this_labkit() -> None:
    Path("e.yaml").write_text("schema: 99\n")
    result = labkit("run", "e.yaml", "--check")
    assert (result.exit_code, result.stderr) == (
        2,
        "labkit: e.yaml has the schema version 99; this labkit reads versions 1 to 2\n",
    )


@pytest.mark.parametrize("name", ["workers", "y" * 50_000])
def test_an_endless_value_is_told_in_a_short_line(name: str) -> None:
    value = "x" * 50_000
    for command, *words in (["run", "-p", name, value], ["sweep", f"{name}={value}"]):
        result = labkit(command, NOTEBOOKS / "trains.ipynb", *words)
        assert result.exit_code == 2
        assert len(result.stderr) < 1_600


def test_check_says_whether_it_could_run_and_starts_nothing() -> None:
    trains = NOTEBOOKS / "trains.ipynb"
    assert labkit("run", trains, "-p", "workers", "2", "--check").exit_code == 0
    assert "2 members" in labkit("sweep", trains, "workers=1,2", "--check").stdout
    assert labkit("run", trains, "-p", "workers", "0", "--check").exit_code == 2
    assert not Path("runs").exists()


def test_a_run_that_is_left_out_of_a_comparison_is_one_plain_line() -> None:
    write_run(Path("runs"), "good")
    (write_run(Path("runs"), "bad").path / "metrics.json").write_text("[]")
    result = labkit("compare", "runs")
    assert result.exit_code == 0
    assert result.stderr == "runs/bad left out: bad/metrics.json holds a list, not a record\n"


def test_a_history_damaged_in_its_middle_takes_only_its_curves_away() -> None:
    good, bad = (write_run(Path("runs"), name, seed=k) for k, name in enumerate(("good", "bad")))
    file = bad.path / "history.parquet"
    content = bytearray(file.read_bytes())
    content[4:-4] = bytes(len(content) - 8)
    file.write_bytes(content)
    for command in ("compare", "report"):
        result = labkit(command, "runs")
        assert result.exit_code == 0, result.stderr
        assert "bad/history.parquet is damaged" in result.stderr
        assert all(line.startswith("bad/") for line in result.stderr.splitlines())
    assert len(good.history)
    with pytest.warns(UserWarning, match="damaged"):
        assert bad.history.empty


@pytest.mark.slow
def test_what_a_cell_refuses_before_its_cluster_starts_is_bad_input() -> None:
    notebook = NOTEBOOKS.parents[1] / "notebooks" / "compression.ipynb"
    given = ["-p", "methods", '["Pipelin"]', "-p", "dataset", "digits"]
    with process("run", notebook, *given) as running:
        told = running.communicate(timeout=PATIENCE)[1]
    assert running.returncode == 2, told
    assert "unknown compressor 'Pipelin'" in told.splitlines()[-1]
    assert "Cluster" not in told


def test_more_ranks_than_memory_is_free_for_start_nothing() -> None:
    Path("e.yaml").write_text("dataset: digits\n")
    for command in (
        ("run", NOTEBOOKS / "trains.ipynb", "-p", "workers", "9999"),
        ("run", "e.yaml", "-p", "workers", "9999"),
        ("sweep", NOTEBOOKS / "trains.ipynb", "workers=1,9999"),
    ):
        result = labkit(*map(str, command))
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1
        assert "9999 ranks need at least" in result.stderr
        assert "--force" in result.stderr
        assert not Path("runs").exists()


def test_a_run_says_where_its_result_lies_and_shows_what_its_notebook_prints() -> None:
    Path("rates.yaml").write_text("rate: 1e-3\nword: from the file\n")
    source = NOTEBOOKS / "says_its_parameters.ipynb"
    arguments = ["-f", "rates.yaml", "-y", "word: from the text", "-p", "fast", "true"]
    child = process("run", source, *arguments)
    out, err = child.communicate(timeout=PATIENCE)
    assert child.returncode == 0
    assert '[1, 0.001, true, "from the text", "ring", [1, 2], null]\n' in out
    (place,) = re.findall(r"^result: (.+)$", out, re.MULTILINE)
    assert store.read_status(Path(place))["state"] == "completed"
    assert err.startswith("duration: no earlier run to estimate from; memory: at least 0.7 GiB")


def test_a_failing_notebook_ends_with_1_and_names_cell_rank_and_record() -> None:
    child = process("run", NOTEBOOKS / "fails_on_rank_1.ipynb")
    _, err = child.communicate(timeout=PATIENCE)
    assert child.returncode == 1
    assert err.splitlines()[-1] == (
        "labkit: fails_on_rank_1.ipynb failed on rank 1: cell In [2]: "
        "RankError: rank 1 ran out of memory; record: runs/fails_on_rank_1/001/output.ipynb"
    )
    assert Path("runs/fails_on_rank_1/001/output.ipynb").exists()


def test_ctrl_c_ends_with_130_and_an_honest_record() -> None:
    child = process("run", NOTEBOOKS / "is_interrupted.ipynb")
    assert child.stdout is not None
    while "waiting" not in child.stdout.readline():
        assert child.poll() is None
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130
    assert "cleaned up" in out
    assert "interrupted" in err.splitlines()[-1]
    assert "interrupted by the user" in labkit("ls").stdout


@pytest.mark.slow
def test_sigterm_ends_a_run_as_ctrl_c_does_and_is_named() -> None:
    child = process("run", NOTEBOOKS / "is_interrupted.ipynb")
    assert child.stdout is not None
    while "waiting" not in child.stdout.readline():
        assert child.poll() is None
    child.terminate()
    out, err = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130
    assert "cleaned up" in out
    assert "interrupted: ended by SIGTERM;" in err.splitlines()[-1]
    status = store.read_status(Path("runs/is_interrupted/001"))
    assert (status["state"], status["cause"]) == ("interrupted", "ended by SIGTERM")


def test_a_table_of_the_jobs_runs_ends_a_run() -> None:
    # A notebook that writes a run as a worker does, but without ranks.
    here = Path(__file__).parents[1]
    source = f"""import os, sys
sys.path.insert(0, {str(here)!r})
from pathlib import Path
from sample_runs import write_run
write_run(Path(os.environ["LABKIT_JOB"]), measured={{"test_accuracy": 0.96}})"""
    import nbformat
    from nbformat import v4

    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell(source)]), "writes_a_run.ipynb")
    result = labkit("run", "writes_a_run.ipynb")
    assert result.exit_code == 0
    head, row, place = result.stdout.splitlines()
    assert head.split() == ["name", "state", "duration", "accuracy", "samples/s", "equivalence"]
    assert row.split()[0] == "mlp-digits-allreduce-w2"
    assert row.split()[-3:] == ["96.00%", "51,200", "passed"]
    assert place == "result: runs/writes_a_run/001"


def test_ls_lists_jobs_and_runs_with_state_results_and_cause() -> None:
    job = store.new_job_directory("runs", "tour.ipynb", {"workers": 2})
    store.mark_running(job)
    write_run(job)
    failed = store.new_run_directory(job, "cnn")
    store.start(failed, {"model": "cnn"})
    store.fail(failed, "out of memory", rank=1)
    store.complete(job)
    lines = labkit("ls").stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["name", "state"],
        ["tour/001_workers=2", "completed"],
        ["tour/001_workers=2/cnn", "failed"],
        ["tour/001_workers=2/mlp-digits-allreduce-w2", "completed"],
    ]
    assert lines[2].endswith("rank 1: out of memory")
    assert lines[3].split()[-1] == "passed"


def test_ls_calls_a_run_whose_process_is_gone_interrupted() -> None:
    script = "import os; from labkit.records import store; from pathlib import Path; "
    script += "p = store.new_run_directory('runs', 'mlp'); store.start(p, {}); os._exit(9)"
    subprocess.run([sys.executable, "-c", script], check=False)
    assert "interrupted" in labkit("ls").stdout
    assert "its process is gone" in labkit("ls").stdout


def test_ls_withholds_the_speed_of_a_run_that_failed_its_gate() -> None:
    write_run(Path("runs"), measured={"equivalence": FAILED_GATE})
    assert labkit("ls").stdout.splitlines()[1].split()[-2:] == ["withheld", "failed"]


def test_ls_says_what_it_cannot_read_and_lists_the_rest() -> None:
    write_run(Path("runs"))
    broken = write_run(Path("runs"), "broken")
    (broken.path / "metrics.json").write_text("{")
    job = store.new_job_directory("runs", "tour.ipynb", {})
    (job / "status.json").write_text("{")
    result = labkit("ls")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 2
    assert len(result.stderr.splitlines()) == 2
    assert "broken" in result.stderr
    assert "tour/001" in result.stderr


def test_ls_without_a_folder_of_runs_is_one_line() -> None:
    result = labkit("ls")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)


def test_ls_over_a_thousand_runs_costs_as_much_a_run_as_over_a_hundred() -> None:
    first = write_run(Path("runs"))

    def seconds(runs: int) -> float:
        """Return the processor time of a listing of so many runs."""
        for number in range(1, runs):
            copy = first.path.with_name(f"copy{number}")
            copy.mkdir(exist_ok=True)
            for file in first.path.iterdir() if not any(copy.iterdir()) else ():
                os.link(file, copy / file.name)
        begin = time.process_time()
        assert labkit("ls").stdout.count("completed") == runs
        return time.process_time() - begin

    few, many = min(seconds(100) for _ in range(3)), seconds(1000)
    assert many < 30 * few  # a quadratic cost would be a factor of 100


def test_compare_prints_a_table_and_writes_a_figure_that_asks_no_host() -> None:
    write_run(Path("runs"), workers=2)
    write_run(Path("runs"), workers=4)
    result = labkit("compare", "runs", "-o", "side_by_side.html")
    assert result.exit_code == 0, result.stderr
    assert "passed" in result.stdout
    assert result.stdout.endswith("figure: side_by_side.html\n")
    page = Path("side_by_side.html").read_text()
    assert "Plotly.newPlot" in page
    assert not re.search(r'<(script|link)[^>]+(src|href)="http', page)


def test_report_writes_one_page() -> None:
    write_run(Path("runs"))
    result = labkit("report", "runs", "-o", "page.html")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "report: page.html\n"
    assert "<html" in Path("page.html").read_text()


@pytest.mark.parametrize("command", ["compare", "report"])
def test_no_runs_is_one_line(command: str) -> None:
    Path("runs").mkdir()
    result = labkit(command, "runs")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)


@pytest.mark.slow
def test_lab_passes_its_arguments_to_jupyterlab() -> None:
    child = process("lab", "--version")
    out, _ = child.communicate(timeout=PATIENCE)
    assert child.returncode == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", out)


@pytest.mark.parametrize("command", ["--help", "ls"])
def test_what_is_asked_often_loads_nothing_heavy(command: str) -> None:
    if command == "ls":
        write_run(Path("runs"))
    heavy = ("tensorflow", "mpi4py", "papermill", "plotly", "pandas", "numpy", "pydantic")
    script = (
        f"import sys; from labkit.cli.app import app; app([{command!r}], standalone_mode=False); "
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert done.stdout.endswith("[]\n")
    for name in ("run", "ls", "compare", "report", "doctor", "lab"):
        assert command != "--help" or f"\n  {name} " in done.stdout


def test_a_result_may_go_into_a_folder_that_is_not_there_yet() -> None:
    write_run(Path("runs"))
    assert labkit("compare", "runs", "-o", "new/compare.html").exit_code == 0
    assert labkit("methods", "-o", "other/METHODS.md").exit_code == 0
    assert Path("new/compare.html").exists()
    assert Path("other/METHODS.md").exists()
    Path("file").write_text("")
    result = labkit("compare", "runs", "-o", "file/compare.html")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "file/compare.html cannot be written" in result.stderr


def test_the_command_of_a_new_notebook_can_be_pasted() -> None:
    assert "run it: labkit run 'my study.ipynb'" in labkit("new", "my study").stdout
    Path("deep").mkdir()
    labkit("new", "deep/mine")
    assert "labkit run deep/mine.ipynb" in Path("deep/mine.ipynb").read_text()


def test_a_report_shows_the_notebook_that_is_given() -> None:
    runs = [write_run(Path("runs/interactive"))]
    job = write_job(Path("elsewhere"))
    result = labkit("report", runs[0].path, "-o", "new/r.html", "--notebook", job / "output.ipynb")
    assert result.exit_code == 0
    assert "A <em>question</em>" in Path("new/r.html").read_text()


def test_help_has_each_command_in_one_section_with_a_whole_sentence() -> None:
    assert sorted(app.commands) == sorted(name for names in SECTIONS.values() for name in names)
    printed = labkit("--help").stdout
    assert "..." not in printed.partition("Run:")[2]
    assert max(map(len, printed.splitlines())) <= 80
