"""Formats of names, such as host names, that labkit inserts into text for other programs."""

from __future__ import annotations

import re
from typing import NamedTuple

from labkit.common.errors import InvalidInput, short


class Format(NamedTuple):
    """The allowed format of names of one type, such as host names.

    Attributes:
        what: Kind of name, for error messages, such as "name or address of a host".
        pattern: Regular expression that matches the whole name.
        longest: Maximum number of characters of a name.
        allowed: Description of the allowed format in words.
    """

    what: str
    pattern: str
    longest: int
    allowed: str

    def validate(self, name: object, text: str = "") -> str:
        """Return the name if it is valid; otherwise raise an error.

        Args:
            name: The value to validate, of any type.
            text: Name of the option that contains the value; the error message contains this name.

        Raises:
            InvalidInput: The value is not a valid name.
        """
        if not isinstance(name, str) or len(name) > self.longest or not self.fits(name):
            raise InvalidInput(
                f"{text and f'{text}: '}{short(name)} is not a valid {self.what}; allowed: "
                f"{self.allowed}, at most {self.longest} characters"
            )
        return name

    def fits(self, name: str) -> bool:
        """Return whether the whole name matches the pattern."""
        return re.fullmatch(self.pattern, name, re.ASCII) is not None


_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_DOMAIN = r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{1,5})?/"
# A name must not begin with a dash, because a command would read the name as an option.
HOST = Format(
    "name or address of a host",
    r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]",
    253,
    "letters, digits, '.', '_' and '-', or [an IPv6 address]",
)
LABEL = Format("name of a Kubernetes object", _LABEL, 63, "lowercase letters, digits and '-'")
SUBDOMAIN = Format(
    "name of a Kubernetes object",
    rf"{_LABEL}(?:\.{_LABEL})*",
    253,
    "lowercase letters, digits, '-' and '.'",
)
KEY = Format(
    "file name in a Kubernetes ConfigMap",
    r"[A-Za-z0-9._-]*[A-Za-z0-9_]",
    253,
    "letters, digits, '-', '_' and '.'",
)
IMAGE = Format(
    "image",
    rf"(?:{_DOMAIN})?{_COMPONENT}(?:/{_COMPONENT})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@[a-z0-9+._-]+:[0-9a-fA-F]{32,})?",
    1024,
    "a container image reference such as registry.example:5000/team/labkit:1.0",
)
