"""The state of programs, encoded as text and arrays so that it can be stored and restored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from labkit.common.errors import LabkitError, short
from labkit.common.state import decoding, record
from labkit.programs.reader import ObjectReader
from labkit.programs.writer import ObjectWriter

SCHEMA = 1
# `LIMIT` is the maximum number of characters of the JSON text of a state. Each training step of a
# worker adds about 500 characters to a state, so the limit is reached after half a million steps.
# JSON of empty lists needs 25 bytes of memory per character, so a malicious text of maximum length
# can use 7 GB.
LIMIT = 2**28


@record()
@dataclass(frozen=True)
class ProgramState:
    """A snapshot of objects: their structure as JSON text, and their arrays, which are read-only.

    Attributes:
        form: JSON nodes that encode the objects; each array is replaced by its index in `arrays`.
        arrays: The arrays, to which the nodes refer by index.
    """

    form: str
    arrays: tuple[np.ndarray, ...]


def keep(value: Any, outside: Mapping[str, object]) -> ProgramState:
    """Return the current state of an object; its arrays are not copied.

    Args:
        value: Object to save.
        outside: Objects, by name, to which the state refers but which it does not contain.

    Raises:
        LabkitError: If a part of the object cannot be stored, for example a function.
    """
    writer = ObjectWriter(outside)
    root = writer.value(value)
    form = json.dumps({"schema": SCHEMA, "root": root, "nodes": writer.nodes})
    return ProgramState(form, tuple(writer.arrays))


def restore_object(state: ProgramState, outside: Mapping[str, object]) -> Any:
    """Return a new object, decoded from a saved state.

    Raises:
        LabkitError: If the text is not a valid state, or names a type that states cannot contain.
    """
    with decoding("the state in the checkpoint"):
        content = _content(state.form)
        reader = ObjectReader(state.arrays, outside)
        for kind, data in content["nodes"]:
            reader.add(kind, data)
        reader.fill()
        return reader.value(content["root"])


def _content(form: str) -> Any:
    if not form.startswith("{"):
        raise LabkitError(
            f"the state in the checkpoint is not JSON of schema {SCHEMA}, which this labkit reads "
            "(earlier versions wrote pickles, which can run code); start without the checkpoint"
        )
    if len(form) > LIMIT:
        raise LabkitError(
            f"the state in the checkpoint has {len(form):,} characters; allowed: {LIMIT:,}; start "
            "without the checkpoint"
        )
    content = json.loads(form)
    if content["schema"] != SCHEMA:
        raise LabkitError(
            f"the state in the checkpoint has schema {short(content['schema'])}, but this labkit "
            f"reads schema {SCHEMA}; resume with the labkit version that wrote it"
        )
    return content
