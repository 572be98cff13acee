"""Test that a file that is no valid notebook is refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from labkit.common.errors import InvalidInput
from labkit.jobs.cells import read
from labkit.jobs.parameters import declared

CELL = {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": "a: int = 1"}
ODD: dict[str, Any] = {
    "cells that are a number": {"cells": 5},
    "no cells": {"metadata": {}},
    "a cell that is text": {"cells": ["import os"]},
    "metadata that are a list": {"cells": [CELL | {"metadata": []}]},
    "tags that are a number": {"cells": [CELL | {"metadata": {"tags": 7}}]},
    "a tag that is a record": {"cells": [CELL | {"metadata": {"tags": [{}]}}]},
    "a source that is a number": {"cells": [CELL | {"source": 3}]},
    "a line that is none": {"cells": [CELL | {"source": [None]}]},
    "a kind that is none": {"cells": [CELL | {"cell_type": None}]},
    "a list": [1],
}


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_notebook_is_one_sentence(tmp_path: Path, odd: str) -> None:
    path = tmp_path / "odd.ipynb"
    path.write_text(json.dumps(ODD[odd]))
    with pytest.raises(InvalidInput, match=r"odd.ipynb is not a notebook of format 4: "):
        declared(path)


def test_so_is_one_that_is_too_deep_and_one_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "odd.ipynb"
    for content in (b'{"cells": ' + b"[" * 100_000, b"\xff\xfe{}"):
        path.write_bytes(content)
        with pytest.raises(InvalidInput, match=r"odd\.ipynb"):
            read(path)


def test_a_default_that_python_cannot_make_is_left_to_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "n.ipynb"
    path.write_text(json.dumps({"cells": [CELL | {"source": "a: dict = {[]: 1}"}]}))
    assert list(declared(path)) == ["a"]
