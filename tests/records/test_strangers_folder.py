"""Test that no code in a stranger's run folder is executed, and only the output is written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gadgets import GADGETS
from sample_runs import write_run

pytestmark = pytest.mark.heavy

# The script records Python's audit events for processes, pickles and writes, then runs commands.
WATCHED = """
import json, os, sys, warnings
sys.path[:] = [p for p in sys.path if p not in ("", os.getcwd())]
from click.testing import CliRunner
from labkit.cli.app import app
import labkit as lk
events, ends = [], {}

def note(event, arguments):
    if event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork"):
        events.append([event, repr(arguments[0])])
    if event in ("pickle.find_class", "socket.connect", "os.remove", "os.mkdir", "os.rename"):
        events.append([event, repr(arguments)])
    named = isinstance(arguments[0], str) if arguments else False
    if event == "open" and named and set(str(arguments[1])) & set("wxa+"):
        events.append([event, str(arguments[0])])

sys.addaudithook(note)
for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, words)
    ends[" ".join(words)] = [done.exit_code, done.output, repr(done.exception)]
with warnings.catch_warnings(record=True):
    runs = lk.load_runs("runs")
    lk.to_dataframe(runs)
    [(run.history, run.environment, run.timeline, run._repr_html_()) for run in runs]
print(json.dumps([events, ends, len(runs)]))
"""
OUTPUT = ["-o", "out/c.html", "--csv", "out/c.csv", "--parquet", "out/c.parquet"]
COMMANDS = [
    ["ls", "runs"],
    ["compare", "runs", *OUTPUT],
    ["report", "runs", "-o", "out/all.html"],
    ["report", "runs/shown", "-o", "out/shown.html"],
]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one run per gadget, and a folder `out` for the output."""
    place = tmp_path_factory.mktemp("stranger")
    good = write_run(place / "good").path
    for number, plant in enumerate(GADGETS.values()):
        run = Path(shutil.copytree(good, place / "runs" / f"{number:02d}" / "run"))
        plant(run, f"touch {place}/mark-{number:02d}")
    (place / "out").mkdir()
    return place


def told(place: Path, *arguments: str) -> Any:
    """Return the JSON that a process prints which runs in the stranger's folder."""
    command = [sys.executable, "-P", "-c", *arguments]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_forty_gadgets_in_a_strangers_folder_do_nothing(planted: Path) -> None:
    assert len(GADGETS) >= 40
    before = tree(planted)
    events, ends, usable = told(planted, WATCHED, json.dumps(COMMANDS))
    marks = [path.name for path in planted.glob("mark-*")]
    assert [list(GADGETS)[int(name[5:])] for name in marks] == []
    assert tree(planted) == before
    written = {event[1] for event in events if event[0] == "open"}
    assert {name for name in written if not name.startswith(("out/", "/dev/null"))} == set()
    started = [event for event in events if event[0] in STARTED]
    assert started == []
    for words, (code, output, exception) in ends.items():
        assert code == 0 or (code == 1 and output.count("labkit: ") == 1), (words, exception)
        assert {"\x1b", "\x9b", "\u202e"}.isdisjoint(output)
    assert usable > 30  # one odd run does not exclude the others


STARTED = (
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "socket.connect",
)


def tree(place: Path) -> dict[str, tuple[int, int]]:
    """Return the files below a folder with sizes and times, without the output."""
    found = {}
    for path in sorted(place.rglob("*")):
        name = path.relative_to(place).as_posix()
        if not name.startswith("out"):
            status = path.lstat()
            found[name] = (status.st_size, status.st_mtime_ns)
    return found
