"""The cache of equivalence check results, one file per result; invalid files are ignored."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import cast, get_args, get_type_hints

from labkit.common.errors import LabkitError
from labkit.common.privacy import scrub
from labkit.records.result import Verdict
from labkit.records.shape import verdict as is_verdict
from labkit.records.store import read_json, write_json

LEAST = {"verdict", "max_abs_difference", "tolerance", "reason"}


def read_verdict(path: Path) -> Verdict | None:
    """Return the cached verdict; None if the file is missing or invalid (this prints a message)."""
    if not os.path.lexists(path):
        return None
    try:
        cached = read_json(path).get("equivalence")
    except LabkitError as error:
        _warn(f"{error}; the check runs again")
        return None
    if not (isinstance(cached, dict) and set(cached) >= LEAST and is_verdict(cached)):
        _warn(f"gates/{path.name} contains no verdict; the check runs again")
        return None
    if cached["verdict"] not in get_args(get_type_hints(Verdict)["verdict"]):
        _warn(f"gates/{path.name} contains an unknown verdict; the check runs again")
        return None
    return cast(Verdict, cached)


def write_verdict(path: Path, verdict: Verdict) -> None:
    """Write a verdict to the cache for later runs; if this fails, print a message."""
    try:
        write_json(path, {"equivalence": verdict})
    except OSError as error:
        _warn(f"gates/{path.name} cannot be written, so the next run checks again: {error}")


def _warn(text: str) -> None:
    print(f"labkit: the cache of the equivalence check: {scrub(text)}", file=sys.stderr, flush=True)
