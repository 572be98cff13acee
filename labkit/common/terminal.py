"""What is said in a terminal: text of records and notebooks steers nothing there."""

from __future__ import annotations

import codecs
import locale
import os
import re
import sys

LONGEST = 1_500  # letters of a message; the names of all that is allowed have some hundreds
# Control characters but tab and newline, C1 too; marks that turn the direction of text; and bytes
# of a file's name that are not UTF-8, as Python has them.
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    r"""Text with its control characters spelled out: ESC becomes the four letters `\x1b`."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Text without line breaks; of a very long one the begin and the end."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 300]} … {line[-300:]}"


def utf8_variables() -> dict[str, str]:
    """Return variables by which Python reads and writes UTF-8; none where it does so already.

    In a POSIX locale it may take files, arguments and output for ASCII.
    """
    output = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    encodings = (locale.getpreferredencoding(False), output or "utf-8")
    if {_encoding(each) for each in encodings} == {"utf-8"}:
        return {}
    return {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}


def _encoding(name: str) -> str:
    try:
        return codecs.lookup(name).name
    except LookupError:
        return name


def restart_in_utf8() -> None:
    """Restart this command in UTF-8 where the locale makes Python encode text as ASCII."""
    if (variables := utf8_variables()) and not sys.flags.ignore_environment:
        os.execve(sys.executable, sys.orig_argv, os.environ | variables)


def say(text: str, err: bool = False, nl: bool = True) -> None:
    """Write text to stdout, or to stderr, made `plain`."""
    import click  # inside: only the command line speaks

    click.echo(plain(text), err=err, nl=nl)
