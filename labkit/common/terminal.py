"""What commands print on the terminal."""

from __future__ import annotations

import codecs
import locale
import os
import re
import shutil
import sys

# A message may have at most 1,500 characters (LONGEST); most messages have a few hundred.
LONGEST = 1_500


# `_STEERING` matches surrogates and marks that change the text direction. `_STEERING` also matches
# control characters except tab and newline. Surrogates represent bytes of file names that are not
# UTF-8.
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    r"""Return text with escaped control characters: ESC becomes the four characters `\x1b`."""
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Return a text on one line, and replace a long text's middle by "…"."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 300]} … {line[-300:]}"


def text_width(text: str) -> int:
    """Return the number of terminal columns that a text takes; wide letters and emoji take two."""
    if text.isascii():
        return len(text)  # Most texts need no import of rich, which takes as long as a short list.
    from rich.cells import cell_len

    return cell_len(text)


def fit(text: str, width: int) -> str:
    """Return a text that takes `width` terminal columns: filled with spaces, or cut at the end."""
    if text.isascii():
        return text[:width].ljust(width)
    from rich.cells import set_cell_size

    return set_cell_size(text, width)


def status_line(text: str) -> str:
    """Return a text for a line that the next one overwrites, cut to the terminal's width.

    One column stays free, because a full line would wrap. After a wrap, only the last row could be
    erased.
    """
    return fit(plain(text), shutil.get_terminal_size().columns - 1).rstrip()


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
    import click  # Only the command line needs click, so `say` itself imports click.

    click.echo(plain(text), err=err, nl=nl)
