"""Changes that make something in a folder of runs too large, too deep or too numerous."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from tests.acceptance.odd_tables import bombs
from tests.acceptance.odd_values import NOTEBOOK

Files: TypeAlias = "dict[bytes, bytes]"  # files by path; paths need not be UTF-8
JOB, ODD, SWEEP = b"runs/job/", b"runs/job/a/", b"runs/sweep/sweep.json"
METRICS, OUTPUT = ODD + b"metrics.json", JOB + b"output.ipynb"
DEEP = 900  # nesting depth of brackets, below Python's own limit
HUGE: Any = 10**400
Change: TypeAlias = "Callable[[Files], Files]"


def sizes() -> Iterator[tuple[str, Change]]:
    """Yield changes that make a file too large, too deep, or no text, after their descriptions."""
    for part in (_large, _texts, _names, _members, _tables, _pages):
        yield from part()


def _large() -> Iterator[tuple[str, Change]]:
    for name in ("experiment", "metrics", "status", "environment"):
        path = ODD + f"{name}.json".encode()
        for what, value in _LARGE.items():
            yield f"{name}: {what}", _field(path, what.replace(" ", "_"), value)
    for name, values in _SHAPES.items():
        for number, each in enumerate(values):
            yield f"{name}, shape {number}", _field(METRICS, name, each)
    yield "200,000 options", _field(ODD + b"experiment.json", "model_options", _many(200_000))


def _texts() -> Iterator[tuple[str, Change]]:
    for path in (METRICS, OUTPUT, b"n.ipynb", SWEEP):
        for what, content in _TEXTS.items():
            yield f"{what} in {os.fsdecode(path)}", _file(path, content)
    many = b'{"schema": 1, "a": [' + b"[]," * 20_000_000
    yield "a list of 20,000,000 lists", _file(METRICS, many)
    for what, content in _YAML.items():
        yield f"params.yaml: {what}", _file(JOB + b"params.yaml", content)
    for what, content in _LINES.items():
        yield f"live: {what}", _file(ODD + b"live/rank0.jsonl", content)


def _names() -> Iterator[tuple[str, Change]]:
    for folder, what in ((b"\xff\xfe", "not UTF-8"), (b"n" * 255, "255 letters"), (b"=1+1", "=1")):
        yield f"a run's name: {what}", _copied(ODD, b"runs/" + folder + b"/")
        yield f"a job's name: {what}", _copied(JOB, b"runs/" + folder + b"/")
    yield "a file's name: not UTF-8", _file(ODD + b"\xff.parquet", b"PAR1")
    yield "60 folders in each other", _copied(ODD, b"runs/" + b"d/" * 60)


def _members() -> Iterator[tuple[str, Change]]:
    for folder in ("m" * 300, "m" * 100_000, "\ud800", "a\0b", "..", "", "\xff" * 200):
        member = {"folder": folder, "values": {"workers": 2}, "repeat": 0}
        yield f"a member {folder[:9]!r} of {len(folder)}", _field(SWEEP, "members", [member])
    many = [{"folder": str(n), "values": {"workers": 2}, "repeat": 0} for n in range(60_000)]
    yield "60,000 members", _field(SWEEP, "members", many)


def _tables() -> Iterator[tuple[str, Change]]:
    for what, table in bombs():
        name = what.partition(":")[0]
        yield what, _file(ODD + f"{name}.parquet".encode(), table)


def _pages() -> Iterator[tuple[str, Change]]:
    for what, figure in _FIGURES.items():
        yield f"a figure: {what}", _file(OUTPUT, _json(_shown(figure)))
    for what, source in _SOURCES.items():
        yield f"a cell: {what}", _file(OUTPUT, _json(_shown({}, source)))


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
    "a name of 100,000 characters": {"n" * 100_000: 1},
    "a text of 10,000,000 characters": "t" * 10_000_000,
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
    """Return a notebook with a text in its first cell, and a figure among its outputs."""
    whole: dict[str, Any] = copy.deepcopy(NOTEBOOK)
    whole["cells"][0]["source"] = source
    if figure:
        whole["cells"][2]["outputs"][0]["data"]["application/vnd.plotly.v1+json"] = figure
    return whole


def _field(path: bytes, name: str, value: Any) -> Change:
    return lambda files: files | {path: _json(json.loads(files[path]) | {name: value})}


def _file(path: bytes, content: bytes) -> Change:
    return lambda files: files | {path: content}


def _copied(folder: bytes, other: bytes) -> Change:
    return lambda files: (
        files | {other + p[len(folder) :]: c for p, c in files.items() if p.startswith(folder)}
    )


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
