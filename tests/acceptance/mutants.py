"""Mutation testing: seeded changes of labkit's own code, which its tests must notice."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import click

from labkit.bench.command import AS_JSON, format_rows, names, write_rows
from labkit.bench.timing import Row
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.nearest import listed
from labkit.common.terminal import say
from tests.acceptance.mutations import Mutant, mutants
from tests.acceptance.repository import ROOT

ROOMS = ("exchange", "compression", "strategies")
SLACK = 120.0  # seconds that a mutant's tests may take beyond PATIENCE times what they take sound
PATIENCE = 5.0  # for other work on the machine; longer is a row of its own, noticed by nobody

Outcome: TypeAlias = Literal["noticed", "survived", "ran too long"]


class Verdict(NamedTuple):
    """What the tests say of a change: which one noticed it first, and how long they took."""

    outcome: Outcome
    by: str
    seconds: float


def measure(count: int, seed: int, rooms: Sequence[str] = ROOMS) -> Iterator[Row]:
    """A row a mutant, as soon as its tests have ended: its mirror, then others of its room.

    Args:
        count: how many, drawn from all that there are.
        seed: of the draw.
        rooms: of the package, which are changed.

    Raises:
        InvalidInput: a room that is not there.
        LabkitError: the tests fail without a change.
    """
    files = [file for room in rooms for file in _modules(ROOT, room)]
    everyone = [one for file in files for one in mutants(file.relative_to(ROOT), file.read_text())]
    chosen = random.Random(seed).sample(everyone, min(count, len(everyone)))
    sound: dict[Path, float] = {}
    for one in chosen:
        near, found = mirrors(ROOT, one.file), Verdict("survived", "", 0.0)
        # What its mirror does not notice, another test of the room may.
        for tests in (near, [test for test in _of_room(ROOT, one.file) if test not in near]):
            if not tests or found.outcome != "survived":
                continue
            for test in tests:  # or a test that fails anyway would have noticed everything
                if test not in sound:
                    sound[test] = _seconds(ROOT, test)
            limit = SLACK + PATIENCE * sum(sound[test] for test in tests)
            found = verdict(ROOT, tests, one, limit)
        yield {
            "bench": "mutants",
            "case": one.file.as_posix(),
            "line": one.line,
            "what": one.change,
            "outcome": found.outcome,
            "by": found.by,
            "seconds": found.seconds,
            "tests": " ".join(test.as_posix() for test in near),
        }


def mirrors(root: Path, module: Path) -> list[Path]:
    """The test files that mirror a module.

    Those of its name; else those of its room that name it, or what it defines; else all of these.
    """
    files, name = _of_room(root, module), module.stem
    named = [file for file in files if file.stem.removeprefix("test_").startswith(name)]
    words = {name, *_public(root / module)}
    told = [file for file in files if words & set(_words((root / file).read_text()))]
    return named or told or files


def _of_room(root: Path, module: Path) -> list[Path]:
    files = (root / "tests" / module.parts[1]).glob("test_*.py")
    return sorted(file.relative_to(root) for file in files)


def _seconds(root: Path, test: Path) -> float:
    """What a test file takes that nothing is changed for."""
    plain = verdict(root, [test], None)
    if plain.outcome != "survived":
        raise LabkitError(f"{plain.by or test} fails without a change: mend it first")
    return plain.seconds


def _modules(root: Path, room: str) -> list[Path]:
    found = sorted((root / "labkit" / room).rglob("*.py")) if room.isidentifier() else []
    if not found:
        raise InvalidInput(f"labkit has no room {room!r}{listed(room, ROOMS)} and others")
    return found


def _public(file: Path) -> Iterable[str]:
    for line in file.read_text().splitlines():
        kind, _, rest = line.partition(" ")
        if kind in ("class", "def") and not rest.startswith("_"):
            yield rest.split("(")[0].split(":")[0]


def _words(text: str) -> list[str]:
    return "".join(each if each.isalnum() or each == "_" else " " for each in text).split()


def verdict(
    root: Path, tests: Sequence[Path], mutant: Mutant | None, limit: float | None = None
) -> Verdict:
    """What the tests say of a copy of the package, with a change or without."""
    with tempfile.TemporaryDirectory(prefix="labkit-mutant-") as folder:
        place = Path(folder)
        for name in ("labkit", "tests"):
            shutil.copytree(root / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "CHANGELOG.md"):
            if (root / name).exists():
                shutil.copy(root / name, place / name)
        if mutant is not None:
            (place / mutant.file).write_text(mutant.source)
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
        command = [sys.executable, "-P", "-m", "pytest", *options, *(str(test) for test in tests)]
        start = time.monotonic()
        with (place / "said").open("w") as said:
            # First on the path, also of the engines that the tests start.
            process = subprocess.Popen(
                command,
                cwd=place,
                env=os.environ | {"PYTHONPATH": str(place)},
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
            try:
                found: Outcome = "survived" if process.wait(limit) == 0 else "noticed"
            except subprocess.TimeoutExpired:
                found = "ran too long"
            finally:
                _end(process)
        lines = (place / "said").read_text()
        told = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", lines, re.MULTILINE)
        return Verdict(found, " ".join(told[:1]), round(time.monotonic() - start, 1))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the tests and all that they have started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


@click.command("mutants")
@click.option("--count", default=50, show_default=True, type=click.IntRange(1), help="How many.")
@click.option("--seed", default=0, show_default=True, help="Of the choice among all.")
@click.option("--rooms", default="exchange,compression,strategies", callback=names)
@AS_JSON
def command(count: int, seed: int, rooms: list[str], file: Path | None) -> None:
    """Change labkit's own code a little, many times, and list what no test has noticed."""
    rows = []
    for row in measure(count, seed, rooms):
        rows.append(row)
        say(f"{row['outcome']}: {row['case']}:{row['line']}: {row['what']}")
    survivors = [row for row in rows if row["outcome"] == "survived"]
    say(f"{len(rows) - len(survivors)} of {len(rows)} were noticed; survivors:")
    say(format_rows(survivors, {"case": "file", "line": "line", "what": "change"}))
    write_rows(rows, file)
