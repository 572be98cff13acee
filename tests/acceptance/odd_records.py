"""Run folders with one unusual record: an unusual field, an unusual size, or an unusual file."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeAlias

from labkit.bench.timing import Row
from labkit.records import store
from tests.acceptance.odd_sizes import HUGE, JOB, ODD, SWEEP, Files, sizes
from tests.acceptance.odd_values import NASTY, NOTEBOOK
from tests.acceptance.readers import Readers, Reading, readers_of
from tests.acceptance.records import make

Place: TypeAlias = "tuple[str | int, ...]"


class Odd(NamedTuple):
    """A description of the unusual record, and all files of the folder."""

    what: str
    files: Files


def base(place: Path) -> Files:
    """Return the files of a folder with a run, a notebook run, a sweep and a calibration.

    Args:
        place: Empty folder in which the files are created.
    """
    make(place / "made", 2)
    first, second = (place / "made" / name for name in ("00000", "00001"))
    for name, rows in _tables().items():
        store.write_table(first / f"{name}.parquet", rows)
    run = {path.name.encode(): path.read_bytes() for path in first.iterdir()}
    files = {ODD + name: content for name, content in run.items()}
    good = {path.name.encode(): path.read_bytes() for path in second.iterdir()}
    files |= {b"runs/b/" + name: content for name, content in good.items()}
    files |= {b"n.ipynb": _json(NOTEBOOK), JOB + b"output.ipynb": _json(NOTEBOOK)}
    files |= {b"calibration.json": _json(_CALIBRATION), JOB + b"params.yaml": b"workers: 2\n"}
    files |= {JOB + b"status.json": _json(_STATUS | {"notebook": "n.ipynb"})}
    files |= {SWEEP: _json(_SWEEP)}
    # No process has this process ID, so `stop` cannot end the campaign's own process.
    for path in (ODD + b"status.json", b"runs/b/status.json"):
        files[path] = _json(json.loads(files[path]) | {"pid": 2**22 + 9})
    told: list[Any] = [
        ["plan", {"steps": 3}],
        ["step", {"step": 1, "rank": 0, "loss": 2.0}],
        ["epoch", {}],
    ]
    files[ODD + b"live/rank0.jsonl"] = b"".join(_json(row) + b"\n" for row in told)
    return files


_STATUS: dict[str, Any] = {
    "schema": 1,
    "state": "completed",
    "started": "2026-01-01T00:00:00+00:00",
    "ended": "2026-01-01T00:01:00+00:00",
    "cause": None,
    "rank": None,
    "pid": 2**22 + 9,
    "process_started": 1.0,
    "since_boot": 1.0,
}
_SWEEP: dict[str, Any] = _STATUS | {
    "notebook": "n.ipynb",
    "plan": "n-0",
    "members": [{"folder": "001_workers=2", "values": {"workers": 2}, "repeat": 0}],
    "search": None,
    "jobs": 1,
    "limit": 60.0,
    "slurm": None,
    "elements": [],
}
_SPREAD = {"median": 0.1, "low": 0.1, "high": 0.2, "count": 3}
_CALIBRATION: dict[str, Any] = {
    "schema_version": 2,
    "made": "2026-01-01T00:00:00+00:00",
    "machine": {"cpu": "one", "cores": 2},
    "codecs": [
        {
            "compressor": {"name": "TopK"},
            "nbytes": 8,
            "encode": _SPREAD,
            "decode": _SPREAD,
            "payload": 8,
        }
    ],
}


def _tables() -> dict[str, list[dict[str, Any]]]:
    """Return rows for the tables that ranks write in addition to the training history."""
    event = {"rank": 0, "kind": "communicate", "step": 1, "bucket": 0, "start": 0.1, "stop": 0.2}
    look = dict.fromkeys(("relative_error", "cosine", "residual_norm", "bits_per_parameter"), 0.5)
    seen = {"step": 1, "rank": 0, "bucket": 0, "layer": "dense", "fraction_sent": 0.5}
    push = dict.fromkeys(("server", "update", "worker", "step", "version", "staleness", "rows"), 1)
    moments = {"sent": 0.1, "delivered": 0.2, "applied": 0.3}
    sizes = dict.fromkeys(
        ("forward_bytes", "backward_bytes", "weights_bytes", "whole_weights_bytes"), 8.0
    )
    layer = {"rank": 0, "layer": "dense", "slices": "outputs", "why": ""}
    sample = dict.fromkeys(("cpu_seconds", "memory_bytes", "sent_bytes", "received_bytes"), 1.0)
    return {
        "resources": [{"rank": 0, "seconds": 0.5} | sample],
        "timeline": [event, event | {"kind": "step", "bucket": -1}],
        "compression_stats": [seen | look, seen | look | {"step": 2}],
        "update_log": [push | moments],
        "layers": [layer | sizes],
    }


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def cases(files: Files, count: int, seed: int) -> Iterator[Odd]:
    """Yield run folders: first with unusual sizes, then with unusual values in random fields.

    Args:
        files: Files of a valid folder, see `base`.
        count: Number of folders; if there are more unusual sizes than this, a random choice of the
            sizes is used.
        seed: Seed of the random choices.
    """
    large = [*sizes()]
    for what, change in random.Random(seed).sample(large, min(count, len(large))):
        yield Odd(what, change(dict(files)))
    yield from fields(files, count - len(large), seed)


def fields(files: Files, count: int, seed: int) -> Iterator[Odd]:
    """Yield `count` folders with an unusual value in one field; all fields occur equally often."""
    draw = random.Random(seed)
    odd = [path for path in sorted(files) if not path.startswith(b"runs/b/")]
    places = [(path, place) for path in odd for place in _places(files[path])]
    draw.shuffle(places)
    for number in range(count):
        path, place = places[number % len(places)]
        value = draw.choice(VALUES)
        what = f"{os.fsdecode(path)} {'.'.join(map(str, place))} = {str(value)[:60]!r}"
        yield Odd(what, files | {path: _with(files[path], place, value)})


VALUES: list[Any] = [
    *NASTY,
    *(HUGE, -HUGE, -0.0, 10**17, -(10**17), 2**63, 1e-300, 1e300, float("-inf")),
    *({}, [{}], [[1, 2]], [None], {"a": [None]}, {"a": None}, {"a": {}}, {"a": {"b": []}}),
    *("\ud800", "a\0b", "x" * 300, "n" * 5000, "2026-01-01", "0001-01-01T00:00:00+14:00"),
    *({"step": 1}, [{"step": HUGE}], [{"step": "1"}], [{"step": 1, "val_loss": float("inf")}]),
    *({"x" * 300: 1}, {"": 1, " ": 2}, {"name": {"name": "x"}}, {"name": ["AllReduce"]}),
    *([0] * 1000, {str(n): n for n in range(300)}, [["a", 1]], {"a": [2, 1]}, {"a": [1, "b"]}),
]


def _places(content: bytes) -> Iterator[Place]:
    """Yield the path of each value in a JSON file; of each list, only the first item is used."""
    try:
        whole = json.loads(content)
    except ValueError:
        return
    yield from _inside(whole, ())


def _inside(value: Any, place: Place) -> Iterator[Place]:
    inner = value.items() if isinstance(value, dict) else list(enumerate(value))[:2]
    for name, each in inner:
        yield (*place, name)
        if isinstance(each, dict | list):
            yield from _inside(each, (*place, name))


def _with(content: bytes, place: Place, value: Any) -> bytes:
    """Return the content of a JSON file after one value is replaced."""
    whole = json.loads(content)
    inner = whole
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = copy.deepcopy(value)
    return _json(whole)


def lay(files: Files, folder: Path) -> None:
    """Write the files of a case into a new folder."""
    for path, content in files.items():
        place = os.fsencode(folder) + b"/" + path
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "wb") as file:
            file.write(content)
    (folder / "out").mkdir()


def measure(count: int, seed: int, seconds: float = 60.0) -> Iterator[Row]:
    """Let all readers read many unusual records; yield a row per reader and per failure.

    Args:
        count: Number of records; records of unusual sizes come first.
        seed: Seed of the random choices.
        seconds: Timeout of a reader.
    """
    met: dict[str, list[Reading]] = {}
    readers = Readers(seconds)
    try:
        with TemporaryDirectory(prefix="labkit-odd-") as name:
            place = Path(name)
            (place / "base").mkdir()
            files = base(place / "base")
            for number, odd in enumerate(cases(files, count, seed)):
                folder = place / str(number)
                folder.mkdir()
                lay(odd.files, folder)
                changed = [os.fsdecode(p) for p, c in odd.files.items() if files.get(p) != c]
                for reading in readers.meet(folder, readers_of(changed)):
                    met.setdefault(reading.reader, []).append(reading)
                    if reading.end == "failed":
                        wrong: Row = {"bench": "fuzz", "case": reading.reader}
                        wrong |= {"what": reading.why, "command": reading.reader}
                        yield wrong | {"files": odd.what}
                shutil.rmtree(folder)
    finally:
        readers.close()
    for reader, readings in met.items():
        counts = Counter(each.end for each in readings)
        row: Row = {"bench": "fuzz", "case": reader, "seed": seed, "tried": len(readings)}
        row |= {end: counts[end] for end in ("read", "skipped", "failed")}
        row["slowest_s"] = max(each.seconds for each in readings)
        yield row | {"peak_mib": max(each.nbytes for each in readings) / 2**20}
