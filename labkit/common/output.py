"""Files that commands write: checked before any work, and nothing of anybody else's is replaced."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from labkit.common.errors import InvalidInput

F = TypeVar("F", bound=Callable[..., Any])

_FORCE = "labkit.force"  # in a command's context
_ENDS = 2**16  # bytes at the begin and the end of a file in which its mark stands
# What labkit's own files say of themselves: pages, traces, rows of benchmarks and studies,
# calibrations, what is written for other tools, and tables, by the columns that all have. Each
# pattern passes once over a file: a stranger's must not take minutes.
_MARKS = re.compile(
    rb'<meta name="generator" content="labkit">|"generator": ?"labkit"'
    rb'|^\{[^\n]*"bench": ?"[a-z]+", ?"(?:case|runs)": |^\{"source": ?"[^\n]*"study": ?"'
    rb'|^\{\s*"schema_version": ?\d+,\s*"made": ?"[^"\n]*",\s*"machine": ?\{'
    rb"|^(?:#[^\n]*\n)+# Written by `labkit |^# [^\n]*\n\nMade from the docstrings by `labkit "
    rb"|^(?:[^\n]*,)?run,state,started[,\r\n]",
)
_COLUMNS = (b"run", b"state", b"started")  # of a Parquet table, whose names stand at its end


class OutputFile(click.Path):
    """A file to write, in a folder that exists or can be made.

    One that labkit has not written is replaced only with `--force`, which `output_option` adds.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Check a path.

        Raises:
            InvalidInput: it cannot be written, or is somebody else's.
        """
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if ctx is not None and not ctx.resilient_parsing:
            check_output(path, bool(ctx.meta.get(_FORCE)))
        return path


def output_option(*names: str, **more: Any) -> Callable[[F], F]:
    """Return a click option of an `OutputFile`; the command has `--force` beside it."""

    def decorate(command: F) -> F:
        option = click.option(*names, type=OutputFile(), **more)(command)
        known = [each.name for each in getattr(command, "__click_params__", [])]
        return option if "replace" in known else _FORCE_OPTION(option)

    return decorate


def _note(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[_FORCE] = value


_FORCE_OPTION = click.option(
    "--force",
    "replace",
    is_flag=True,
    is_eager=True,  # read before the files that it is about
    expose_value=False,
    callback=_note,
    help="Replace files that labkit has not written.",
)


def check_output(path: Path, replace: bool = False) -> None:
    """Check that a file can be written, before anything is computed for it.

    Args:
        path: of the file.
        replace: whether it may take the place of what labkit has not written.

    Raises:
        InvalidInput: its folder cannot be made or written, it is no file, or somebody else's.
    """
    try:
        found = path.stat() if os.path.lexists(path) else None
        folder = next((parent for parent in path.absolute().parents if parent.exists()), path)
    except (OSError, ValueError) as error:
        raise _refusal(path, getattr(error, "strerror", None) or str(error)) from error
    if found is None:
        if not folder.is_dir():
            raise _refusal(path, f"{folder.name} is no folder")
        if len(os.fsencode(path.name)) > _longest_name(folder):
            raise _refusal(path, "its name is too long")
    elif not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "no file"
        raise _refusal(path, f"it is {kind}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _refusal(path, f"nothing can be written in {folder}")
    if found is not None and not replace and not _is_own(path, found.st_size):
        raise InvalidInput(
            f"{path} was not written by labkit: name another file, or give --force to replace it"
        )


def _refusal(path: Path, reason: str) -> InvalidInput:
    text = str(path)
    shown = text if len(text) <= 200 else f"…{text[-200:]}"
    return InvalidInput(f"{shown} cannot be written: {reason}; name another file")


def _longest_name(folder: Path) -> int:
    try:
        return os.pathconf(folder, "PC_NAME_MAX")
    except OSError:
        return 255


def _is_own(path: Path, size: int) -> bool:
    """Return whether a file is empty, or says that labkit has written it."""
    try:
        with path.open("rb") as file:
            begin = file.read(_ENDS)
            file.seek(max(len(begin), size - _ENDS))
            content = begin + file.read(_ENDS)
    except OSError:
        return False
    if content.startswith(b"PAR1") and content.endswith(b"PAR1"):
        return all(name in content for name in _COLUMNS)
    return not content or _MARKS.search(content) is not None
