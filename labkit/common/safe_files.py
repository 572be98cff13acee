"""File access below a root folder that others may write to, without following symbolic links.

The root is the folder that the user names. The root itself may be a link, for example to a larger
disk.
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

# O_PATH opens a folder that the user may enter but not list.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
# With O_NONBLOCK, `open` does not wait if a pipe has replaced the file in the meantime.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
LEVELS = 64  # maximum depth of nested folders
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
    """Raised for a link, pipe, socket or device where labkit expects a plain file or folder.

    `strerror` describes the problem without the path.
    """

    def __str__(self) -> str:
        # Reports show this text, so it contains only the last two parts of the path.
        path = Path(self.filename)
        return f"{path.parent.name}/{path.name} {self.strerror}"


@contextmanager
def open_folder(path: Path | str, root: Path | str | None = None) -> Iterator[int]:
    """Open a folder and yield its descriptor, for functions that accept `dir_fd`.

    Args:
        path: Path of the folder, at or below the root.
        root: Folder that the user names; None: the folder at `path` itself.

    Raises:
        UnsafeFile: A part of the path below the root is no folder.
        OSError: The folder is missing or belongs to another user.
    """
    path = Path(path)
    root = path if root is None else Path(root)
    if not path.is_relative_to(root) or ".." in (parts := path.relative_to(root).parts):
        raise UnsafeFile(
            errno.EINVAL, "leads out of its folder: give a path inside the folder", str(path)
        )
    descriptor, place = os.open(root, _FOLDER), root
    try:
        for part in parts:
            place /= part
            status = os.stat(part, dir_fd=descriptor, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                raise _refusal(place, status, "a folder")
            inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def open_file(
    path: Path | str, flags: int = os.O_RDONLY, root: Path | str | None = None, mode: int = 0o666
) -> int:
    """Open a regular file like `os.open`; a file to write must not have a second hard link.

    Args:
        path: Path of the file, below the root.
        flags: Flags of `os.open`.
        root: Folder that the user names; None: the folder of the file.
        mode: Permission bits of a new file.

    Raises:
        UnsafeFile: The path is a link, a pipe, a socket or a device.
        OSError: Any error of `os.open`.
    """
    path = Path(path)
    single_link = bool(flags & (os.O_WRONLY | os.O_RDWR))
    with open_folder(path.parent, path.parent if root is None else root) as folder:
        # The file type is checked before the open, because opening a device may have side effects.
        with suppress(FileNotFoundError):
            _require_regular_file(
                path, os.stat(path.name, dir_fd=folder, follow_symlinks=False), single_link
            )
        descriptor = os.open(path.name, (flags & ~os.O_TRUNC) | _FILE, mode, dir_fd=folder)
    try:
        _require_regular_file(path, os.fstat(descriptor), single_link)
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
    """Return all bytes of a regular file, or its last bytes.

    Args:
        path: Path of the file.
        limit: Maximum size in bytes; None: no limit.
        last: Number of bytes to return from the end of the file, without a check of its size; None:
            all bytes.
        root: Root of the path, see `open_file`.

    Raises:
        UnsafeFile: The path is no regular file, or the file is too large.
        OSError: Any error of `os.open`.
    """
    with os.fdopen(open_file(path, root=root), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if last is not None:
            return os.pread(file.fileno(), last, max(0, size - last))
        if limit is not None and size > limit:
            reason = f"has {size:,} bytes; labkit reads at most {limit:,} bytes of such a file"
            raise UnsafeFile(errno.EFBIG, reason, str(path))
        return file.read(size)


def replace_file(path: Path | str, data: bytes, root: Path | str | None = None) -> None:
    """Write a file atomically; a symbolic link is replaced, and its target stays unchanged.

    Raises:
        OSError: The file cannot be written.
    """
    path = Path(path)
    # The temporary file is in the same folder, because renames are atomic only within a file
    # system.
    temporary = f".{path.name[:60]}.{secrets.token_hex(4)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
    with open_folder(path.parent, path.parent if root is None else root) as folder:
        try:
            with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=folder), "wb") as file:
                file.write(data)
                file.flush()
                # Without fsync, a crash of the machine may leave an empty file under the new name.
                os.fsync(file.fileno())
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)


def make_folder(path: Path | str, root: Path | str) -> None:
    """Create a folder below a root, with its parents, if it is missing.

    Raises:
        UnsafeFile: A part of the path is a link or no folder.
    """
    path, root = Path(path), Path(root)
    with suppress(FileExistsError):
        root.mkdir(parents=True)
    places = [path, *path.parents]
    # Each level is created inside an open folder, because `makedirs` could follow a link.
    for place in reversed(places[: places.index(root)] if root in places else []):
        with open_folder(place.parent, root) as folder, suppress(FileExistsError):
            os.mkdir(place.name, dir_fd=folder)
    with open_folder(path, root):
        pass


def check_folder(path: Path | str, root: Path | str | None = None) -> None:
    """Raise an error if a folder contains, at any depth, anything but regular files and folders.

    Code that resumes a run calls this function before it changes a file.

    Raises:
        UnsafeFile: The message names the first link, pipe, socket or device.
    """
    with open_folder(path, root) as folder:
        for place, inside, files, descriptor in os.fwalk(".", onerror=_raise, dir_fd=folder):
            if place.count("/") > LEVELS:
                reason = f"has more than {LEVELS} levels of subfolders: remove the deeper levels"
                raise UnsafeFile(errno.ELOOP, reason, str(path))
            for name in sorted((*inside, *files)):
                try:
                    status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                except FileNotFoundError:  # another process has removed the file after the listing
                    continue
                if stat.S_IFMT(status.st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                    raise _refusal(Path(path) / place / name, status, "a file or folder")


def _require_regular_file(path: Path, status: os.stat_result, single_link: bool) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _refusal(path, status, "a file")
    if single_link and status.st_nlink > 1:
        reason = (
            f"has {status.st_nlink} hard links; labkit writes only to files with a single hard "
            "link: replace the file by a copy"
        )
        raise UnsafeFile(errno.EMLINK, reason, str(path))


def _refusal(path: Path, status: os.stat_result, allowed: str) -> UnsafeFile:
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a file of an unknown type")
    reason = f"is {kind}, not {allowed}: replace it by a copy, or remove it"
    return UnsafeFile(errno.ELOOP, reason, str(path))


def _raise(error: OSError) -> None:
    if error.errno != errno.ENOENT:  # another process may remove a folder during the walk
        raise error
