"""Anonymization of text for publication: absolute paths, user names and host names are removed."""

from __future__ import annotations

import getpass
import re
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

# `_PATH` matches an absolute path with at least two components, but no URL, relative path or
# closing tag. `_PATH` matches embedded base64 data before it matches paths. Slashes in base64 data
# therefore do not count as parts of paths.
_PATH = re.compile(
    r"(?P<data>data:[\w/+.-]+;base64,[\w+/=]+)"
    r"|(?<![\w./<~…])(?:/[\w.@+=,~-]+)+/(?P<last>[\w.@+=,~-]*)"
)
_HOME = re.compile(r"(?<![\w.])/(?:home|Users)/[\w.-]+")
_ANSI = re.compile(r"\x1b\[[\d;]*m")
_OPEN = {"root", "localhost"}  # The user and host names in `_OPEN` identify nobody.
_QUOTE = r"""(?:["'`]|\\["']|&(?:quot|apos|\#39|\#x27);)"""
_SET = rf"{_QUOTE}*\s*(?:=>?|:)\s*{_QUOTE}*"
# `_MODE` matches the start of a line that `ls -l` prints.
_MODE = r"(?<![\w-])[-dlbcps](?:[r-][w-][xsStT-]){3}[.+@]?\s+\d+\s+"
_ANYWHERE = r"(?P<keep>(?<![\w-]))NAME(?![\w-])"
# In each pattern of `_OF_USER`, the placeholder NAME stands for a user name. `scrub` does not
# replace the text that matches the group `keep` of a pattern.
_OF_USER = (
    r"(?P<keep>(?<![\w-]))NAME(?=@[A-Za-z…])",
    r"(?P<keep>~)NAME(?![\w-])",
    r"(?P<keep>(?<![A-Za-z])(?:home|homes|[Uu]sers)[/\\]+)NAME(?![\w-])",
    rf"(?P<keep>(?i:user|user_?name|log_?name|login|owner)\d?{_SET})NAME(?![\w-])",
    rf"(?P<keep>(?i:user|login|owner)(?: name)? {_QUOTE})NAME(?={_QUOTE})",
    r"(?P<keep>\b[ug]id=\d+\()NAME(?=\))",
    rf"(?P<keep>{_MODE})NAME(?=\s)",
    rf"(?P<keep>{_MODE}\S+\s+)NAME(?=\s)",
    r"(?P<keep>(?m:^))NAME(?=\s+\d+\s.*\s(?:\?|pts/\d+|tty\w*)\s)",  # of `ps`
)
_OF_HOST = (
    r"(?P<keep>[\w…]@)NAME(?![\w-])",
    r"(?P<keep>://(?:[^\s/@]*@)?)NAME(?![\w-])",
    rf"(?P<keep>(?i:host|host_?name|node_?name|machine){_SET})NAME(?![\w-])",
    rf"(?P<keep>(?i:host|host ?name|machine) {_QUOTE})NAME(?={_QUOTE})",
)


def scrub(text: str) -> str:
    """Shorten absolute paths to their last component, and replace user and host names by "…".

    >>> scrub("no file /srv/lab/alice/data/mnist.npz")
    'no file …/mnist.npz'
    """
    # `scrub` removes colour codes of terminals. A colour code could cut a path into two parts.
    text = _ANSI.sub("", text).replace("file://", "")
    # `scrub` re-encodes the text, because file names may contain bytes that are not UTF-8.
    text = text.encode(errors="backslashreplace").decode()
    # `scrub` replaces known folders before other paths, because the pattern `_PATH` misses paths
    # with blanks.
    for place, short in _places():
        text = text.replace(place, short)
    text = _HOME.sub("~", text)
    names = _names()
    text = _PATH.sub(lambda match: match["data"] or f"…/{_last(match['last'], names)}", text)
    for name, places in names.items():
        # A regular expression is slow on megabytes of text. `scrub` therefore first tests whether
        # the text contains the user or host name.
        if name in text:
            for pattern in places:
                text = pattern.sub(r"\g<keep>…", text)
    return text


def _last(part: str, names: Iterable[str]) -> str:
    """Return the last component of a path, or "…" if this component is a user or host name."""
    return "…" if part in names else part


@lru_cache
def _places() -> list[tuple[str, str]]:
    """Return pairs of a known folder, such as the home folder, and its short form, longest first.

    Longer paths are replaced first. A Python environment may be inside the home folder. If the home
    folder were replaced first, the environment's path would no longer match.
    """
    places = {str(Path(sys.prefix)): "…"}
    with suppress(RuntimeError):  # the user of a container may have no home folder
        places[str(Path.home())] = "~"
    # Short paths such as "/" or "/root" are not replaced, because they also occur in unrelated
    # text.
    known = [(place, short) for place, short in places.items() if len(place) > 5]
    return sorted(known, key=lambda pair: -len(pair[0]))


@lru_cache
def _names() -> dict[str, list[re.Pattern[str]]]:
    """Return the user and host names, with patterns that find each name.

    A user name may also be an ordinary word, such as the optimizer "adam". The patterns find a user
    name only in contexts such as `/home/NAME`.
    """
    host = socket.gethostname()
    places: dict[str, tuple[str, ...]] = dict.fromkeys((host, host.split(".")[0]), _OF_HOST)
    with suppress(OSError, KeyError):  # the user of a container may have no name
        user = getpass.getuser()
        places[user] = places.get(user, ()) + _OF_USER
    names = sorted(places.keys() - _OPEN - {""}, key=len, reverse=True)
    return {
        name: [_compile_pattern(name, pattern) for pattern in _patterns(name, places[name])]
        for name in names
    }


def _patterns(name: str, places: tuple[str, ...]) -> tuple[str, ...]:
    is_no_word = "." in name or (len(name) > 5 and any(letter.isdigit() for letter in name))
    return (_ANYWHERE,) if is_no_word else places


def _compile_pattern(name: str, pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("NAME", re.escape(name)))
