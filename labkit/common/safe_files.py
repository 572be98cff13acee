"""Files below a root that others may write to: no symbolic link below the root is followed.

The root is the folder that the user names; it may itself be a link, such as to a larger disk.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from labkit.common.errors import LabkitError

# O_PATH: a folder that may be entered and not listed will do.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK: a pipe that replaces the file at this very moment makes nobody wait.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
LEVELS = 64  # of folders in each other
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
}


class UnsafeFile(LabkitError, OSError):
    """A link, pipe, socket or device where labkit expects a plain file or folder.

    `strerror` says what is wrong, without the path.
    """

    def __str__(self) -> str:
        # Reports show it: of a path they have only the last parts.
        path = Path(self.filename)
        return f"{path.parent.name}/{path.name} {self.strerror}"


@contextmanager
def open_folder(path: Path | str, root: Path | str | None = None) -> Iterator[int]:
    """Open a folder for functions that take `dir_fd`.

    Args:
        path: of the folder, at or below the root.
        root: the folder that the user names; None: this very folder.

    Raises:
        UnsafeFile: a part of the path below the root is no folder.
        OSError: the folder is missing, or belongs to somebody else.
    """
    path = Path(path)
    root = path if root is None else Path(root)
    if not path.is_relative_to(root) or ".." in (parts := path.relative_to(root).parts):
        raise UnsafeFile(errno.EINVAL, "leads out of its folder: name what lies in it", str(path))
    descriptor, place = os.open(root, _FOLDER), root
    try:
        for part in parts:
            place /= part
            found = os.stat(part, dir_fd=descriptor, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):
                raise _refusal(place, found, "a folder")
            inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def open_file(
    path: Path | str, flags: int = os.O_RDONLY, root: Path | str | None = None, mode: int = 0o666
) -> int:
    """Open a regular file as `os.open` does; what is written has no second name (hard link).

    Args:
        path: of the file, below the root.
        flags: of `os.open`.
        root: the folder that the user names; None: the file's folder.
        mode: of a file that is made.

    Raises:
        UnsafeFile: a link, a pipe, a socket or a device.
        OSError: as of `os.open`.
    """
    path = Path(path)
    alone = bool(flags & (os.O_WRONLY | os.O_RDWR))
    with open_folder(path.parent, path.parent if root is None else root) as folder:
        # Looked at first: to open a device may already act.
        with suppress(FileNotFoundError):
            _check(path, os.stat(path.name, dir_fd=folder, follow_symlinks=False), alone)
        descriptor = os.open(path.name, (flags & ~os.O_TRUNC) | _FILE, mode, dir_fd=folder)
    try:
        _check(path, os.fstat(descriptor), alone)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_file(
    path: Path | str,
    limit: int | None = None,
    last: int | None = None,
    root: Path | str | None = None,
) -> bytes:
    """Return the bytes of a regular file, or its last ones.

    Args:
        path: of the file.
        limit: bytes that it may have.
        last: return so many at its end, however long it is.
        root: as of `open_file`.

    Raises:
        UnsafeFile: no regular file, or a longer one.
        OSError: as of `os.open`.
    """
    with os.fdopen(open_file(path, root=root), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if last is not None:
            return os.pread(file.fileno(), last, max(0, size - last))
        if limit is not None and size > limit:
            told = f"has {size:,} bytes; at most {limit:,} are read here"
            raise UnsafeFile(errno.EFBIG, told, str(path))
        return file.read(size)


def replace_file(path: Path | str, data: bytes, root: Path | str | None = None) -> None:
    """Write a whole file or nothing; a link of that name gives way, its target stays.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(path)
    # In the same folder: only within one file system a rename is atomic.
    temporary = f".{path.name[:60]}.{secrets.token_hex(4)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
    with open_folder(path.parent, path.parent if root is None else root) as folder:
        try:
            with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=folder), "wb") as file:
                file.write(data)
                file.flush()
                # Else a machine that goes down may keep the new name, and not what is in the file.
                os.fsync(file.fileno())
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)


def make_folder(path: Path | str, root: Path | str) -> None:
    """Make a folder below a root, where it is missing.

    Raises:
        UnsafeFile: a link, or what else is no folder, has its name.
    """
    path, root = Path(path), Path(root)
    with suppress(FileExistsError):
        root.mkdir(parents=True)
    places = [path, *path.parents]
    # Part by part, each in the folder that is open: at once, some would be made behind a link.
    for place in reversed(places[: places.index(root)] if root in places else []):
        with open_folder(place.parent, root) as folder, suppress(FileExistsError):
            os.mkdir(place.name, dir_fd=folder)
    with open_folder(path, root):
        pass


def check_folder(path: Path | str, root: Path | str | None = None) -> None:
    """Refuse a folder that holds, at any depth, anything but regular files and folders.

    Whoever continues a run calls this before the first change.

    Raises:
        UnsafeFile: names the first link, pipe, socket or device.
    """
    with open_folder(path, root) as folder:
        for place, inside, files, descriptor in os.fwalk(".", onerror=_raise, dir_fd=folder):
            if place.count("/") > LEVELS:
                told = f"has more than {LEVELS} levels of folders: remove them"
                raise UnsafeFile(errno.ELOOP, told, str(path))
            for name in sorted((*inside, *files)):
                try:
                    found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                except FileNotFoundError:  # removed since it was listed
                    continue
                if stat.S_IFMT(found.st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                    raise _refusal(Path(path) / place / name, found, "a file or folder")


def _check(path: Path, found: os.stat_result, alone: bool) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise _refusal(path, found, "a file")
    if alone and found.st_nlink > 1:
        told = (
            f"has {found.st_nlink} names (hard links); only a file of one name is written: copy it"
        )
        raise UnsafeFile(errno.EMLINK, told, str(path))


def _refusal(path: Path, found: os.stat_result, allowed: str) -> UnsafeFile:
    kind = _KINDS.get(stat.S_IFMT(found.st_mode), "of an unknown kind")
    told = f"is {kind}, not {allowed}: put a copy in its place, or remove it"
    return UnsafeFile(errno.ELOOP, told, str(path))


def _raise(error: OSError) -> None:
    if error.errno != errno.ENOENT:  # a folder that is removed meanwhile holds nothing odd
        raise error
