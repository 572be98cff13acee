"""The two kinds of error that labkit raises on purpose."""

from __future__ import annotations


class LabkitError(Exception):
    """Something the user can act on; the command line prints its message on one line."""


class InvalidInput(LabkitError, ValueError):
    """A value that cannot work, refused before any rank starts; the command line exits with 2."""
