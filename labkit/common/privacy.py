"""Anonymization of text for publication: no absolute path, user name or host name remains."""

from __future__ import annotations

import getpass
import re
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

# This pattern matches an absolute path of two parts or more, but no URL, relative path or closing
# tag. Embedded base64 data are matched first, so that their slashes are not taken for paths.
_PATH = re.compile(
    r"(?P<data>data:[\w/+.-]+;base64,[\w+/=]+)"
    r"|(?<![\w./<~…])(?:/[\w.@+=,~-]+)+/(?P<last>[\w.@+=,~-]*)"
)
_HOME = re.compile(r"(?<![\w.])/(?:home|Users)/[\w.-]+")
_ANSI = re.compile(r"\x1b\[[\d;]*m")
_OPEN = {"root", "localhost"}  # names that identify nobody
_QUOTE = r"""(?:["'`]|\\["']|&(?:quot|apos|\#39|\#x27);)"""
_SET = rf"{_QUOTE}*\s*(?:=>?|:)\s*{_QUOTE}*"
_MODE = r"(?<![\w-])[-dlbcps](?:[r-][w-][xsStT-]){3}[.+@]?\s+\d+\s+"  # a line of `ls -l`
_ANYWHERE = r"(?P<keep>(?<![\w-]))NAME(?![\w-])"
# In these contexts NAME is the name of a user; the text of the group `keep` is preserved.
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
    """Shorten absolute paths to their last part and replace the names of user and host by "…".

    >>> scrub("no file /srv/lab/alice/data/mnist.npz")
    'no file …/mnist.npz'
    """
    text = _ANSI.sub("", text).replace("file://", "")  # colour codes could split paths
    # File names may contain bytes that are not UTF-8.
    text = text.encode(errors="backslashreplace").decode()
    # Known folders are replaced first, because the path pattern misses paths with blanks.
    for place, short in _places():
        text = text.replace(place, short)
    text = _HOME.sub("~", text)
    names = _names()
    text = _PATH.sub(lambda match: match["data"] or f"…/{_last(match['last'], names)}", text)
    for name, places in names.items():
        if name in text:  # a fast test, because notebooks with figures have megabytes of text
            for pattern in places:
                text = pattern.sub(r"\g<keep>…", text)
    return text


def _last(part: str, names: Iterable[str]) -> str:
    """Return the last part of a path, or "…" if this part is a user or host name."""
    return "…" if part in names else part


@lru_cache
def _places() -> list[tuple[str, str]]:
    """Return the known folders and their short forms, the longest first.

    Longer paths are replaced first, because a replaced home folder would hide the path of a project
    folder inside it.
    """
    places = {str(Path(sys.prefix)): "…"}
    with suppress(RuntimeError):  # the user of a container may have no home folder
        places[str(Path.home())] = "~"
    # A short path such as "/" or "/root" also occurs in unrelated text.
    known = [(place, short) for place, short in places.items() if len(place) > 5]
    return sorted(known, key=lambda pair: -len(pair[0]))


@lru_cache
def _names() -> dict[str, list[re.Pattern[str]]]:
    """Return the names of user and host, the longest first, with the patterns that match them.

    The patterns require a context, because a user's name may also be a word, such as the optimizer
    "adam".
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
