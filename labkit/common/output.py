"""Validation of the output paths of commands, which protects files of other programs."""

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

# `_FORCE` is the key under which the context of a click command stores the option --force.
_FORCE = "labkit.force"
# labkit recognizes its own files by a mark. labkit searches the first and last 64 KiB (_ENDS) of a
# file for marks.
_ENDS = 2**16
# The pattern `_MARKS` recognizes files that labkit has written, such as pages, traces, benchmark
# rows, calibrations and tables. Each pattern scans a file only once. The search of another
# program's large file must not take minutes.
_MARKS = re.compile(
    rb'<meta name="generator" content="labkit">|"generator": ?"labkit"'
    rb'|^\{[^\n]*"bench": ?"[a-z]+", ?"(?:case|runs)": |^\{"source": ?"[^\n]*"study": ?"'
    rb'|^\{\s*"schema_version": ?\d+,\s*"made": ?"[^"\n]*",\s*"machine": ?\{'
    rb"|^(?:#[^\n]*\n)+# Written by `labkit |^# [^\n]*\n\nMade from the docstrings by `labkit "
    rb"|^(?:[^\n]*,)?run,state,started[,\r\n]",
)
# A Parquet file with the column names in `_COLUMNS` is a table of labkit.
_COLUMNS = (b"run", b"state", b"started")


class OutputFile(click.Path):
    """A click parameter type for an output file whose folder exists or can be created.

    The option `--force` lets a command replace files that labkit has not written. The function
    `output_option` adds the option `--force` to a command.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path of the output file after validation.

        Raises:
            InvalidInput: The file cannot be written, or another program has written the existing
                file.
        """
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if ctx is not None and not ctx.resilient_parsing:
            check_output(path, bool(ctx.meta.get(_FORCE)))
        return path


def output_option(*names: str, **more: Any) -> Callable[[F], F]:
    """Return a click option of the type `OutputFile`, which also adds `--force` to the command."""

    def decorate(command: F) -> F:
        option = click.option(*names, type=OutputFile(), **more)(command)
        known = [parameter.name for parameter in getattr(command, "__click_params__", [])]
        return option if "replace" in known else _FORCE_OPTION(option)

    return decorate


def _store_force(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[_FORCE] = value


_FORCE_OPTION = click.option(
    "--force",
    "replace",
    is_flag=True,
    # With `is_eager`, click parses --force before paths, because --force affects the validation of
    # paths.
    is_eager=True,
    expose_value=False,
    callback=_store_force,
    help="Replace existing files even if labkit did not write them.",
)


def check_output(path: Path, replace: bool = False) -> None:
    """Raise an error if an output file cannot be written, before any work starts.

    Args:
        path: Path of the file.
        replace: Whether the command may replace a file that another program has written.

    Raises:
        InvalidInput: The folder cannot be created or written. `InvalidInput` is also raised if the
            path is not a regular file. An existing file from another program also raises
            `InvalidInput`.
    """
    try:
        status = path.stat() if os.path.lexists(path) else None
        folder = next((parent for parent in path.absolute().parents if parent.exists()), path)
    except (OSError, ValueError) as error:
        raise _refusal(path, getattr(error, "strerror", None) or str(error)) from error
    if status is None:
        if not folder.is_dir():
            raise _refusal(path, f"{folder.name} is no folder")
        if len(os.fsencode(path.name)) > _longest_name(folder):
            raise _refusal(path, "the file name is too long for this file system")
    elif not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no file"
        raise _refusal(path, f"it is {kind}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _refusal(path, f"you have no permission to write to the folder {folder}")
    if status is not None and not replace and not _is_from_labkit(path, status.st_size):
        raise InvalidInput(
            f"{path} was not written by labkit: give the name of another file, or replace this "
            "file with --force"
        )


def _refusal(path: Path, reason: str) -> InvalidInput:
    text = str(path)
    shown = text if len(text) <= 200 else f"…{text[-200:]}"
    return InvalidInput(f"{shown} cannot be written: {reason}; give the name of another file")


def _longest_name(folder: Path) -> int:
    try:
        return os.pathconf(folder, "PC_NAME_MAX")
    except OSError:
        return 255


def _is_from_labkit(path: Path, size: int) -> bool:
    """Return whether a file is empty, or contains a mark that labkit writes into its files."""
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
