"""Random invalid input from Hypothesis: each command must succeed, or report a one-line error."""

from __future__ import annotations

import copy
import json
import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import click

from labkit.bench.command import AS_JSON, show_rows, write_rows
from labkit.cli.app import app
from labkit.common.errors import LabkitError, short
from labkit.common.terminal import plain, say
from labkit.records import store
from tests.acceptance.odd_records import measure as measure_readers
from tests.acceptance.odd_values import NASTY, NOTEBOOK
from tests.acceptance.records import make

if TYPE_CHECKING:
    import click
    from click.testing import Result

    from labkit.bench.timing import Row

Draw: TypeAlias = "Callable[[Any], Any]"

FIELDS: dict[str, Any] = {
    "schema": 1,
    "model": "mlp",
    "model_options": {"widths": [64]},
    "strategy": {"name": "Pipeline", "schedule": "gpipe", "microbatches": 4},
    "workers": 2,
    "learning_rate": 0.1,
    "epochs": 3,
    "network": "1GbE",
    "metrics": ["accuracy"],
}
GOOD = {
    "workers": ["1", "2", "range(1,5)"],
    "learning_rate": ["0.1", "1e-3", "uniform(0,1)"],
    "strategy": ["AllReduce", "[{name: Pipeline, schedule: gpipe}]"],
    "widths": ["{}", "{a: [64]}"],
    "input_mode": ["shard", "scatter"],
}
PIPE = "a pipe"
ELSEWHERE = ("../home", "../home/made", "/dev/null", PIPE)  # targets of symbolic links


class Case(NamedTuple):
    """A test case: files in a folder, and the command of labkit that reads them.

    Attributes:
        special: Pairs of a file name and the target of this symbolic link; the target PIPE makes a
            named pipe.
    """

    files: dict[str, bytes]
    words: list[str]
    special: tuple[tuple[str, str], ...] = ()


def measure(app: click.Command, cases: int, seed: int) -> Iterator[Row]:
    """Run about `cases` test cases, divided among all kinds; yield a row per kind and per failure.

    A case fails if the command causes a traceback, a wrong exit code, terminal control characters
    in the output, or a file outside its folder.
    """
    with TemporaryDirectory(prefix="labkit-fuzz-") as place:
        make(Path(place) / "good", 1)
        run = {each.name: each.read_bytes() for each in (Path(place) / "good" / "00000").iterdir()}
        generated = kinds(run)
        for kind, cases_of in generated.items():
            tried = _tried(app, cases_of, max(1, cases // len(generated)), seed, Path(place) / kind)
            failed = [(each.case, each.wrong) for each in tried if each.wrong]
            codes = {f"exit {code}": sum(each.code == code for each in tried) for code in (0, 1, 2)}
            counts: Row = {"tried": len(tried), "failed": len(failed), **codes}
            yield counts | {"bench": "fuzz", "case": kind}
            for case, wrong in failed:
                row: Row = {"bench": "fuzz", "case": kind, "what": wrong}
                yield row | {"command": short(case.words), "files": _seen(case, run)}


class Ended(NamedTuple):
    """The result of a case: its exit code, and what is `wrong`, which is empty if nothing is."""

    case: Case
    code: int
    wrong: str


def _tried(app: click.Command, cases: Any, count: int, seed: int, folder: Path) -> list[Ended]:
    """Run `count` random cases, and return their results."""
    hypothesis = import_module("hypothesis")
    tried: list[Ended] = []

    def one(case: Case) -> None:
        # The function stores a failure and does not raise it, because an exception would end
        # Hypothesis's search.
        tried.append(_ended(app, case, folder / str(len(tried))))

    settings = hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    settings(hypothesis.seed(seed)(hypothesis.given(cases)(one)))()
    return tried


def kinds(run: dict[str, bytes]) -> dict[str, Any]:
    """Return, by kind of case, Hypothesis strategies that generate cases."""
    some = import_module("hypothesis.strategies")
    values = some.sampled_from(NASTY) | some.recursive(
        some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=20),
        lambda inner: (
            some.lists(inner, max_size=3)
            | some.dictionaries(some.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=6,
    )
    # An argument of a command line cannot contain NUL characters.
    words = (values.map(_as_text) | some.text(max_size=30)).map(lambda t: t.replace("\0", ""))

    def changed(draw: Draw, whole: Any) -> bytes:
        """Generate JSON in which one value is replaced or removed, or some bytes are damaged."""
        how = draw(some.sampled_from(["value", "value", "value", "gone", "cut", "bytes", "deep"]))
        text = json.dumps(_altered(whole, draw, some, values, how)).encode()
        if how == "deep":
            return b'{"schema": 1, "a": ' + b"[" * 100_000
        return text if how not in ("cut", "bytes") else _damaged(text, draw, some)

    odd = some.composite(changed)

    def parameters(draw: Draw) -> Case:
        given = {}
        for name in draw(some.lists(some.sampled_from([*GOOD, "x"]), min_size=1, max_size=3)):
            good = some.sampled_from(GOOD.get(name, ["1"]))
            given[name] = draw(good | good | words)
        flags = [word for name, value in given.items() for word in ("-p", name, value)]
        swept = [
            "sweep",
            "n.ipynb",
            *(f"{name}={value}" for name, value in given.items()),
            "--check",
        ]
        command = draw(some.sampled_from([["run", "n.ipynb", *flags, "--check"], swept]))
        return Case({"n.ipynb": json.dumps(NOTEBOOK).encode()}, command)

    def texts(draw: Draw) -> Case:
        text = draw(odd(FIELDS) | words.map(str.encode) | some.binary(max_size=40))
        commands = [
            ["run", "e.yaml", "--check"],
            ["run", "n.ipynb", "-f", "e.yaml", "--check"],
            ["sweep", "n.ipynb", "-f", "e.yaml", "--check"],
        ]
        files = {"e.yaml": text, "n.ipynb": json.dumps(NOTEBOOK).encode()}
        return Case(files, draw(some.sampled_from(commands)))

    def notebooks(draw: Draw) -> Case:
        files = {"n.ipynb": draw(odd(NOTEBOOK))}
        swept = ["sweep", "n.ipynb", "workers=1,2", "--check"]
        command = draw(some.sampled_from([["run", "n.ipynb", "--check"], swept]))
        return Case(files, command)

    def records(draw: Draw) -> Case:
        name = draw(some.sampled_from(sorted(run)))
        whole = json.loads(run[name]) if name.endswith(".json") else None
        text = draw(odd(whole)) if whole else _damaged(run[name], draw, some)
        files = {f"runs/a/{name}": content for name, content in (run | {name: text}).items()}
        files |= {f"runs/b/{name}": content for name, content in run.items()}
        drawn = ["compare", "runs", "-o", "c.html", "--csv", "c.csv"]
        return Case(files, draw(some.sampled_from([["ls", "runs"], drawn])))

    def reports(draw: Draw) -> Case:
        files = {f"runs/job/a/{name}": content for name, content in run.items()}
        files["runs/job/params.yaml"] = draw(words.map(str.encode) | some.just(b"workers: 2\n"))
        status = {"schema": 1, "state": "completed", "notebook": "n.ipynb"}
        files["runs/job/status.json"] = draw(some.just(json.dumps(status).encode()) | odd(status))
        files["runs/job/output.ipynb"] = draw(odd(NOTEBOOK))
        return Case(files, draw(some.sampled_from([["report", "runs"], ["ls", "runs"]])))

    found = (parameters, texts, notebooks, records, reports)
    made = {each.__name__: some.composite(each)() for each in found}
    return made | {"folders": some.composite(_folder)(some, run)}


def _folder(draw: Draw, some: Any, run: dict[str, bytes]) -> Case:
    """Return a case with an untrusted folder: it names this process, and a link points outside."""
    status = {"schema": 1, "state": draw(some.sampled_from(["failed", "running"]))}
    status |= store.this_process() | {"notebook": "n.ipynb"}
    if draw(some.booleans()):
        status["pid"] = draw(some.sampled_from([0, -1, True, 2**70, "1", 1.5, None]))
    files = {f"runs/n/001/a/{name}": content for name, content in run.items()}
    files |= {f"runs/n/001/{name}": b"{}" for name in ("params.yaml", "logs/notebook.log")}
    files["runs/n/001/status.json"] = json.dumps(status).encode()
    files["runs/n/sweep.json"] = json.dumps(status | {"members": []}).encode()
    names = {str(each) for name in files for each in (Path(name), *Path(name).parents)}
    place = draw(some.sampled_from(sorted(names - {".", "runs"})))
    commands = [["ls", "runs"], ["report", "runs"], ["stop", "runs"]]
    commands.append(["sweep", "runs/n", "--resume"])
    special = (place, draw(some.sampled_from(ELSEWHERE)))
    return Case(files, draw(some.sampled_from(commands)), (special,))


def _altered(whole: Any, draw: Draw, some: Any, values: Any, how: str) -> Any:
    """Return a copy of a JSON value in which one inner value is replaced or removed."""
    whole = copy.deepcopy(whole)
    inner = whole
    while True:
        key = draw(
            some.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner)))
        )
        if not (isinstance(inner[key], dict | list) and inner[key]) or draw(some.booleans()):
            break
        inner = inner[key]
    if how == "gone":
        del inner[key]
    elif how == "value":
        inner[key] = draw(values)
    return whole


def _damaged(content: bytes, draw: Draw, some: Any) -> bytes:
    """Return a copy of bytes that is cut short, or in which some bytes are replaced."""
    place = draw(some.integers(0, len(content) - 1))
    if draw(some.booleans()):
        return content[:place]
    other: bytes = draw(some.binary(min_size=1, max_size=8))
    return content[:place] + other + content[place + 8 :]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _ended(app: click.Command, case: Case, folder: Path) -> Ended:
    """Run the command of a case in its folder, and return the result."""
    from click.testing import CliRunner

    for name, content in case.files.items():
        path = folder / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    home = folder / "home"
    home.mkdir(parents=True)
    for name, target in case.special:
        _replace(folder / "work" / name, target.replace("..", str(folder.resolve())))
    before = os.getcwd()
    os.chdir(folder / "work")
    try:
        own = {"HOME": str(home), "LABKIT_STATE": str(folder / "state")}
        done = CliRunner().invoke(app, case.words, env=own)
    finally:
        os.chdir(before)
    left = [each for each in folder.iterdir() if each.name not in ("work", "home", "state")]
    outside = [*left, *home.rglob("*")]
    wrong = f"wrote {outside[0].name} outside" if outside else _misbehaviour(done)
    return Ended(case, done.exit_code, wrong)


def _replace(place: Path, target: str) -> None:
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    if target == PIPE:
        os.mkfifo(place)
    else:
        place.symlink_to(target)


def _misbehaviour(done: Result) -> str:
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        frame = traceback.extract_tb(done.exception.__traceback__)[-1]
        kind, place = type(done.exception).__name__, f"{Path(frame.filename).name}:{frame.lineno}"
        return f"{kind} in {place}: {short(str(done.exception))}"
    if done.exit_code not in (0, 1, 2):
        return f"exit code {done.exit_code}"
    if plain(done.output) != done.output:
        return "control characters reach the terminal"
    said = [line for line in done.stderr.splitlines() if line.startswith("labkit: ")]
    if done.exit_code and len(said) != 1 and not done.stderr.startswith("Usage: "):
        return f"{len(said)} lines say why, not one: {short(done.stderr)}"
    return ""


def _seen(case: Case, run: dict[str, bytes]) -> str:
    """Return the content of a case's invalid file, shortened to one line."""
    odd = {n: c for n, c in case.files.items() if c not in run.values()}
    shown = [f"{name}: {content[:300]!r}" for name, content in odd.items()]
    return "; ".join([*(f"{name} -> {target}" for name, target in case.special), *shown])


READINGS = {name: name for name in ("case", "tried", "read", "skipped", "failed")}
READINGS |= {"slowest_s": "slowest s", "peak_mib": "more MiB"}
FUZZ = {name: name for name in ("case", "tried", "failed", "exit 0", "exit 1", "exit 2")}


@click.command("fuzz")
@click.option("--cases", default=1_000, show_default=True, type=click.IntRange(0))
@click.option("--records", default=0, show_default=True, help="Odd records, for all readers.")
@click.option("--seed", default=0, show_default=True, help="Of what is generated.")
@AS_JSON
def command(cases: int, records: int, seed: int, file: Path | None) -> None:
    """Test commands with invalid parameters, YAML, notebooks, records and reports.

    With --records, all programs that read runs must read records with unusual fields and sizes,
    under limits of time and memory. Each of them must read a record, or skip it with a one-line
    message.
    """
    say(f"seed {seed}")
    rows = list(measure(app, cases, seed)) if cases else []
    if records:
        met = list(measure_readers(records, seed))
        show_rows([row for row in met if "tried" in row], READINGS, None)
        rows += met
    wrong = [row for row in rows if "what" in row]
    show_rows([row for row in rows if "exit 0" in row], FUZZ, None)
    write_rows([row for row in rows if "tried" in row], file)
    for row in wrong:
        say(f"{row['case']}: {row['what']}; {row['command']}; {row['files']}")
    if wrong:
        raise LabkitError(f"{len(wrong)} of {cases + records} cases did not end in order")
