"""What the user has set for Keras (keras.json, KERAS_BACKEND): alike on all ranks, or named."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.common.errors import InvalidInput

CARRIED = "LABKIT_KERAS"  # a variable of ranks: the settings of the caller
BACKEND = "tensorflow"
DEFAULTS: dict[str, Any] = {
    "floatx": "float32",
    "epsilon": 1e-7,
    "image_data_format": "channels_last",
}


def settings() -> dict[str, Any]:
    """The caller's settings on a rank, else those of keras.json."""
    carried = os.environ.get(CARRIED)
    found = json.loads(carried) if carried else _file()
    return {name: found.get(name, default) for name, default in DEFAULTS.items()}


def changed() -> dict[str, Any]:
    """Those settings that differ from Keras's own defaults."""
    return {name: value for name, value in settings().items() if value != DEFAULTS[name]}


def carried() -> dict[str, str]:
    """The variable by which settings travel to ranks, whose own keras.json may be another one."""
    return {CARRIED: json.dumps(settings())}


def backend() -> str:
    """The backend that Keras takes in this process, by its own rules."""
    return os.environ.get("KERAS_BACKEND") or str(_file().get("backend", BACKEND))


def refuse_other_backend() -> None:
    """Raise InvalidInput unless Keras computes with TensorFlow here."""
    if (chosen := backend()) != BACKEND:
        raise InvalidInput(f"{_named(chosen)}: labkit trains with TensorFlow; {_ADVICE}")


def notes() -> Iterator[tuple[str, str]]:
    """Yield what holds otherwise in runs than the user has set it, and what to do."""
    found = changed()
    if (chosen := backend()) != BACKEND:
        yield f"{_named(chosen)}: ranks compute with TensorFlow all the same", _ADVICE
    if floatx := found.get("floatx"):
        told = f"keras.json: floatx={floatx!r} does not hold in experiments"
        yield told, f"give precision={floatx!r}"
    if channels := found.get("image_data_format"):
        told = f"keras.json: image_data_format={channels!r} does not hold for named models"
        yield told, "their channels are last, and so are those of named data sets"


_ADVICE = f"export KERAS_BACKEND={BACKEND}"


def _named(chosen: str) -> str:
    told = f"KERAS_BACKEND={chosen}"
    return told if os.environ.get("KERAS_BACKEND") else f"keras.json: backend={chosen!r}"


def _file() -> dict[str, Any]:
    """What keras.json says; nothing where Keras cannot read it either."""
    folder = Path(os.environ.get("KERAS_HOME", "~/.keras"))
    try:
        found = json.loads((folder.expanduser() / "keras.json").read_text())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a user without a home
        return {}
    return found if isinstance(found, dict) else {}
