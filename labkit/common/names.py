"""Names in text that other programs execute: each fits its format, or is refused in one line."""

from __future__ import annotations

import re
from typing import NamedTuple

from labkit.common.errors import InvalidInput, short


class Format(NamedTuple):
    """What a name may be.

    Attributes:
        what: it is called in an error.
        pattern: of the whole name.
        longest: number of letters.
        allowed: the pattern in words.
    """

    what: str
    pattern: str
    longest: int
    allowed: str

    def check(self, name: object, given: str = "") -> str:
        """Return the name.

        Args:
            name: of whatever type.
            given: the option that it comes from.

        Raises:
            InvalidInput: it does not fit.
        """
        if not isinstance(name, str) or len(name) > self.longest or not self.fits(name):
            raise InvalidInput(
                f"{given and f'{given}: '}{short(name)} is no {self.what}; "
                f"allowed: {self.allowed}, at most {self.longest} letters"
            )
        return name

    def fits(self, name: str) -> bool:
        """Whether the pattern is that of the name."""
        return re.fullmatch(self.pattern, name, re.ASCII) is not None


_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_DOMAIN = r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{1,5})?/"
# No name begins with a dash: as a word of a command it would be an option.
HOST = Format(
    "name or address of a host",
    r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]",
    253,
    "letters, digits, '.', '_' and '-', or [an address of IPv6]",
)
LABEL = Format("name in Kubernetes", _LABEL, 63, "small letters, digits and '-'")
SUBDOMAIN = Format(
    "name in Kubernetes", rf"{_LABEL}(?:\.{_LABEL})*", 253, "small letters, digits, '-' and '.'"
)
KEY = Format(
    "file in a ConfigMap", r"[A-Za-z0-9._-]*[A-Za-z0-9_]", 253, "letters, digits, '-', '_' and '.'"
)
IMAGE = Format(
    "image",
    rf"(?:{_DOMAIN})?{_COMPONENT}(?:/{_COMPONENT})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@[a-z0-9+._-]+:[0-9a-fA-F]{32,})?",
    1024,
    "such as registry.example:5000/team/labkit:1.0",
)
