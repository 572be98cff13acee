"""The files that this process opens, as Python's audit events report them.

Python reports each file that `open` or `os.open` opens, and each imported source file. Libraries
that open files in C or C++ report nothing, for example HDF5 and TensorFlow's file readers.
"""

import os
import sys
from importlib.util import source_from_cache
from stat import S_ISREG

MAX_FILES = 10_000  # A process notes at most `MAX_FILES` files, so that image folders cost little.
_WRITING = os.O_WRONLY | os.O_RDWR

# A `Stamp` is a file's size, and its modification and change times in nanoseconds.
Stamp = tuple[int, int, int]
# `read` maps each file that this process has read to its stamp at that time. The stamp is None if
# the file changed between two readings of a job.
read: dict[str, Stamp | None] = {}
# `written` contains the files that this process has opened for writing, or has renamed a file to.
written: set[str] = set()
_watching: list[tuple[str, ...]] = []


def watch() -> None:
    """Note each file that this process opens from now on; further calls have no effect."""
    if not _watching:
        libraries = (os.path.join(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix))
        system = ("/proc", "/sys", "/dev", "/etc", "/usr")
        _watching.append(tuple(f"{folder}/" for folder in (*libraries, *system)))
        # Python cannot remove an audit hook. The hook returns at once for all events but two.
        sys.addaudithook(_note)


def forget() -> None:
    """Forget all files, because a forked process or a new call on a rank begins."""
    read.clear()
    written.clear()


def stamp(path: str) -> Stamp | None:
    """Return the present stamp of a regular file; None if there is no such file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # The path may contain a NUL character.
        return None
    regular = S_ISREG(status.st_mode)
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns) if regular else None


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open":
        path, mode, flags = arguments
        # A relative path without a mode comes from `os.open`, whose event omits the folder that the
        # path may be relative to.
        if isinstance(path, str) and isinstance(flags, int) and (mode or os.path.isabs(path)):
            _note_open(path, flags)
    elif event == "os.rename" and isinstance(arguments[1], str):
        written.add(os.path.abspath(arguments[1]))


def _note_open(path: str, flags: int) -> None:
    if path.startswith(_watching[0]):
        return
    try:
        path = os.path.abspath(source_from_cache(path) if path.endswith(".pyc") else path)
    except (OSError, ValueError):  # the working folder is gone, or the file is no compiled module
        return
    if flags & _WRITING:
        written.add(path)
        return
    full = len(read) >= MAX_FILES and path not in read
    if not full and not path.startswith(_watching[0]) and (now := stamp(path)) is not None:
        unchanged = read.get(path, now) == now or "LABKIT_JOB" not in os.environ
        read[path] = now if unchanged else None
