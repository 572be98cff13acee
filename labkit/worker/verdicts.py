"""The cache of the equivalence check: verdicts as files, of which an odd one counts as none."""

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
    """The verdict of an earlier check; None where there is none, or an odd file (with one line)."""
    if not os.path.lexists(path):
        return None
    try:
        found = read_json(path).get("equivalence")
    except LabkitError as error:
        _tell(f"{error}; the check runs again")
        return None
    if not (isinstance(found, dict) and set(found) >= LEAST and is_verdict(found)):
        _tell(f"gates/{path.name} holds no verdict; the check runs again")
        return None
    if found["verdict"] not in get_args(get_type_hints(Verdict)["verdict"]):
        _tell(f"gates/{path.name} holds an unknown verdict; the check runs again")
        return None
    return cast(Verdict, found)


def write_verdict(path: Path, verdict: Verdict) -> None:
    """Keep a verdict for runs to come; where that is impossible, say so."""
    try:
        write_json(path, {"equivalence": verdict})
    except OSError as error:
        _tell(f"gates/{path.name} cannot be written, and the next run checks again: {error}")


def _tell(text: str) -> None:
    print(f"labkit: the cache of the equivalence check: {scrub(text)}", file=sys.stderr, flush=True)
