"""A form of a notebook's parameters cell: each parameter a widget, a button that runs it."""

from __future__ import annotations

import os
from pathlib import Path

from labkit.jobs.form.whole import Form

__all__ = ["Form", "form"]


def form(notebook: Path | str, root: Path | str | None = None) -> Form:
    """A form that runs a notebook with other values, as `labkit run` does, beside the kernel.

    Args:
        notebook: path of an .ipynb file, from here or from where `labkit lab` was started.
        root: folder of all runs; default: where `labkit lab` has them, else `runs`.

    Raises:
        InvalidInput: no such notebook, or its parameters cell is not Python.
    """
    everywhere, path = os.environ.get("LABKIT_RUNS"), Path(notebook)
    if everywhere and not path.exists() and (Path(everywhere).parent / path).exists():
        path = Path(everywhere).parent / path
    return Form(path, Path(root or everywhere or "runs"))
