"""Test that functions with a different meaning have a different canonical JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from labkit import Experiment
from labkit.common.canonical_json import LONG, as_json
from labkit.figures import table


def cell(source: str, **values: Any) -> Callable[[], Any]:
    """Execute a notebook cell with these parameters; return its function `net`."""
    space: dict[str, Any] = {"__name__": "__main__", **values}
    exec(source, space)
    found: Callable[[], Any] = space["net"]
    return found


NET = "def net():\n    return [width for _ in range(depth)]"


def test_parameters_of_a_notebook_that_a_function_reads_belong_to_it() -> None:
    found = as_json(cell(NET, width=8, depth=2, unused=5))
    assert found["captured"] == {"width": 8, "depth": 2}
    hashes = {Experiment(model=cell(NET, width=width, depth=2)).hash8 for width in (8, 64, 8)}
    assert len(hashes) == 2


def test_functions_beside_it_belong_to_it_with_what_they_read() -> None:
    source = "def block():\n    return width\n\ndef net():\n    return lambda: block()"
    found = as_json(cell(source, width=3))
    assert found["captured"]["block"]["captured"] == {"width": 3}
    looped = as_json(cell("def net():\n    return other()\n\ndef other():\n    return net()"))
    assert list(looped["captured"]["other"]) == ["callable", "source"]
    json.dumps([found, looped])


def test_functions_that_call_each_other_in_every_way_are_said_once() -> None:
    names = [f"f{number}" for number in range(30)]
    calls = "; ".join(f"{name}()" for name in names)
    source = "\n".join(f"def {name}(): {calls}" for name in names)
    text = json.dumps(as_json(cell(f"{source}\ndef net(): {calls}")))
    assert text.count('"callable"') == 31


def test_arrays_and_long_values_are_checksums_and_other_objects_are_left_out() -> None:
    source = "def net():\n    return x, words, np, thing"
    thing = np.array([object()])  # its bytes are memory addresses
    values = {"x": np.zeros(3), "words": ["a"] * LONG, "np": np, "thing": thing}
    found = as_json(cell(source, **values))["captured"]
    assert found["x"]["shape"] == [3]
    assert list(found["words"]) == ["sha256"]
    assert set(found) == {"x", "words"}


def test_what_only_looks_like_a_global_is_none() -> None:
    module = ModuleType("layers")
    module.width = 5  # type: ignore[attr-defined]
    found = as_json(cell("def net():\n    return layers.width", width=8, layers=module))
    assert "captured" not in found


def test_runs_of_such_functions_are_told_apart(tmp_path: Any) -> None:
    from sample_runs import write_run

    runs = [
        write_run(tmp_path, model=as_json(cell(NET, width=width, depth=2))) for width in (8, 64)
    ]
    shown = table(runs)
    assert any("width" in name for name in shown.columns)
    assert [any(str(w) in label for label in shown.index) for w in (8, 64)] == [True, True]
