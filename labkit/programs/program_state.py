"""What a play keeps, as text and arrays: state that can be written down, and taken up again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from labkit.common.errors import LabkitError, short
from labkit.common.state import decoding, record
from labkit.programs.reader import Reader
from labkit.programs.writer import Writer

SCHEMA = 1
# Letters of a form. A step of a worker has some 500, so that this is half a million steps; JSON
# of empty lists takes twenty-five times its letters, so that a forged form may cost 7 GB.
LIMIT = 2**28


@record()
@dataclass(frozen=True)
class ProgramState:
    """Objects at one moment: how they hang together, and their arrays, which nobody writes into.

    Attributes:
        form: the objects, with numbers in the place of arrays; JSON of nodes.
        arrays: by that number.
    """

    form: str
    arrays: tuple[np.ndarray, ...]


def keep(thing: Any, outside: Mapping[str, object]) -> ProgramState:
    """An object as it is now; its arrays are not copied, and those that are one stay one.

    Args:
        thing: the object.
        outside: by name, what it refers to and is not a part of it.

    Raises:
        LabkitError: a part of it is no data.
    """
    writer = Writer(outside)
    root = writer.value(thing)
    form = json.dumps({"schema": SCHEMA, "root": root, "nodes": writer.nodes})
    return ProgramState(form, tuple(writer.arrays))


def taken(kept: ProgramState, outside: Mapping[str, object]) -> Any:
    """The object anew.

    Raises:
        LabkitError: the form is no state, or names what no state is made of.
    """
    with decoding("the state in the checkpoint"):
        content = _content(kept.form)
        reader = Reader(kept.arrays, outside)
        for kind, data in content["nodes"]:
            reader.add(kind, data)
        reader.fill()
        return reader.value(content["root"])


def _content(form: str) -> Any:
    if not form.startswith("{"):
        raise LabkitError(
            f"the state in the checkpoint is no JSON of schema {SCHEMA}, which this labkit reads "
            "(earlier ones wrote pickles, which can run code); begin anew"
        )
    if len(form) > LIMIT:
        raise LabkitError(
            f"the state in the checkpoint has {len(form):,} letters; allowed: {LIMIT:,}; begin anew"
        )
    content = json.loads(form)
    if content["schema"] != SCHEMA:
        raise LabkitError(
            f"the state in the checkpoint has schema {short(content['schema'])}, this labkit reads "
            f"{SCHEMA}: resume with the labkit that wrote it"
        )
    return content
