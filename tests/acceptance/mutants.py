"""Mutation testing: random small changes of labkit's code, which its tests must detect."""

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
# Seconds that the tests of a mutant may take beyond PATIENCE times their usual duration.
SLACK = 120.0
PATIENCE = 5.0  # tolerated slowdown by other load, which must not count as detection

Outcome: TypeAlias = Literal["noticed", "survived", "ran too long"]


class Verdict(NamedTuple):
    """The result of testing a mutant: outcome, first test that detects it, and duration."""

    outcome: Outcome
    by: str
    seconds: float


def measure(count: int, seed: int, rooms: Sequence[str] = ROOMS) -> Iterator[Row]:
    """Yield a row per mutant, after running the tests of its module and of its package.

    Args:
        count: Number of mutants, drawn at random from all possible ones.
        seed: Seed of the random choice.
        rooms: Names of labkit's packages in which code is changed.

    Raises:
        InvalidInput: A package does not exist.
        LabkitError: The tests fail on unchanged code.
    """
    files = [file for room in rooms for file in _modules(ROOT, room)]
    everyone = [one for file in files for one in mutants(file.relative_to(ROOT), file.read_text())]
    chosen = random.Random(seed).sample(everyone, min(count, len(everyone)))
    sound: dict[Path, float] = {}
    for one in chosen:
        near, found = mirrors(ROOT, one.file), Verdict("survived", "", 0.0)
        # If the module's own tests do not detect a mutant, another test of the package may detect
        # it.
        for tests in (near, [test for test in _of_room(ROOT, one.file) if test not in near]):
            if not tests or found.outcome != "survived":
                continue
            for test in tests:  # a test that always fails would detect every mutant
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
    """Return the test files that belong to a module.

    These are the test files of its package whose names begin with the module's name, and those that
    contain the name of one of its definitions. If there are none, all test files of the package
    belong to the module.
    """
    files, name = _of_room(root, module), module.stem
    named = [file for file in files if file.stem.removeprefix("test_").startswith(name)]
    words = set(_public(root / module))
    told = [file for file in files if words & set(_words((root / file).read_text()))]
    return list(dict.fromkeys([*named, *told])) or files


def _of_room(root: Path, module: Path) -> list[Path]:
    files = (root / "tests" / module.parts[1]).glob("test_*.py")
    return sorted(file.relative_to(root) for file in files)


def _seconds(root: Path, test: Path) -> float:
    """Return the duration of a test file on unchanged code, in seconds."""
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
    """Run tests on a copy of the package, mutated or unchanged; return the result."""
    with tempfile.TemporaryDirectory(prefix="labkit-mutant-") as folder:
        place = Path(folder)
        copied = [root / name for name in ("labkit", "tests", "notebooks")]
        for source in filter(Path.is_dir, copied):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, place / source.name, ignore=ignored)
        for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "data/README.md"):
            if (root / name).exists():
                (place / name).parent.mkdir(exist_ok=True)
                shutil.copy(root / name, place / name)
        if mutant is not None:
            (place / mutant.file).write_text(mutant.source)
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
        command = [sys.executable, "-P", "-m", "pytest", *options, *(str(test) for test in tests)]
        start = time.monotonic()
        with (place / "said").open("w") as said:
            # The copy comes first on the import path of the tests and of the engines that they
            # start.
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
    """End the tests and all processes that the tests started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


@click.command("mutants")
@click.option("--count", default=50, show_default=True, type=click.IntRange(1), help="How many.")
@click.option("--seed", default=0, show_default=True, help="Of the choice among all.")
@click.option("--rooms", default="exchange,compression,strategies", callback=names)
@AS_JSON
def command(count: int, seed: int, rooms: list[str], file: Path | None) -> None:
    """Apply many small changes to labkit's code, and list those that no test detects."""
    rows = []
    for row in measure(count, seed, rooms):
        rows.append(row)
        say(f"{row['outcome']}: {row['case']}:{row['line']}: {row['what']}")
    survivors = [row for row in rows if row["outcome"] == "survived"]
    say(f"{len(rows) - len(survivors)} of {len(rows)} were noticed; survivors:")
    say(format_rows(survivors, {"case": "file", "line": "line", "what": "change"}))
    write_rows(rows, file)
