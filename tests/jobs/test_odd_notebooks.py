"""Test unusual notebooks: each runs as under papermill, or is refused in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest

# A separate process forks two jobs at a time, as a sweep does: the test process has threads, and a
# fresh kernel takes two seconds.
RUNS = """
import json, sys, time, warnings
from pathlib import Path
from labkit.common import imports
from labkit.common.errors import InvalidInput
from labkit.jobs import parameters
from labkit.jobs.job import forked, prepare
from labkit.jobs.notebook import NotebookJob
from labkit.records import store
prepare()
warnings.simplefilter("ignore")
wanted, running, ended = json.load(open("asked.json")), {}, {}
while wanted or running:
    while wanted and len(running) < 2:
        file, given = wanted.pop()
        path = Path(file)
        try:
            values = parameters.validate_values(path, given)
        except InvalidInput as error:
            ended[file] = ["refused", str(error), {}, ""]
            continue
        job = store.new_job_directory("runs", path, values)
        modules = {imports.VARIABLE: imports.notebook_folders(path)}
        running[file] = values, NotebookJob(job, forked(path, job, modules, 60.0))
    time.sleep(0.01)
    for file in [file for file, (_, job) in running.items() if job.done()]:
        values, job = running.pop(file)
        result = job.result()
        log = job.path / "logs/notebook.log"
        ended[file] = [result.state, result.cause, values, log.read_text() if log.exists() else ""]
json.dump(ended, open("ended.json", "w"))
"""


class Case(NamedTuple):
    """Cells (a pair adds a tag), the expected final state, and the last output or the cause."""

    cells: list[Any]
    state: str
    said: str
    given: Mapping[str, Any] = {}
    metadata: Mapping[str, Any] = {}


P, INJECTED, R = "parameters", "injected-parameters", "raises-exception"
TYPES = """import datetime, pathlib
when = datetime.date(2024, 1, 31)
where = pathlib.Path("data")
limit = float("inf")
shape = (28, 28)"""
SHOW = "print(*(type(each).__name__ for each in (when, where, limit, shape)), shape, limit)"
EXECUTED: dict[str, Case] = {
    # --- the parameters cell
    "types": Case(
        [(TYPES, P), SHOW],
        "completed",
        "date PosixPath float tuple (14, 14) inf",
        {"limit": "inf", "shape": "14,14", "when": "2024-02-29", "where": "other"},
    ),
    "types by default": Case(
        [(TYPES, P), SHOW], "completed", "date PosixPath float tuple (28, 28) inf"
    ),
    "magic": Case(
        [("%autosave 0\n!echo hello\nn = 3", P), "print(n)"], "completed", "5", {"n": "5"}
    ),
    "cell magic": Case([("%%time\nn = 3", P), "print(n)"], "completed", "5", {"n": "5"}),
    "bash cell": Case(
        [("%%bash\nn=3", P)], "refused", "bash cell.ipynb has no parameter 'n'", {"n": 5}
    ),
    "expressions": Case(
        [('a = 2\nb = a * 10\nc = f"{a}"\nd = 10 ** -3', P), "print(a, b, c, d)"],
        "completed",
        "2 7 x 0.5",
        {"b": "7", "c": "x", "d": "0.5"},
    ),
    "hints": Case(
        [
            (
                "import typing as t\na: t.Optional[int] = None\n"
                "b: t.Literal['x', 'y'] = 'x'\nc: list[int] = []",
                P,
            ),
            "print(a, b, c)",
        ],
        "completed",
        "4 y [1, 2]",
        {"a": "4", "b": "y", "c": "1,2"},
    ),
    "await": Case(
        [("import asyncio\nawait asyncio.sleep(0)\nn = 1", P), "print(n)"],
        "completed",
        "2",
        {"n": 2},
    ),
    "unicode": Case([("größe = 1", P), "print(größe)"], "completed", "2", {"größe": "2"}),
    "values": Case(
        [
            ("a = None\nb: str = 'x'\nc: dict = {}\nd = 1\ne = 0\nf: str = ''", P),
            "print(a, [b], c, d, e, [f])",
        ],
        "completed",
        "True [''] {'k': {'l': [1, None]}} 12345678901234567890123 -7 ['a\\nb\"\\\\']",
        {
            "a": "true",
            "b": "",
            "c": "{k: {l: [1, null]}}",
            "d": "12345678901234567890123",
            "e": "-007",
            "f": 'a\nb"\\',
        },
    ),
    "two": Case(
        [("n = 3", P), ("n = 2", P)], "refused", "two.ipynb has the tag `parameters` on", {"n": 7}
    ),
    "again": Case([("n = 3", P), ("n = 7", INJECTED), "print(n)"], "completed", "7"),
    "anew": Case([("n = 3", P), ("n = 7", INJECTED), "print(n)"], "completed", "9", {"n": 9}),
    # --- errors and ends
    "raises": Case([("raise ValueError('wanted')", R), "print('end')"], "completed", "end"),
    "raises another": Case(
        [("raise ValueError('wanted')", R), "1 / 0"], "failed", "cell In [2]: ZeroDivisionError"
    ),
    "quit": Case(["print('a')", "quit()\nprint('b')", "1 / 0"], "completed", "a"),
    "exit": Case(["print('a')", "exit(3)", "print('b')"], "failed", "cell In [2]: SystemExit: 3"),
    "sys.exit": Case(["import sys\nprint('a')\nsys.exit(0)", "1 / 0"], "completed", "a"),
    "main": Case(["import sys\nprint('a')\nsys.exit((lambda: None)())", "1 / 0"], "completed", "a"),
    "sys.exit 2": Case(["import sys\nsys.exit(2)"], "failed", "cell In [1]: SystemExit: 2"),
    "os._exit": Case(["import os\nos._exit(0)", "1"], "failed", "the kernel ended with code 0"),
    "killed": Case(
        ["import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"],
        "failed",
        "the kernel was ended by SIGKILL",
    ),
    "interrupt": Case(["raise KeyboardInterrupt"], "interrupted", "cell In [1]: KeyboardInterrupt"),
    "group": Case(
        ["raise ExceptionGroup('many', [KeyError('b')])"],
        "failed",
        "cell In [1]: ExceptionGroup: many (1 sub-exception)",
    ),
    "no magic": Case(["%nosuch"], "failed", "cell In [1]: UsageError: Line magic function"),
    "input": Case(["input('name? ')"], "failed", "cell In [1]: StdinNotImplementedError"),
    "getpass": Case(
        ["import getpass\ngetpass.getpass()"], "failed", "cell In [1]: StdinNotImplementedError"
    ),
    "stdin": Case(["import sys\nprint([sys.stdin.read()])"], "completed", "['']"),
    "cat": Case(["import subprocess\nprint(subprocess.run(['cat']).returncode)"], "completed", "0"),
    "thread": Case(
        [
            "import threading, time\n"
            "threading.Thread(target=lambda: time.sleep(900)).start()\nprint('on')"
        ],
        "completed",
        "on",
    ),
    # --- cells
    "skipped": Case(
        [("1 / 0", "skip-execution"), "", "# nothing", "print('end')"], "completed", "end"
    ),
    "bash": Case(["%%bash\necho $((6 * 7))"], "completed", "42"),
    "file": Case(
        ["%%writefile made.py\nx = 5", "%run made.py", "get_ipython().run_line_magic('who', '')"],
        "completed",
        "x",
    ),
    "extension": Case(["%load_ext autoreload\n%autoreload 2\nprint('on')"], "completed", "on"),
    "progress": Case(
        ["from tqdm.notebook import tqdm\nfor _ in tqdm(range(3)): pass\nprint('on')"],
        "completed",
        "on",
    ),
    "display": Case(
        ["h = display('one', display_id=True)\nh.update('two')\nprint('on')"], "completed", "on"
    ),
    "top level await": Case(["import asyncio\nprint(await asyncio.sleep(0, 3))"], "completed", "3"),
    "main module": Case(
        ["print(__name__, '__file__' in globals())"], "completed", "__main__ False"
    ),
    "spawn": Case(
        [
            "import math, multiprocessing as m\n"
            "with m.get_context('spawn').Pool(1) as p: print(p.map(math.sqrt, [4]))"
        ],
        "completed",
        "[2.0]",
    ),
    "folder": Case(
        ["import os\nos.mkdir('in')", "os.chdir('in')", "print('on')"], "completed", "on"
    ),
    "bytes": Case(["import os\nos.write(1, b'\\xff\\n')\nprint('on')"], "completed", "on"),
    "long": Case(["print('x' * 3_000_000)\nprint('on')"], "completed", "on"),
    # --- modules and files of a notebook that is not in its caller's folder
    "there/beside": Case(
        ["import beside, package.inner\nprint(beside.x + package.inner.y)"], "completed", "3"
    ),
    "there/caller": Case(
        ["import caller\nprint(caller.z, open('data').read())"], "completed", "3 d"
    ),
    "there/relative": Case(["from . import beside"], "failed", "cell In [1]: ImportError"),
    "there/installed": Case(["import queue\nprint(queue.Queue.__name__)"], "completed", "Queue"),
    # --- kernels
    "venv": Case(
        ["print('on')"],
        "completed",
        "on",
        metadata={"kernelspec": {"name": "myenv", "language": "python", "display_name": ""}},
    ),
    "bare": Case(["print('on')"], "completed", "on"),
}


def write(path: Path, cells: list[Any], metadata: Mapping[str, Any]) -> None:
    made = []
    for cell in cells:
        source, *tags = cell if isinstance(cell, tuple) else (cell,)
        made.append(nbformat.v4.new_code_cell(source, metadata={"tags": tags} if tags else {}))
    prose = nbformat.v4.new_markdown_cell(
        "![a](attachment:a.png)", attachments={"a.png": {"image/png": "aGk="}}
    )
    made += [nbformat.v4.new_raw_cell("raw"), prose]
    path.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=made, metadata=metadata)))


FILES = {
    "there/beside.py": "x = 1",
    "there/package/__init__.py": "",
    "there/package/inner.py": "y = 2",
    "there/queue.py": "",
    "caller.py": "z = 3",
    "data": "d",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("odd")
    (folder / "there/package").mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name, case in EXECUTED.items():
        write(folder / f"{name}.ipynb", case.cells, case.metadata)
    asked = [(f"{name}.ipynb", dict(case.given)) for name, case in EXECUTED.items()]
    (folder / "asked.json").write_text(json.dumps(asked))
    subprocess.run([sys.executable, "-P", "-c", RUNS], cwd=folder, check=True, timeout=240)
    found: dict[str, Any] = json.loads((folder / "ended.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", EXECUTED)
def test_a_notebook_ends_as_people_expect(name: str, ended: dict[str, Any]) -> None:
    case = EXECUTED[name]
    state, cause, _, log = ended[f"{name}.ipynb"]
    assert state == case.state, cause
    if state == "completed":
        assert log.rstrip("\n").split("\n")[-1].strip() == case.said
    else:
        assert cause.startswith(case.said)


@pytest.mark.slow
def test_the_record_of_a_notebook_that_runs_again_has_its_values(ended: dict[str, Any]) -> None:
    assert [ended[f"{name}.ipynb"][2] for name in ("again", "anew")] == [{"n": 7}, {"n": 9}]
