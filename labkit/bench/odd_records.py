"""Folders of runs in which one record is odd: each field, each size, each file that readers meet."""

from __future__ import annotations

import copy
import io
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from labkit.bench.nasty import NASTY, NOTEBOOK
from labkit.bench.records import make
from labkit.records import store

Files: TypeAlias = "dict[bytes, bytes]"  # by their paths, which need not be UTF-8
Place: TypeAlias = "tuple[str | int, ...]"
JOB, ODD = b"runs/job/", b"runs/job/a/"
DEEP = 900  # brackets: fewer than Python's own limit
HUGE: Any = 10**400


class Odd(NamedTuple):
    """What is odd, and the files of the folder."""

    what: str
    files: Files


def base(place: Path) -> Files:
    """Return the files of a folder with a run, a job with one, a sweep, a calibration.

    Args:
        place: an empty folder to make them in.
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
    files |= {b"runs/sweep/sweep.json": _json(_SWEEP)}
    # A process that does not exist: `stop` must not end whoever has made these records.
    for path in (ODD + b"status.json", b"runs/b/status.json"):
        files[path] = _json(json.loads(files[path]) | {"pid": 2**22 + 9})
    rows = [["plan", {"steps": 3}], ["step", {"step": 1, "rank": 0, "loss": 2.0}], ["epoch", {}]]
    files[ODD + b"live/rank0.jsonl"] = b"".join(_json(row) + b"\n" for row in rows)
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
    """Return rows of the tables that ranks write beside the history."""
    event = {"rank": 0, "kind": "communicate", "step": 1, "bucket": 0, "start": 0.1, "stop": 0.2}
    look = dict.fromkeys(("relative_error", "cosine", "residual_norm", "bits_per_parameter"), 0.5)
    seen = {"step": 1, "rank": 0, "bucket": 0, "layer": "dense", "fraction_sent": 0.5}
    push = dict.fromkeys(("server", "update", "worker", "step", "version", "staleness", "rows"), 1)
    moments = {"sent": 0.1, "delivered": 0.2, "applied": 0.3}
    sizes = dict.fromkeys(("forward_bytes", "backward_bytes", "weights_bytes"), 8.0)
    layer = {"rank": 0, "layer": "dense", "slices": "outputs", "why": ""}
    return {
        "timeline": [event, event | {"kind": "step", "bucket": -1}],
        "microscope": [seen | look, seen | look | {"step": 2}],
        "interleaving": [push | moments],
        "layers": [layer | sizes],
    }


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def cases(files: Files, count: int, seed: int) -> Iterator[Odd]:
    """Yield folders: every size first, then fields with odd values, drawn evenly over all fields.

    Args:
        files: see `base`.
        count: so many, at least one of each size.
        seed: of what is drawn.
    """
    sizes = [*_sizes()]
    for what, change in sizes:
        yield Odd(what, change(dict(files)))
    draw = random.Random(seed)
    fields = [(path, place) for path in sorted(files) for place in _places(files[path])]
    draw.shuffle(fields)
    for number in range(count - len(sizes)):
        path, place = fields[number % len(fields)]
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
    """Yield where the values of a file of JSON are, of lists the first; none of another file."""
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
    """Return a file of JSON in which one value is another; the name "sys" stands for itself."""
    whole = json.loads(content)
    inner = whole
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = copy.deepcopy(value)
    return _json(whole)


Change: TypeAlias = "Callable[[Files], Files]"


def _sizes() -> Iterator[tuple[str, Change]]:
    """Yield what is too much, too deep, too long, or no text; how a folder comes to it."""
    for name in ("experiment", "metrics", "status", "environment"):
        path = ODD + f"{name}.json".encode()
        for what, value in _LARGE.items():
            yield f"{name}: {what}", _field(path, what.replace(" ", "_"), value)
    metrics, experiment = ODD + b"metrics.json", ODD + b"experiment.json"
    for name, value in _SHAPES.items():
        for number, each in enumerate(value):
            yield f"{name}, shape {number}", _field(metrics, name, each)
    yield "200,000 options", _field(experiment, "model_options", _many(200_000))
    for path in (metrics, JOB + b"output.ipynb", b"n.ipynb", b"runs/sweep/sweep.json"):
        for what, content in _TEXTS.items():
            yield f"{what} in {os.fsdecode(path)}", _file(path, content)
    yield (
        "a list of 20,000,000 lists",
        _file(metrics, b'{"schema": 1, "a": [' + b"[]," * 20_000_000),
    )
    for what, content in _YAML.items():
        yield f"params.yaml: {what}", _file(JOB + b"params.yaml", content)
    for folder, what in ((b"\xff\xfe", "not UTF-8"), (b"n" * 255, "255 letters"), (b"=1+1", "=1")):
        yield f"a run's name: {what}", _copied(ODD, b"runs/" + folder + b"/")
        yield f"a job's name: {what}", _copied(JOB, b"runs/" + folder + b"/")
    yield "a file's name: not UTF-8", _file(ODD + b"\xff.parquet", b"PAR1")
    yield "60 folders in each other", _copied(ODD, b"runs/" + b"d/" * 60)
    sweep = b"runs/sweep/sweep.json"
    for folder in ("m" * 300, "m" * 100_000, "\ud800", "a\0b", "..", "", "\xff" * 200):
        member = {"folder": folder, "values": {"workers": 2}, "repeat": 0}
        yield f"a member {folder[:9]!r} of {len(folder)}", _field(sweep, "members", [member])
    many = [{"folder": str(n), "values": {"workers": 2}, "repeat": 0} for n in range(60_000)]
    yield "60,000 members", _field(sweep, "members", many)
    for what, table in _bombs():
        name, what = what.split(": ")
        yield f"{name}: {what}", _file(ODD + f"{name}.parquet".encode(), table)
    for what, figure in _FIGURES.items():
        yield f"a figure: {what}", _file(JOB + b"output.ipynb", _json(_shown(figure)))
    for what, source in _SOURCES.items():
        yield f"a cell: {what}", _file(JOB + b"output.ipynb", _json(_shown({}, source)))
    for what, line in _LINES.items():
        yield f"live: {what}", _file(ODD + b"live/rank0.jsonl", line)


def _deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _many(count: int) -> dict[str, int]:
    return {f"option{number}": number for number in range(count)}


_LARGE: dict[str, Any] = {
    "900 levels": _deep(DEEP),
    "2,000 names": _many(2_000),
    "60,000 names": _many(60_000),
    "a name of 100,000 letters": {"n" * 100_000: 1},
    "a text of 10,000,000 letters": "t" * 10_000_000,
    "a number of 400 digits": HUGE,
    "half a character": "\ud800",
    "NaN": float("nan"),
    "60,000 texts": [f"category {number}" for number in range(60_000)],
}
_SHAPES: dict[str, list[Any]] = {
    "logged": [[{}], {}, "x", [1], [["a"]], [None], ["n" * 5000], [f"n{k}" for k in range(60_000)]],
    "spread": [[], {"a": 1}, {"a": [1]}, {"a": [1, 2, 3]}, {"a": ["x", "y"]}, {"a": [None, 1]}],
    "epochs": [{}, [1], [{}], [[]], [{"step": None}], [{"step": "1"}], [{"epoch": 0}], "x"],
    "clocks": [[{}], [{"rank": 0}], [{"rank": 0, "offset_s": "x", "within_s": 1}], {"rank": 0}],
    "memory": [[{}], [{"rank": 0}], [{"rank": 0, "predicted": [], "measured": {}}], 5],
    "step_ms": [{}, {"median": 1.0}, {"median": "x", "p10": 1, "p90": 2}, [1, 2, 3]],
    "equivalence": [{}, {"verdict": 1}, {"verdict": "passed", "place": []}, "passed"],
    "faults": [5, [1], {"a": 1}],
    "exchange": [5, "x", [1]],
    "repeats": [0, -1, 10**17, "2", 1.5],
    "wire_bytes_per_step": [-1, 1e-300, 1e300, 10**17],
    "samples_per_second": [-1.0, 1e-300, 1e300],
    "train_seconds": [1e-300, 1e300, -5.0],
    "test_accuracy": [1e300, -1e300, 10**17, 5],
    "test_loss": [1e300, -1e300],
}
_TEXTS = {
    "nothing": b"",
    "900 brackets": b"[" * DEEP + b"]" * DEEP,
    "100,000 brackets": b'{"schema": 1, "a": ' + b"[" * 100_000,
    "no UTF-8": b'{"schema": 1, "a": "\xff"}',
    "UTF-16": '{"schema": 1}'.encode("utf-16"),
    "a list": b"[1]",
}
_YAML = {
    "a billion laughs": b"a: &a [x]\n"
    + b"".join(
        b"%c: &%c [%s]\n" % (n + 1, n + 1, b",".join([b"*%c" % n] * 9)) for n in range(97, 106)
    ),
    "deep": b"[" * 5_000,
    "a tag": b"!!python/object/apply:os.system ['true']",
    "60,000 names": b"".join(b"n%d: 1\n" % n for n in range(60_000)),
    "no UTF-8": b"a: \xff\n",
    "a list": b"[1, 2]\n",
}
_FIGURES: dict[str, dict[str, Any]] = {
    "60,000 categories": {
        "data": [{"type": "bar", "x": [f"c{n}" for n in range(60_000)], "y": [1] * 60_000}]
    },
    "60,000 bars of one place": {
        "data": [
            {"type": "bar", "x": ["a"] * 30_000, "y": [1] * 30_000},
            {"type": "bar", "x": ["a"] * 30_000, "y": [1] * 30_000},
        ]
    },
    "a log axis of a billion decades": {
        "data": [{"type": "scatter", "x": [1, 2], "y": [1, 2]}],
        "layout": {"yaxis": {"type": "log", "range": [-1e9, 1e9]}, "xaxis": {"range": [0, 1e-9]}},
    },
    "a log axis of 1e-9 decades": {
        "data": [{"type": "scatter", "x": [1, 2], "y": [1, 2]}],
        "layout": {"yaxis": {"type": "log", "range": [0, 1e-9]}},
    },
    "ends beyond all": {
        "data": [{"type": "scatter", "x": [1, 2], "y": [1, 2]}],
        "layout": {"yaxis": {"range": [-1e308, 1e308]}, "xaxis": {"range": [5e-324, 1e-323]}},
    },
    "a table of 1,000,000 cells": {
        "data": [{"type": "heatmap", "z": [[0.5] * 1_000 for _ in range(1_000)]}]
    },
    "60,000 traces": {"data": [{"type": "scatter", "y": [1, 2]} for _ in range(60_000)]},
    "60,000 ticks": {
        "data": [{"type": "scatter", "y": [1, 2]}],
        "layout": {"xaxis": {"tickvals": [n / 6e4 for n in range(60_000)]}},
    },
    "60,000 notes": {
        "data": [{"type": "scatter", "y": [1, 2]}],
        "layout": {
            "annotations": [
                {"xref": "paper", "yref": "paper", "text": "n", "x": 0.5, "y": 0.5}
                for _ in range(60_000)
            ]
        },
    },
    "numbers packed for gigabytes": {
        "data": [{"type": "scatter", "y": {"dtype": "f8", "bdata": "AAAA", "shape": "9999999999"}}]
    },
    "data of a text": {"data": "scatter", "layout": [1]},
    "1,000 axes for 1,000 runs": {
        "data": [
            {
                "type": "parcoords",
                "dimensions": [{"values": list(range(300)), "label": "x"} for _ in range(1_000)],
            }
        ]
    },
}
_SOURCES = {
    "60,000 quotes": ">" * 60_000 + " x",
    "60,000 brackets": "[" * 60_000,
    "60,000 stars": "*" * 60_000 + "a",
    "10,000,000 letters": "a " * 5_000_000,
    "a missing image": "![i](attachment:i.png)",
    "a table of 60,000 columns": "|" + "a|" * 60_000 + "\n|" + "-|" * 60_000,
    "60,000 backticks": "`" * 60_000,
    "60,000 dollars": "$" * 60_000,
    "60,000 tags": "<b>" * 60_000,
}
_LINES = {
    "no record": b"5\n",
    "no pair": b"[1, 2, 3]\n",
    "deep": b'["step", ' + b"[" * 100_000 + b"\n",
    "no UTF-8": b'["step", {"step": "\xff"}]\n',
    "odd fields": b'["step", {}]\n["epoch", {"step": [], "loss": {}}]\n["plan", []]\n',
    "a list of lists": b'["step", [' + b"[]," * 5_000_000 + b"]]\n",
}


def _shown(figure: Mapping[str, Any], source: str = "# Does it pay?") -> dict[str, Any]:
    """Return a notebook with this figure, and this text in its first cell."""
    whole: dict[str, Any] = copy.deepcopy(NOTEBOOK)
    whole["cells"][0]["source"] = source
    if figure:
        whole["cells"][2]["outputs"][0]["data"]["application/vnd.plotly.v1+json"] = figure
    return whole


def _bombs() -> Iterator[tuple[str, bytes]]:
    """Yield tables that are small as files, and large or odd when read."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    def packed(table: pa.Table, **options: Any) -> bytes:
        sink = io.BytesIO()
        pq.write_table(table, sink, compression="zstd", **options)
        return sink.getvalue()

    def history(rows: int, **columns: Any) -> pa.Table:
        made = {name: np.zeros(rows, kind) for name, kind in store.HISTORY_COLUMNS.items()}
        return pa.table(made | columns)

    yield "history: 300,000,000 rows", packed(pa.table({"step": np.zeros(300_000_000, np.int8)}))
    text = pa.DictionaryArray.from_arrays(np.zeros(1_000_000, np.int32), pa.array(["t" * 100_000]))
    events = dict.fromkeys(("rank", "step", "bucket"), np.zeros(1_000_000, np.int64))
    times = dict.fromkeys(("start", "stop"), np.zeros(1_000_000))
    yield (
        "timeline: a text of 100,000 letters a million times",
        packed(pa.table({"kind": text, **events, **times}), store_schema=False),
    )
    yield (
        "microscope: lists of 100,000,000",
        packed(pa.table({"layer": pa.array([np.zeros(100_000_000, np.int8)])})),
    )
    yield "layers: 20,000 columns", packed(pa.table({f"c{n}": [1] for n in range(20_000)}))
    count = 60_000
    yield (
        "history: each row of another seed and step",
        packed(history(count, seed=np.arange(count), step=np.arange(count))),
    )
    yield "history: 60,000 ranks", packed(history(count, rank=np.arange(count)))
    yield "history: steps of 10¹⁷", packed(history(9, step=np.arange(9) * 10**16 * 9))
    yield "history: negative steps", packed(history(9, step=-np.arange(9)))
    yield "history: infinite losses", packed(history(9, loss=np.full(9, np.inf)))
    tiny = np.full(9, 1e-300)
    yield (
        "history: bytes of 300 decades",
        packed(
            history(9, step=np.arange(9), wire_bytes=np.linspace(1e-300, 1e300, 9), seconds=tiny)
        ),
    )
    yield "history: texts", packed(history(9, codec_seconds=["x"] * 9))
    yield "history: empty", packed(history(0))
    looks = dict.fromkeys(("relative_error", "cosine", "residual_norm"), np.ones(count))
    looks |= dict.fromkeys(("bits_per_parameter", "fraction_sent"), np.ones(count))
    names = [f"layer {n}" for n in range(count)]
    places = dict.fromkeys(("step", "rank", "bucket"), np.ones(count, np.int64))
    yield "microscope: 60,000 layers", packed(pa.table({"layer": names, **places, **looks}))
    yield (
        "microscope: numbers as layers",
        packed(
            pa.table({"layer": np.arange(9), **{k: v[:9] for k, v in (places | looks).items()}})
        ),
    )
    yield (
        "timeline: ranks of gaps",
        packed(
            pa.table(
                {"rank": [None, 1], "kind": ["step", None], "step": [1, 2], "bucket": [1, 1]}
                | {"start": [0.0, np.nan], "stop": [1.0, np.inf]}
            )
        ),
    )
    yield (
        "timeline: 60,000 ranks",
        packed(
            pa.table(
                {"rank": np.arange(count), "kind": ["step"] * count, "step": np.arange(count)}
                | {"bucket": np.zeros(count, int), "start": np.zeros(count), "stop": np.ones(count)}
            )
        ),
    )
    yield "history: no file", b"PAR1" * 5


def _field(path: bytes, name: str, value: Any) -> Change:
    return lambda files: files | {path: _json(json.loads(files[path]) | {name: value})}


def _file(path: bytes, content: bytes) -> Change:
    return lambda files: files | {path: content}


def _copied(folder: bytes, other: bytes) -> Change:
    return lambda files: (
        files | {other + p[len(folder) :]: c for p, c in files.items() if p.startswith(folder)}
    )


def lay(files: Files, folder: Path) -> None:
    """Write the files of a case into a new folder."""
    for path, content in files.items():
        place = os.fsencode(folder) + b"/" + path
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "wb") as file:
            file.write(content)
    (folder / "out").mkdir()
