"""Paths, and reading and writing files safely.

Functions that open files without following links, even if other users may write to the folder.

The user chooses the root folder. The root folder itself may be a symbolic link, for example to a
larger disk.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import platformdirs

from labkit.common.errors import LabkitError


def cache_folder(name: str) -> Path:
    """Return a cache folder; its content may be deleted at any time.

    `LABKIT_CACHE` sets the parent folder; the default is the user's cache folder. If the user's
    cache folder is not writable, the cache is in the runtime folder.

    Raises:
        LabkitError: The folder cannot be created.
    """
    if parent := os.environ.get("LABKIT_CACHE"):
        return _usable(Path(parent) / name, "LABKIT_CACHE")
    root = Path(platformdirs.user_cache_dir("labkit", appauthor=False))
    try:
        _usable(root, "LABKIT_CACHE")
    except LabkitError as error:
        # In a container, the home folder may belong to another user, or may be a file.
        root = runtime_folder("cache")
        _warn_once(f"{error}; for now, labkit stores its caches in {root}")
    return _usable(root / name, "LABKIT_CACHE")


def state_folder(name: str) -> Path:
    """Return a private folder for state that must outlast a login session.

    `LABKIT_STATE` sets the parent folder; the default is the user's state folder. If the user's
    state folder is not writable, the state is in the runtime folder.

    Raises:
        LabkitError: The folder is open to other users, is a link, or cannot be created.
    """
    if parent := os.environ.get("LABKIT_STATE"):
        return _private(Path(parent), "LABKIT_STATE", name)
    try:
        return _private(platformdirs.user_state_path(), "LABKIT_STATE", name)
    except LabkitError as error:
        root = runtime_folder(name)
        _warn_once(f"{error}; for now, labkit records its running processes in {root}")
        return root


def runtime_folder(name: str) -> Path:
    """Return a private folder for files that are needed only while a process runs.

    `LABKIT_RUNTIME` sets the parent folder; the default is `XDG_RUNTIME_DIR`, or the temporary
    folder.

    Raises:
        LabkitError: The folder is open to other users, is a link, or cannot be created.
    """
    parent = os.environ.get("LABKIT_RUNTIME")
    login = os.environ.get("XDG_RUNTIME_DIR")
    # Without systemd, the variable XDG_RUNTIME_DIR may name a folder that does not exist.
    login = login if login and os.access(login, os.W_OK | os.X_OK) else None
    return _private(Path(parent or login or tempfile.gettempdir()), "LABKIT_RUNTIME", name)


def peers_folder() -> Path:
    """Return the folder for Python environments of other frameworks; `LABKIT_PEERS` can set it."""
    data = platformdirs.user_data_path("labkit", appauthor=False)
    return Path(os.environ.get("LABKIT_PEERS") or data / "peers").absolute()


# The name of labkit in a package index, where another project has the name `labkit`.
DISTRIBUTION = "labkit-distributed"
_PACKAGE = Path(__file__).parents[1]
# A wheel has the example notebooks inside the package; a checkout has them in other folders.
_EXAMPLES = _PACKAGE / "examples"


def checkout() -> Path | None:
    """Return the folder of labkit's source, or None if labkit was installed from a wheel."""
    return None if _EXAMPLES.is_dir() else _PACKAGE.parent


def example_files() -> dict[str, Path]:
    """Return notebooks and pages for users, by the paths that `labkit examples` gives them."""
    source = checkout()
    notebooks, data = (source / "notebooks", source) if source else (_EXAMPLES, _EXAMPLES)
    names = ("*.ipynb", "*.md", "check.yaml", "conf.py", "guide/**/*.md")
    paths = [path for name in names for path in sorted(notebooks.glob(name))]
    found = {path.relative_to(notebooks).as_posix(): path for path in paths}
    return found | {"DATA.md": data / "data" / "README.md"}


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    # A container or a batch system may restrict the CPU affinity. On macOS, all cores count,
    # because macOS has no CPU affinity.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def bytecode_variables() -> dict[str, str]:
    """Return environment variables that let child processes reuse compiled Python files.

    Containers often set PYTHONDONTWRITEBYTECODE, so that Python writes no compiled files. Without
    compiled files, each engine would compile TensorFlow's Python files again. An engine without
    compiled files would take three times as long to start. With the returned variables, Python
    writes compiled files into labkit's cache, never beside the sources. No variable is returned if
    Python writes bytecode anyway. No variable is returned if a bytecode folder is already set. No
    variable is returned if the installer has compiled labkit's dependencies.
    """
    chosen = sys.pycache_prefix or "PYTHONPYCACHEPREFIX" in os.environ
    if not sys.dont_write_bytecode or chosen or _is_compiled("pydantic"):
        return {}
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache_folder("bytecode"))}


def keep_bytecode() -> None:
    """Set the variables of `bytecode_variables` for child processes that start later."""
    os.environ.update(bytecode_variables())


def repository_folder(folder: Path) -> Path | None:
    """Return the nearest folder that is a git repository, from a folder upwards, or None."""
    return next((place for place in (folder, *folder.parents) if (place / ".git").exists()), None)


def fingerprint() -> str:
    """Return the SHA-256 of labkit's source, which identifies the version in measurements."""
    checksum = hashlib.sha256()
    # The checksum covers the files in sorted order. The order of files in a folder listing may
    # vary.
    for file in sorted(_PACKAGE.rglob("*.py")):
        checksum.update(file.read_bytes())
    return checksum.hexdigest()


def _private(place: Path, variable: str, name: str) -> Path:
    """Return a subfolder of this user's private folder; the private folder is inside `place`.

    Args:
        place: Folder that contains the private folder.
        variable: Name of the environment variable that sets `place`; the error message contains
            this name.
        name: Name of the subfolder in the private folder.
    """
    root = place / f"labkit-{os.getuid()}"
    if not os.path.lexists(root):
        _usable(root, variable)
    # If other users may write to `place`, they could create the private folder first. Another user
    # could also put a link at the private folder's path.
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode):
        wrong = "is a link or a file, not a folder"
    elif status.st_uid != os.getuid():
        wrong = "belongs to another user"
    elif stat.S_IMODE(status.st_mode) & 0o077:
        wrong = (
            f"is accessible to other users (its mode is {stat.S_IMODE(status.st_mode):o}; "
            "only mode 700 is allowed)"
        )
    else:
        return _usable(root / name, variable)
    raise LabkitError(
        f"{root} {wrong}; remove {root}, or set {variable} to a folder that belongs to you"
    )


def _usable(folder: Path, variable: str) -> Path:
    """Return a folder that this process can write to; create the folder if it does not exist.

    Args:
        folder: Path of the folder.
        variable: Name of the environment variable that sets another folder; the error message
            contains this name.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        problem = f"{folder} cannot be used: {error.strerror}"
        raise LabkitError(f"{problem}; set {variable} to a folder that you can write to") from error
    return folder


@cache
def _warn_once(line: str) -> None:
    warnings.warn(line, stacklevel=3)


def _is_compiled(package: str) -> bool:
    spec = find_spec(package)
    # One package is a sufficient sample, because an installer compiles the bytecode of all packages
    # or of none.
    source = spec.origin if spec else None
    return source is not None and Path(cache_from_source(source)).exists()


# With O_PATH, labkit can open a folder whose files the user cannot list. The user needs only the
# permission to enter the folder.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
# Another process may replace the file by a pipe. With O_NONBLOCK, `open` does not wait for the
# other end of a pipe.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
LEVELS = 64  # `check_folder` accepts at most 64 levels (LEVELS) of nested folders.
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
        path: Path of the folder; the folder is the root itself or lies inside the root.
        root: Folder that the user has chosen; if None, `path` itself is the root folder.

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
        root: Folder that the user has chosen; if None, the folder that contains the file.
        mode: Permission bits of the file if it is created.

    Raises:
        UnsafeFile: The path is a link, a pipe, a socket or a device.
        OSError: Any error that `os.open` raises.
    """
    path = Path(path)
    single_link = bool(flags & (os.O_WRONLY | os.O_RDWR))
    with open_folder(path.parent, path.parent if root is None else root) as folder:
        # The type of the file is checked before the file is opened. A call of `open` on a device
        # may have side effects.
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
        last: Number of bytes to return from the end of a file of any size. If `last` is None, the
            whole file is returned, and `limit` is its maximum size.
        root: Folder that the user has chosen, as in `open_file`.

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
    # The temporary file is in the same folder as the final file. A rename is atomic only within one
    # file system.
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
    if error.errno != errno.ENOENT:  # Another process may remove folders while labkit lists them.
        raise error
