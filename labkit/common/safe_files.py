"""Functions that open files without following links, even if other users may write to the folder.

A user of labkit chooses the root folder. The root folder itself may be a symbolic link, for example
to a larger disk.
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

# With O_PATH, a folder can be opened even if the user may enter it but not list its files.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
# With O_NONBLOCK, `open` does not wait if another process has replaced the file by a pipe in the
# meantime.
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
    """Raised for a link, pipe, socket or device where labkit expects a regular file or a folder.

    The attribute `strerror` describes the problem without the path.
    """

    def __str__(self) -> str:
        # The error message contains only the last two components of the path, because reports show
        # the message.
        path = Path(self.filename)
        return f"{path.parent.name}/{path.name} {self.strerror}"


@contextmanager
def open_folder(path: Path | str, root: Path | str | None = None) -> Iterator[int]:
    """Open a folder and yield its descriptor, for functions that accept `dir_fd`.

    Args:
        path: Path of the folder, which is the root or inside the root.
        root: Folder that a user of labkit has chosen; None: `path` itself is the root folder.

    Raises:
        UnsafeFile: A component of the path below the root is not a folder.
        OSError: The folder is missing, or the user has no permission to open it.
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
    """Open a regular file like `os.open`; a file opened for writing must have only one hard link.

    Args:
        path: Path of the file, which is inside the root.
        flags: Flags of `os.open`, such as `os.O_RDONLY`.
        root: Folder that a user of labkit has chosen; None: the folder that contains the file.
        mode: Permission bits of the file if it is created.

    Raises:
        UnsafeFile: The path is a link, a pipe, a socket or a device.
        OSError: Any error that `os.open` raises.
    """
    path = Path(path)
    single_link = bool(flags & (os.O_WRONLY | os.O_RDWR))
    with open_folder(path.parent, path.parent if root is None else root) as folder:
        # The type of the file is checked before the file is opened, because opening a device may
        # have side effects.
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
    """Return the content of a regular file, or only its last bytes.

    Args:
        path: Path of the file.
        limit: Maximum size of the file in bytes; None: no limit.
        last: Number of bytes to return from the end of the file; the size of the file is then not
            checked.
            None: return the whole file, which may have at most `limit` bytes.
        root: Folder that a user of labkit has chosen, see `open_file`.

    Raises:
        UnsafeFile: The path is not a regular file, or the file exceeds `limit`.
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
    """Write a file atomically; a symbolic link at `path` is replaced, and its target is unchanged.

    Raises:
        OSError: The file cannot be written.
    """
    path = Path(path)
    # The temporary file is in the same folder as the file, because renaming is atomic only within
    # one file system.
    temporary = f".{path.name[:60]}.{secrets.token_hex(4)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
    with open_folder(path.parent, path.parent if root is None else root) as folder:
        try:
            with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=folder), "wb") as file:
                file.write(data)
                file.flush()
                # Without fsync, a crash of the machine could leave an empty file under the final
                # name.
                os.fsync(file.fileno())
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)


def make_folder(path: Path | str, root: Path | str) -> None:
    """Create a folder below a root, with missing parents; an existing folder is unchanged.

    Raises:
        UnsafeFile: A component of the path is a link, or is not a folder.
    """
    path, root = Path(path), Path(root)
    with suppress(FileExistsError):
        root.mkdir(parents=True)
    places = [path, *path.parents]
    # Each level of folders is created inside the open parent folder, because `makedirs` could
    # follow a link.
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
                except FileNotFoundError:  # another process has removed the file since the listing
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
    if error.errno != errno.ENOENT:  # another process may remove folders during the walk
        raise error
