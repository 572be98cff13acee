"""The two kinds of error that labkit raises on purpose, and how they show a value."""

from __future__ import annotations

import errno
import re

from labkit.common.terminal import one_line

# Of a disk that is full, or may only be read.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)

# Of a path that no file can have.
PATH = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


_COLOR = re.compile(r"\x1b\[[\d;]*m")
# Frames of tracebacks with the lines that they show, and what TensorFlow says of its graph.
_FRAMES = re.compile(
    r"^[ \t]*File \".*\", line \d+.*\n(?:[ \t]{3,}(?!File \").*\n)*"
    r"|^.*\(most recent call last\):[ \t]*\n|^[ \t]*\[\[.*$"
    r"|^(?:Graph execution error|Detected at).*$"
    r"|<stack traces unavailable>|\[Op:\w+\]|\{\{function_node [^}]*\}\} ?",
    re.MULTILINE,
)


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


def gist(message: str) -> str:
    """Return an error's text in one line, from its first word: without frames and repetitions.

    >>> gist("Exception encountered when calling Dense.call().\\n\\nshapes differ\\n")
    'Exception encountered when calling Dense.call(). shapes differ'
    """
    lines = _FRAMES.sub("", _COLOR.sub("", message) + "\n").splitlines()
    # TensorFlow repeats an exception of Python's below its frames.
    told = one_line(" ".join(dict.fromkeys(line.strip() for line in lines)))
    return told or one_line(message)


def cannot_write(path: object, error: OSError) -> LabkitError:
    """What to raise of a file that cannot be written: bad input, unless the disk is to blame."""
    kind = LabkitError if error.errno in DISK else InvalidInput
    return kind(f"{path} cannot be written: {error.strerror}")
