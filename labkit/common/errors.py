"""The two kinds of error that labkit raises on purpose, and how they show a value."""

from __future__ import annotations

import errno

# Of a disk that is full, or may only be read.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)

# Of a path that no file can have.
PATH = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


class LabkitError(Exception):
    """Something the user can act on; the command line prints its message on one line."""


class InvalidInput(LabkitError, ValueError):
    """A value that cannot work, refused before any rank starts; the command line exits with 2."""


class Pruned(LabkitError):
    """A search has ended a run early, and with it the notebook: it promises less than others."""


def short(value: object) -> str:
    """A value in at most 80 letters, for a sentence."""
    text = " ".join(repr(value).split())
    # An array as an argument would fill the screen.
    return text if len(text) <= 80 else f"{text[:80]}…"


def cannot_write(path: object, error: OSError) -> LabkitError:
    """What to raise of a file that cannot be written: bad input, unless the disk is to blame."""
    kind = LabkitError if error.errno in DISK else InvalidInput
    return kind(f"{path} cannot be written: {error.strerror}")
