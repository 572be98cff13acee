"""The user's Keras settings (keras.json, KERAS_BACKEND), which labkit passes on to all ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.common.errors import InvalidInput

# The environment variable LABKIT_KERAS passes the caller's Keras settings to the ranks.
CARRIED = "LABKIT_KERAS"
BACKEND = "tensorflow"
DEFAULTS: dict[str, Any] = {
    "floatx": "float32",
    "epsilon": 1e-7,
    "image_data_format": "channels_last",
}


def settings() -> dict[str, Any]:
    """Return the Keras settings of keras.json, or on a rank those of the calling process."""
    text = os.environ.get(CARRIED)
    values = json.loads(text) if text else _file()
    return {name: values.get(name, default) for name, default in DEFAULTS.items()}


def changed() -> dict[str, Any]:
    """Return the Keras settings that differ from Keras's defaults."""
    return {name: value for name, value in settings().items() if value != DEFAULTS[name]}


def carried() -> dict[str, str]:
    """Return the environment variable that sends the Keras settings to ranks on any host."""
    return {CARRIED: json.dumps(settings())}


def backend() -> str:
    """Return the backend that Keras uses in this process."""
    return os.environ.get("KERAS_BACKEND") or str(_file().get("backend", BACKEND))


def refuse_other_backend() -> None:
    """Raise InvalidInput unless the Keras backend of this process is TensorFlow."""
    if (chosen := backend()) != BACKEND:
        raise InvalidInput(
            f"{_named(chosen)}: labkit trains with Keras's TensorFlow backend only; {_ADVICE}"
        )


def notes() -> Iterator[tuple[str, str]]:
    """Yield each setting in the user's keras.json that experiments ignore, with advice."""
    values = changed()
    if (chosen := backend()) != BACKEND:
        yield f"{_named(chosen)}: ranks ignore this setting and compute with TensorFlow", _ADVICE
    if floatx := values.get("floatx"):
        note = f"keras.json: experiments ignore your setting floatx={floatx!r}"
        yield note, f"give precision={floatx!r}"
    if channels := values.get("image_data_format"):
        note = (
            "keras.json: models that are given by name ignore your setting "
            f"image_data_format={channels!r}"
        )
        yield (
            note,
            (
                "in models and data sets that are given by name, the channel axis of images is "
                "the last"
            ),
        )


_ADVICE = f"export KERAS_BACKEND={BACKEND}"


def _named(chosen: str) -> str:
    variable = f"KERAS_BACKEND={chosen}"
    return variable if os.environ.get("KERAS_BACKEND") else f"keras.json: backend={chosen!r}"


def _file() -> dict[str, Any]:
    """Return the content of keras.json, or {} if the file is missing or invalid."""
    folder = Path(os.environ.get("KERAS_HOME", "~/.keras"))
    try:
        values = json.loads((folder.expanduser() / "keras.json").read_text())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: the user has no home folder
        return {}
    return values if isinstance(values, dict) else {}
