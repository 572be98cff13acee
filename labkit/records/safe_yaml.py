"""A YAML reader for untrusted text, which limits length, depth and syntax."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from labkit.common.canonical_json import JSON, NotPlain
from labkit.common.files import read_file

MAX_LENGTH = 100_000  # The YAML text of a long sweep has only thousands of characters.
MAX_DEPTH = 20


def read_plain(text: str) -> JSON:
    """Return the value of a YAML text as plain data.

    Numbers, booleans and null follow YAML 1.2. For example, 1e-3 is a number, but `on`, `1:30` and
    dates are text. YAML anchors are rejected, because a few anchors can expand to very much data. A
    list with an anchor could also contain itself.

    Raises:
        NotPlain: If the text is not YAML, or exceeds a limit of length or depth.
    """
    if len(text) > MAX_LENGTH:
        raise NotPlain(f"has {len(text):,} characters; allowed: at most {MAX_LENGTH:,}")
    try:
        value: JSON = yaml.load(text, Loader=_Plain)
    except yaml.YAMLError as error:
        raise NotPlain(f"is not YAML: {' '.join(str(error).split())}") from error
    # PyYAML raises ValueError or TypeError for some invalid texts. Examples are a number of 5000
    # digits and a list as a key.
    except (ValueError, TypeError) as error:
        raise NotPlain(f"is not plain YAML: {error}") from error
    return value


def read_plain_file(path: Path) -> JSON:
    """Return the value of a YAML file as plain data.

    Raises:
        NotPlain: If the file cannot be read, or if `read_plain` rejects its text.
    """
    try:
        return read_plain(read_file(path, limit=4 * MAX_LENGTH).decode())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise NotPlain(f"cannot be read: {reason}") from error


class _Plain(yaml.SafeLoader):
    """A YAML loader that rejects deep nesting and aliases before it constructs any value."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("anchors (*name) are not allowed; write the value in full")
        if self.depth >= MAX_DEPTH:
            raise yaml.YAMLError(f"more than {MAX_DEPTH} levels of nesting")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Plain.yaml_implicit_resolvers = {}
for _tag, _pattern in {
    # The text None counts as null, because Python users write it.
    "null": r"null|Null|NULL|None|~|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
}.items():
    _Plain.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), None)
# In YAML 1.2, 010 means ten, but PyYAML would read it as octal eight.
_Plain.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
