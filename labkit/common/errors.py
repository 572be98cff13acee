"""The exception classes of labkit, and helpers that shorten values and messages for errors."""

from __future__ import annotations

import errno
import re

from labkit.common.terminal import one_line

# Error numbers of a full or read-only disk.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)

# Error numbers of an invalid path.
PATH = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


_COLOR = re.compile(r"\x1b\[[\d;]*m")
# This pattern matches frames of tracebacks, their source lines, and TensorFlow's remarks about its
# graph.
_FRAMES = re.compile(
    r"^[ \t]*File \".*\", line \d+.*\n(?:[ \t]{3,}(?!File \").*\n)*"
    r"|^.*\(most recent call last\):[ \t]*\n|^[ \t]*\[\[.*$"
    r"|^(?:Graph execution error|Detected at).*$"
    r"|<stack traces unavailable>|\[Op:\w+\]|\{\{function_node [^}]*\}\} ?",
    re.MULTILINE,
)


class LabkitError(Exception):
    """An error on which the user can act; the command line prints its message on one line."""


class InvalidInput(LabkitError, ValueError):
    """An invalid value, rejected before any rank starts; the command line exits with code 2."""


class Pruned(LabkitError):
    """Raised when a hyperparameter search stops an unpromising run and its notebook early."""


def short(value: object) -> str:
    """Return the `repr` of a value for an error message, cut to 80 characters."""
    text = " ".join(repr(value).split())
    # The text is cut, because a NumPy array in an error message would fill the screen.
    return text if len(text) <= 80 else f"{text[:80]}…"


def gist(message: str) -> str:
    """Return an error message on one line, without traceback frames and repeated lines.

    >>> gist("Exception encountered when calling Dense.call().\\n\\nshapes differ\\n")
    'Exception encountered when calling Dense.call(). shapes differ'
    """
    lines = _FRAMES.sub("", _COLOR.sub("", message) + "\n").splitlines()
    # TensorFlow repeats a Python exception below the frames of its traceback.
    text = one_line(" ".join(dict.fromkeys(line.strip() for line in lines)))
    return text or one_line(message)


def cannot_write(path: object, error: OSError) -> LabkitError:
    """Return the error to raise when a file cannot be written.

    Returns:
        A LabkitError if the disk is full or read-only; otherwise an InvalidInput.
    """
    error_class = LabkitError if error.errno in DISK else InvalidInput
    return error_class(f"{path} cannot be written: {error.strerror}")
