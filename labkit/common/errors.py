"""The exception classes of labkit, and functions that shorten values and messages for errors."""

from __future__ import annotations

import codecs
import errno
import locale
import os
import re
import sys

LONGEST = 1_500  # maximum characters of a message; most messages have a few hundred
# `_STEERING` matches three groups of characters: control characters except tab and newline, marks
# that change the text direction, and surrogates. Surrogates represent bytes of file names that are
# not UTF-8.
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    r"""Return text with escaped control characters: ESC becomes the four characters `\x1b`."""
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Join the lines of a text into one line, and replace the middle of a very long text by "…"."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 300]} … {line[-300:]}"


def utf8_variables() -> dict[str, str]:
    """Return environment variables that make Python use UTF-8; {} if Python already uses it.

    In a POSIX locale, Python may encode file names, arguments and output as ASCII.
    """
    output = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    encodings = (locale.getpreferredencoding(False), output or "utf-8")
    if {_encoding(encoding) for encoding in encodings} == {"utf-8"}:
        return {}
    return {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}


def _encoding(name: str) -> str:
    try:
        return codecs.lookup(name).name
    except LookupError:
        return name


def restart_in_utf8() -> None:
    """Restart this command with UTF-8 if the locale makes Python encode text as ASCII."""
    if (variables := utf8_variables()) and not sys.flags.ignore_environment:
        os.execve(sys.executable, sys.orig_argv, os.environ | variables)


def say(text: str, err: bool = False, nl: bool = True) -> None:
    """Write text to stdout (with `err`: to stderr), with control characters escaped."""
    import click  # click is imported here because only the command line needs it

    click.echo(plain(text), err=err, nl=nl)


# The error numbers in `DISK` mean that the disk is full or read-only, or that permission is denied.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)

# The error numbers in `PATH` mean that a path is invalid.
PATH = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


_COLOR = re.compile(r"\x1b\[[\d;]*m")
# `_FRAMES` matches traceback frames, the frames' source lines, and TensorFlow's notes on its graph.
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
