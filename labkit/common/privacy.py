"""Nothing that is written for others names this machine: no absolute path, user or host name."""

from __future__ import annotations

import getpass
import re
import socket
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

# An absolute path of two parts or more; not a URL's, not the "/b/c" of "a/b/c", not a closing tag.
# Embedded data are matched first, so that no slash inside of them is taken for a path.
_PATH = re.compile(
    r"(?P<data>data:[\w/+.-]+;base64,[\w+/=]+)"
    r"|(?<![\w./<~…])(?:/[\w.@+=,~-]+)+/(?P<last>[\w.@+=,~-]*)"
)
_HOME = re.compile(r"(?<![\w.])/(?:home|Users)/[\w.-]+")
_ANSI = re.compile(r"\x1b\[[\d;]*m")
_TOO_COMMON = {"root", "user", "localhost", "runner", "home", "main", "worker", "model", "data"}


def scrub(text: str) -> str:
    """Shorten absolute paths to their last part and take out the names of user and host.

    >>> scrub("no file /srv/lab/alice/data/mnist.npz")
    'no file …/mnist.npz'
    """
    text = _ANSI.sub("", text).replace("file://", "")  # colours split paths
    # Names of files may have bytes that no page can write.
    text = text.encode(errors="backslashreplace").decode()
    # Before the pattern: a home with a blank in its name is no path to the pattern.
    for place, short in _places():
        text = text.replace(place, short)
    text = _HOME.sub("~", text)
    text = _PATH.sub(lambda match: match["data"] or f"…/{match['last']}", text)
    names = _names()
    return names.sub("…", text) if names else text


@lru_cache
def _places() -> list[tuple[str, str]]:
    """Folders whose place is known, longest first, so that a home does not hide a project in it."""
    places = {str(Path(sys.prefix)): "…"}
    with suppress(RuntimeError):  # a container's user may have no home
        places[str(Path.home())] = "~"
    # A short one, such as "/" or "/root", stands in many a text that means something else.
    known = [(place, short) for place, short in places.items() if len(place) > 5]
    return sorted(known, key=lambda pair: -len(pair[0]))


@lru_cache
def _names() -> re.Pattern[str] | None:
    """Matches the user's and the host's name as whole words, unless they are everyday words."""
    names = {socket.gethostname(), socket.gethostname().split(".")[0]}
    with suppress(OSError, KeyError):  # a container's user may be a number without a name
        names.add(getpass.getuser())
    # Short and everyday names would take words out of sentences.
    telling = [name for name in names if len(name) > 2 and name.lower() not in _TOO_COMMON]
    if not telling:
        return None
    words = "|".join(re.escape(name) for name in sorted(telling, key=len, reverse=True))
    return re.compile(rf"(?<![\w-])(?:{words})(?![\w-])")
