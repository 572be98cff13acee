"""The two kinds of error that labkit raises on purpose, and how they show a value."""

from __future__ import annotations


class LabkitError(Exception):
    """Something the user can act on; the command line prints its message on one line."""


class InvalidInput(LabkitError, ValueError):
    """A value that cannot work, refused before any rank starts; the command line exits with 2."""


def short(value: object) -> str:
    """A value in at most 80 letters, for a sentence."""
    text = " ".join(repr(value).split())
    # An array as an argument would fill the screen.
    return text if len(text) <= 80 else f"{text[:80]}…"
