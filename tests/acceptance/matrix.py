"""Test labkit with the lowest and the newest packages that `pyproject.toml` allows."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import click

from labkit.bench.command import AS_JSON, names, show_rows
from labkit.common.terminal import say
from tests.acceptance.repository import ROOT

if TYPE_CHECKING:
    from labkit.bench.timing import Row

COLUMNS = {
    "python": "Python",
    "versions": "packages",
    "tensorflow": "TensorFlow",
    "numpy": "NumPy",
    "passed": "passed",
    "failed": "failed",
    "install_s": "install s",
    "all_s": "all s",
}
RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
# TensorFlow and Keras change their private parts between versions, so each module is imported.
IMPORTS = """
import importlib, pkgutil, sys, labkit
absent = {"torch", "horovod", "jax", "simgrid"}
for module in pkgutil.walk_packages(labkit.__path__, "labkit."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name not in absent:
            raise
import tensorflow, numpy
sys.stdout.write(f"{tensorflow.__version__} {numpy.__version__}")
"""
# Tests of what uses other packages most: files, figures, reports, parameters, Keras and MPI.
QUICK = (
    *(
        "tests/records",
        "tests/report",
        "tests/jobs",
        "tests/figures/test_kit.py",
        "tests/experiment",
    ),
    *("-m", "pure"),
)
TRAINING = ("tests/exchange", "tests/keras", "tests/models", "tests/compression", "tests/cluster")


class Environment(NamedTuple):
    """A virtual environment: its folder, its Python, and whether its packages are the lowest."""

    folder: Path
    python: str
    versions: str

    def install(self) -> None:
        """Create the environment with all extras except `gpu`, and with the tests' packages."""
        subprocess.run(
            ["uv", "venv", "--quiet", "--python", self.python, str(self.folder)], check=True
        )
        # "Newest" means today. Otherwise, uv obeys the date in `pyproject.toml`.
        today = ["--exclude-newer", datetime.now(UTC).isoformat()]
        command = ["uv", "pip", "install", "--quiet", "--python", str(self.folder)]
        command += ["--resolution", RESOLUTIONS[self.versions], "--editable", ".[all]"]
        command += ["--group", "tests", *(today if self.versions == "newest" else [])]
        subprocess.run(command, check=True, cwd=ROOT)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run this environment's Python, and return its exit code and its standard output."""
        command = [str(self.folder / "bin/python"), *arguments]
        # A run of the suite's own Python must not set the environment of this one.
        more = {"VIRTUAL_ENV": str(self.folder), "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            command, cwd=ROOT, env=os.environ | more, stdout=subprocess.PIPE, text=True, check=False
        )


def measure(pythons: Sequence[str], versions: Sequence[str], quick: bool) -> Iterator[Row]:
    """Yield a row per environment: versions, numbers of passed and failed tests, and seconds."""
    for python, version in product(pythons, versions):
        with TemporaryDirectory(prefix="labkit-matrix-") as place:
            begun = time.monotonic()
            environment = Environment(Path(place) / "venv", python, version)
            environment.install()
            installed = time.monotonic() - begun
            imports = environment.run("-c", IMPORTS)
            row: Row = {"bench": "matrix", "python": python, "versions": version}
            row["tensorflow"], row["numpy"] = (imports.stdout.split() or ["-", "-"])[-2:]
            suites = [QUICK] if quick else [("-m", "pure"), TRAINING]
            counts = [_counts(environment.run("-m", "pytest", "-q", *suite)) for suite in suites]
            row["passed"] = sum(passed for passed, _ in counts)
            row["failed"] = sum(failed for _, failed in counts) + (imports.returncode != 0)
            row |= {"install_s": installed, "all_s": time.monotonic() - begun}
            yield row


def _counts(done: subprocess.CompletedProcess[str]) -> tuple[int, int]:
    """Return the numbers of passed and failed tests from pytest's last line."""
    say(done.stdout, nl=False, err=True)
    found = re.findall(r"(\d+) (passed|failed|error)", done.stdout)
    numbers = {word: int(number) for number, word in found}
    failed = numbers.get("failed", 0) + numbers.get("error", 0)
    return numbers.get("passed", 0), failed or int(done.returncode != 0)


@click.command()
@click.option(
    "--python",
    "pythons",
    default="3.11,3.12,3.13",
    show_default=True,
    callback=names,
    help="Versions or paths of Python.",
)
@click.option(
    "--versions",
    default="lowest,newest",
    show_default=True,
    callback=names,
    help="Packages: the lowest or the newest that pyproject.toml allows.",
)
@click.option("--quick", is_flag=True, help="Import all modules, and run some of the pure tests.")
@AS_JSON
def command(pythons: list[str], versions: list[str], quick: bool, file: Path | None) -> None:
    """Test labkit with the lowest and the newest packages that it allows.

    The command needs uv, and 3 GB of disk for an environment at a time.
    """
    rows = list(measure(pythons, versions, quick))
    show_rows(rows, COLUMNS, file)
    if any(row["failed"] for row in rows):
        raise click.exceptions.Exit(1)
