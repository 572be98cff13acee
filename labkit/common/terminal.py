"""What is said in a terminal: text of records and notebooks steers nothing there."""

from __future__ import annotations

import re

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


def say(text: str, err: bool = False, nl: bool = True) -> None:
    """Write text to stdout, or to stderr, made `plain`."""
    import click  # inside: only the command line speaks

    click.echo(plain(text), err=err, nl=nl)
