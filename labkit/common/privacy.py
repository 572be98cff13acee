"""Nothing that is written for others names this machine: no absolute path, user or host name."""

from __future__ import annotations

import getpass
import re
import socket
import sys
from collections.abc import Iterable
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
_OPEN = {"root", "localhost"}  # names that tell nothing
_QUOTE = r"""(?:["'`]|\\["']|&(?:quot|apos|\#39|\#x27);)"""
_SET = rf"{_QUOTE}*\s*(?:=>?|:)\s*{_QUOTE}*"
_MODE = r"(?<![\w-])[-dlbcps](?:[r-][w-][xsStT-]){3}[.+@]?\s+\d+\s+"  # of a line of `ls -l`
_ANYWHERE = r"(?P<keep>(?<![\w-]))NAME(?![\w-])"
# Where the name NAME of a user stands as such; what stands before it is kept.
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
    names = _names()
    text = _PATH.sub(lambda match: match["data"] or f"…/{_last(match['last'], names)}", text)
    for name, places in names.items():
        if name in text:  # else the patterns would go through megabytes of figures
            for pattern in places:
                text = pattern.sub(r"\g<keep>…", text)
    return text


def _last(part: str, names: Iterable[str]) -> str:
    """The last part of a path; it may be the folder of a user."""
    return "…" if part in names else part


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
def _names() -> dict[str, list[re.Pattern[str]]]:
    """The names of user and host, longest first, each with the places where it stands as such.

    Elsewhere a name may be a word, such as the optimizer adam or a node.
    """
    host = socket.gethostname()
    places: dict[str, tuple[str, ...]] = dict.fromkeys((host, host.split(".")[0]), _OF_HOST)
    with suppress(OSError, KeyError):  # a container's user may be a number without a name
        user = getpass.getuser()
        places[user] = places.get(user, ()) + _OF_USER
    names = sorted(places.keys() - _OPEN - {""}, key=len, reverse=True)
    return {name: [_compiled(name, way) for way in _ways(name, places[name])] for name in names}


def _ways(name: str, places: tuple[str, ...]) -> tuple[str, ...]:
    is_no_word = "." in name or (len(name) > 5 and any(letter.isdigit() for letter in name))
    return (_ANYWHERE,) if is_no_word else places


def _compiled(name: str, way: str) -> re.Pattern[str]:
    return re.compile(way.replace("NAME", re.escape(name)))
