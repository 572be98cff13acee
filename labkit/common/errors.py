"""The exception classes of labkit, and functions that shorten values and messages for errors."""

from __future__ import annotations

import errno
import re

from labkit.common.terminal import one_line

# The error numbers in `DISK` mean that the disk is full or read-only, or that permission is denied.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)

# The error numbers in `PATH` mean that a path is invalid.
PATH = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


_COLOR = re.compile(r"\x1b\[[\d;]*m")
# The pattern `_FRAMES` matches traceback frames, their source lines, and lines that TensorFlow
# prints about its graph.
_FRAMES = re.compile(
    r"^[ \t]*File \".*\", line \d+.*\n(?:[ \t]{3,}(?!File \").*\n)*"
    r"|^.*\(most recent call last\):[ \t]*\n|^[ \t]*\[\[.*$"
    r"|^(?:Graph execution error|Detected at).*$"
    r"|<stack traces unavailable>|\[Op:\w+\]|\{\{function_node [^}]*\}\} ?",
    re.MULTILINE,
)


class LabkitError(Exception):
    """An error that the user can fix; the command line prints its message on one line."""


class InvalidInput(LabkitError, ValueError):
    """Raised for an invalid value, if possible before any rank starts; the exit code is 2."""


class Pruned(LabkitError):
    """Raised when a hyperparameter search ends an unpromising run and its notebook early."""


def short(value: object) -> str:
    """Return the `repr` of a value for an error message, cut to 80 characters."""
    text = " ".join(repr(value).split())
    # The text is cut, because the `repr` of a large NumPy array would fill the screen.
    return text if len(text) <= 80 else f"{text[:80]}…"


def gist(message: str) -> str:
    """Return an error message on one line, without traceback frames and repeated lines.

    >>> gist("Exception encountered when calling Dense.call().\\n\\nshapes differ\\n")
    'Exception encountered when calling Dense.call(). shapes differ'
    """
    lines = _FRAMES.sub("", _COLOR.sub("", message) + "\n").splitlines()
    # Repeated lines are dropped, because TensorFlow prints a Python exception again below its
    # traceback.
    text = one_line(" ".join(dict.fromkeys(line.strip() for line in lines)))
    return text or one_line(message)


def cannot_write(path: object, error: OSError) -> LabkitError:
    """Return the error to raise when a file cannot be written.

    Returns:
        A LabkitError if the disk is full or read-only, or if permission is denied. For all other
        errors, the function returns an InvalidInput.
    """
    error_class = LabkitError if error.errno in DISK else InvalidInput
    return error_class(f"{path} cannot be written: {error.strerror}")
