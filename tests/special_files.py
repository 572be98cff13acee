"""What a stranger puts in place of a file or folder: links, pipes, sockets, devices."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

Kind = Callable[[Path, Path], None]


def link(place: Path, original: Path) -> None:
    """A link to the same content, outside of the folder."""
    place.symlink_to(original)


def dangling(place: Path, original: Path) -> None:
    """A link to what whoever opens it for writing would make."""
    place.symlink_to(original.with_name("made"))


def device(place: Path, original: Path) -> None:
    """A link to a device."""
    place.symlink_to("/dev/null")


def pipe(place: Path, original: Path) -> None:
    """A pipe, for which whoever opens it waits."""
    os.mkfifo(place)


def unix_socket(place: Path, original: Path) -> None:
    """A socket."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(place))  # its path has at most 107 bytes


KINDS: dict[str, Kind] = {
    each.__name__: each for each in (link, dangling, device, pipe, unix_socket)
}


def put(kind: Kind, place: Path) -> Path:
    """Put a kind of file in a place; where what was there is now, outside of its folder."""
    original = Path("outside").resolve() / place.name
    original.parent.mkdir(exist_ok=True)
    place.rename(original)
    kind(place, original)
    return original


def contents(folder: Path) -> dict[str, bytes | str]:
    """Everything below a folder: what files hold, where links lead, of others their kind."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        else:
            found[str(path)] = path.read_bytes() if path.is_file() else oct(path.stat().st_mode)
    return found
