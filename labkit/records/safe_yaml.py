"""YAML of people and of records, read as plain data: bounded in length, depth and meaning."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from labkit.common.canonical_json import JSON
from labkit.common.safe_files import read_file
from labkit.common.safe_json import NotPlain

LONGEST = 100_000  # letters; the longest parameters of a sweep have some thousands
DEEPEST = 20  # brackets in each other


def read_plain(text: str) -> JSON:
    """Return the value of a text.

    Numbers, booleans and null are those of YAML 1.2: 1e-3 is a number, but `on`, `1:30` and dates
    are text. Anchors are refused: a few lines of them can stand for more than any memory holds, or
    for a list that holds itself.

    Raises:
        NotPlain: it is not YAML, or longer, deeper or less plain than data of ours.
    """
    if len(text) > LONGEST:
        raise NotPlain(f"has {len(text):,} letters; allowed are {LONGEST:,}")
    try:
        value: JSON = yaml.load(text, Loader=_Plain)
    except yaml.YAMLError as error:
        raise NotPlain(f"is not YAML: {' '.join(str(error).split())}") from error
    except (ValueError, TypeError) as error:  # 2000 digits, or a list as a key
        raise NotPlain(f"is not plain YAML: {error}") from error
    return value


def read_plain_file(path: Path) -> JSON:
    """Return the value of a file.

    Raises:
        NotPlain: it cannot be read, or as `read_plain` says.
    """
    try:
        return read_plain(read_file(path, limit=4 * LONGEST).decode())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise NotPlain(f"cannot be read: {reason}") from error


class _Plain(yaml.SafeLoader):
    """Refuses what is deep or refers to itself before it builds anything."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("anchors (*name) are not allowed; write the value out")
        if self.depth >= DEEPEST:
            raise yaml.YAMLError(f"more than {DEEPEST} brackets in each other")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Plain.yaml_implicit_resolvers = {}
for _tag, _pattern in {
    "null": r"null|Null|NULL|None|~|",  # None: what Python users write
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][0-9]*)",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
}.items():
    _Plain.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), None)
