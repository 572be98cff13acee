"""Time `ls` and `compare` over thousands of run folders, each in a new process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click
import numpy as np

from labkit.bench.command import AS_JSON, TIMES, show_rows
from labkit.bench.timing import spread
from labkit.common.errors import LabkitError
from labkit.records import store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from labkit.bench.timing import Row
    from labkit.common.canonical_json import JSON

STEPS, RANKS, EPOCHS = 60, 2, 3  # steps, ranks and epochs of each run


def measure(listed: int, compared: int, repeats: int) -> Iterator[Row]:
    """Time each command over many runs: its seconds, and its processor time per run.

    The first `ls` of a folder creates an index for later calls, so it has a separate row.
    """
    with TemporaryDirectory(prefix="labkit-records-") as place:
        for command, count in (("ls", listed), ("compare", compared)):
            folder = Path(place) / command
            make(folder, count)
            words = [command, folder.name]
            times = [timed(words, Path(place)) for _ in range(1 + repeats)]
            for what, own in (("first", times[:1]), ("later", times[1:])):
                if own:
                    processor = float(np.median([used for _, used in own]))
                    row: Row = {"bench": "records", "case": command, "what": what, "runs": count}
                    row |= spread([seconds for seconds, _ in own])
                    yield row | {"processor_ms_per_run": 1e3 * processor / count}


def make(folder: Path, count: int) -> None:
    """Create many run folders, whose runs differ in learning rate and seed."""
    folder.mkdir()
    first = folder / "00000"
    first.mkdir()
    store.start(first, _experiment(0), {"labkit": "0", "cores": 2, "platform": "Linux"})
    store.finish(first, _metrics(0), _history())
    kept = {path.name: path.read_bytes() for path in first.iterdir()}
    for number in range(1, count):
        place = folder / f"{number:05d}"
        place.mkdir()
        # `store` would wait for the disk after each file, so this function copies the contents.
        for name, content in kept.items():
            (place / name).write_bytes(content)
        for name, record in (("experiment", _experiment), ("metrics", _metrics)):
            text = store.json_text(record(number))
            (place / f"{name}.json").write_text(text)


def _experiment(number: int) -> dict[str, JSON]:
    from labkit.experiment import Experiment
    from labkit.strategies import AllReduce

    rate = 0.001 * (1 + number % 20)
    common = {"epochs": EPOCHS, "workers": RANKS, "strategy": AllReduce(algorithm="ring")}
    return Experiment(**common, learning_rate=rate, seed=number // 20).to_json()


def _metrics(number: int) -> dict[str, JSON]:
    loss, speed = 1 / (1 + number % 20), 50_000.0 + number % 20
    epochs: list[JSON] = [
        {"epoch": k, "step": 20 * (k + 1), "seconds": 0.1 * (k + 1), "val_loss": loss / (k + 1)}
        for k in range(EPOCHS)
    ]
    gate: JSON = {"verdict": "passed", "max_abs_difference": 3e-16, "tolerance": 1e-9, "reason": ""}
    return {
        "test_loss": loss,
        "test_accuracy": 1 - loss / 2,
        "samples_per_second": speed,
        "step_ms": {"median": 5.0, "p10": 4.0, "p90": 7.0},
        "train_seconds": 0.7,
        "payload_bytes_per_step": 40_000.0,
        "wire_bytes_per_step": 40_000.0,
        "clock": "wall",
        "network": None,
        "workers": RANKS,
        "equivalence": gate,
        "epochs": epochs,
    }


def _history() -> list[dict[str, JSON]]:
    """Return the history of two ranks whose loss decreases evenly."""
    names = ("payload_bytes", "wire_bytes", "messages", "samples")
    same: dict[str, JSON] = dict.fromkeys(names, 128)
    same |= {name: 0.003 for name in store.HISTORY_COLUMNS if name.endswith("seconds")}
    return [
        same | {"seed": 0, "epoch": step // 20, "step": step, "rank": rank, "loss": 2 / (1 + step)}
        for step in range(STEPS)
        for rank in range(RANKS)
    ]


def timed(words: list[str], folder: Path) -> tuple[float, float]:
    """Return the seconds and the processor time of one command."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    labkit = Path(sys.executable).with_name("labkit")
    # The index that `ls` stores is in the same temporary folder as the runs.
    own = os.environ | {"LABKIT_CACHE": str(folder / "cache")}
    done = subprocess.run([labkit, *words], cwd=folder, capture_output=True, text=True, env=own)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise LabkitError(f"labkit {' '.join(words)} ended with {done.returncode}: {done.stderr}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, used


@click.command("records")
@click.option("--listed", default=20_000, show_default=True, type=click.IntRange(1))
@click.option("--compared", default=5_000, show_default=True, type=click.IntRange(1))
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(1))
@AS_JSON
def command(listed: int, compared: int, repeats: int, file: Path | None) -> None:
    """Time `ls` and `compare` over thousands of runs, which this command creates and removes."""
    rows = list(measure(listed, compared, repeats))
    columns = {"case": "command", "what": "time", "runs": "runs"} | TIMES
    show_rows(rows, columns | {"processor_ms_per_run": "processor ms a run"}, file)
