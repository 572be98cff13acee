"""Special files that a stranger puts in place of others: links, pipes, sockets, devices."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

Kind = Callable[[Path, Path], None]


def link(place: Path, original: Path) -> None:
    """Make a link to the same content outside of the folder."""
    place.symlink_to(original)


def dangling(place: Path, original: Path) -> None:
    """Make a link to a missing file, which opening for writing would create."""
    place.symlink_to(original.with_name("made"))


def device(place: Path, original: Path) -> None:
    """Make a link to a device."""
    place.symlink_to("/dev/null")


def pipe(place: Path, original: Path) -> None:
    """Make a pipe, on which a process that opens it would wait."""
    os.mkfifo(place)


def unix_socket(place: Path, original: Path) -> None:
    """A socket."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(place))  # a socket's path has at most 107 bytes


KINDS: dict[str, Kind] = {
    each.__name__: each for each in (link, dangling, device, pipe, unix_socket)
}


def put(kind: Kind, place: Path) -> Path:
    """Put a special file in a place; return where the original file is now, outside the folder."""
    original = Path("outside").resolve() / place.name
    original.parent.mkdir(exist_ok=True)
    place.rename(original)
    kind(place, original)
    return original


def contents(folder: Path) -> dict[str, bytes | str]:
    """Return what is below a folder: contents of files, targets of links, modes of others."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        else:
            found[str(path)] = path.read_bytes() if path.is_file() else oct(path.stat().st_mode)
    return found
