"""Test notebook file formats: each is read as meant, or refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest

from labkit.common.errors import InvalidInput
from labkit.jobs.parameters import declared, validate_values

pytestmark = pytest.mark.heavy  # jupytext runs pandoc to ask for its version

CODE = {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": "n = 3", "outputs": []}
BOM = "﻿"
PERCENT = '# %% tags=["parameters"]\nn = 3\n# %% [markdown]\n# prose\n# %%\nprint(n)\n'
LATIN = '# -*- coding: latin-1 -*-\n# %% tags=["parameters"]\nn = 3  # für\n'
MYST = (
    "---\nkernelspec:\n  name: {name}\n  display_name: x\n  language: {language}\n---\n\n"
    "# Title\n\n```{{code-cell}}\n:tags: [parameters]\n\nn = 3\n```\n"
)


def notebook(**fields: Any) -> str:
    """Return the JSON text of a notebook in format 4.5 with these fields."""
    record = {"cells": [CODE], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(record | fields)


def of_kernel(spec: dict[str, str], **info: str) -> str:
    return notebook(
        metadata={"kernelspec": spec, "language_info": info} if info else {"kernelspec": spec}
    )


def old(version: int) -> str:
    cell = {**CODE, "input": CODE["source"], "language": "python", "prompt_number": 1}
    del cell["source"]
    sheets = [{"cells": [cell], "metadata": {}}]
    return json.dumps(
        {"worksheets": sheets, "metadata": {"name": ""}, "nbformat": version, "nbformat_minor": 0}
    )


READ: dict[str, bytes] = {
    "plain.ipynb": notebook().encode(),
    "bom.ipynb": (BOM + notebook()).encode(),
    "utf16.ipynb": notebook().encode("utf-16"),
    "v3.ipynb": old(3).encode(),
    "v2.ipynb": old(2).encode(),
    "no_minor_ids.ipynb": notebook(nbformat_minor=0).encode(),
    "double_ids.ipynb": notebook(
        cells=[CODE | {"id": "a"}, {**CODE, "id": "a", "metadata": {}}]
    ).encode(),
    "percent.py": PERCENT.encode(),
    "bom.py": (BOM + PERCENT).encode(),
    "latin.py": LATIN.encode("latin-1"),
    "windows.py": PERCENT.replace("\n", "\r\n").encode(),
    "light.py": b'# + tags=["parameters"]\nn = 3\n# -\n\nprint(n)\n',
    "myst.md": MYST.format(name="python3", language="python").encode(),
    "bom.md": (BOM + MYST.format(name="python3", language="python")).encode(),
    "jupytext.md": b'---\njupytext: {}\n---\n\n```python tags=["parameters"]\nn = 3\n```\n',
    "other.ipynb": of_kernel(
        {"name": "python3", "language": "python"}, name="python", version="3.14.1"
    ).encode(),
    "conda.ipynb": of_kernel({"name": "base", "display_name": "Python [conda env:base]"}).encode(),
}
REFUSED: dict[str, tuple[bytes, str]] = {
    "r.ipynb": (
        of_kernel({"name": "ir", "language": "R"}, name="R").encode(),
        r"^r\.ipynb is a notebook in R \(kernel 'ir'\); labkit runs only Python; run it with ",
    ),
    "r_spec.ipynb": (of_kernel({"name": "ir", "language": "R"}).encode(), "is a notebook in R "),
    "r_name.ipynb": (
        of_kernel({"name": "ir", "display_name": "R"}).encode(),
        "is for the kernel 'ir' and names no language",
    ),
    "julia.ipynb": (
        of_kernel({"name": "julia-1.9"}, name="julia").encode(),
        "is a notebook in julia ",
    ),
    "bash.ipynb": (
        of_kernel({"name": "bash", "language": "bash"}, name="bash").encode(),
        "in bash ",
    ),
    "sharp.ipynb": (
        of_kernel({"name": ".net-csharp", "language": "C#"}, name="polyglot-notebook").encode(),
        "is a notebook in ",
    ),
    "two.ipynb": (
        of_kernel({"name": "python2"}, name="python", version="2.7.18").encode(),
        "in Python 2;",
    ),
    "r.md": (MYST.format(name="ir", language="R").encode(), r"r\.md is a notebook in R "),
    "prose.md": (
        b"# Title\n\n```bash\nrm -r x\n```\n",
        "is not a notebook, because jupytext's header",
    ),
    "odd.md": (b"---\njupytext: [\n---\n", r"odd\.md "),
    "future.ipynb": (
        notebook(nbformat=5).encode(),
        "is not a notebook of format 4: its format is 5",
    ),
    "latin.ipynb": (notebook().replace("n = 3", "n = 3 # für").encode("latin-1"), "cannot be read"),
    "latin_1.py": (LATIN.replace("latin-1", "utf-8").encode("latin-1"), "cannot be read"),
    "unknown.py": (
        LATIN.replace("latin-1", "klingon").encode(),
        "cannot be read: unknown encoding",
    ),
    "cell.ipynb": (
        notebook(cells=[{**CODE, "cell_type": "markdown"}]).encode(),
        "`parameters` on a markdown cell; keep it on one code cell",
    ),
    "both.ipynb": (
        notebook(cells=[CODE, CODE]).encode(),
        "`parameters` on a code cell and a code cell; keep it on one",
    ),
    "syntax.ipynb": (
        notebook(cells=[{**CODE, "source": "%time\nn = = 3"}]).encode(),
        "is not Python",
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_file_is_read_as_it_is_meant(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(READ[name])
    assert {n: each.default for n, each in declared(path).items()} == {"n": 3}


@pytest.mark.parametrize("name", REFUSED)
def test_another_file_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    content, said = REFUSED[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=said) as refusal:
        declared(path)
    assert len(str(refusal.value).replace(str(tmp_path), "").split()) <= 40


def test_a_kernel_of_another_name_is_told(tmp_path: Path) -> None:
    path = tmp_path / "n.ipynb"
    path.write_text(of_kernel({"name": "myenv", "language": "python"}))
    with pytest.warns(UserWarning, match="the kernel 'myenv'; labkit runs it with its own Python"):
        declared(path)


def test_values_of_an_earlier_run_count_unless_new_ones_are_given(tmp_path: Path) -> None:
    path = tmp_path / "n.ipynb"
    injected = {
        **CODE,
        "metadata": {"tags": ["injected-parameters"]},
        "source": "n = float('inf')\nm = 1",
    }
    cells = [{**CODE, "source": "n = 3.0\nm = 0"}, injected]
    papermill = {"papermill": {"parameters": {"n": "Infinity", "m": 2}}}
    path.write_text(notebook(cells=cells, metadata=papermill))
    assert validate_values(path, {}) == {"n": "Infinity", "m": 1}
    assert validate_values(path, {"m": 5}) == {"m": 5}  # papermill replaces the injected cell


def test_what_papermill_writes_is_read(tmp_path: Path) -> None:
    """Test papermill's own injected cell, with values that JSON can express."""
    import papermill

    path = tmp_path / "n.ipynb"
    path.write_text(notebook(cells=[CODE | {"id": "a", "execution_count": None}]))
    papermill.execute_notebook(
        path, tmp_path / "out.ipynb", {"n": 4}, kernel_name="python3", language="python",
        prepare_only=True, progress_bar=False,
    )  # fmt: skip
    assert nbformat.read(tmp_path / "out.ipynb", 4).cells[1].source == "# Parameters\nn = 4\n"
    assert validate_values(tmp_path / "out.ipynb", {}) == {"n": 4}
