"""What is said in a terminal: text of records and notebooks steers nothing there."""

from __future__ import annotations

import re

# Control characters but tab and newline, C1 too; and marks that turn the direction of text.
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    r"""Text with its control characters spelled out: ESC becomes the four letters `\x1b`."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(text: str, err: bool = False, nl: bool = True) -> None:
    """Write text to stdout, or to stderr, made `plain`."""
    import click  # inside: only the command line speaks

    click.echo(plain(text), err=err, nl=nl)
