"""Records in few words: what differs from their defaults, and all the rest folded."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from labkit.common.html import card, folded, line, pairs

LONGEST = 200  # letters of a value


def html_of(title: str, record: BaseModel) -> str:
    """The fields that differ from their defaults; folded: all."""
    own = {name: brief(value) for name, value in differing(record).items()}
    every = {name: brief(getattr(record, name)) for name in type(record).model_fields}
    return card(
        title,
        pairs(own) if own else line("every field has its default"),
        folded("all fields", pairs(every)),
    )


def differing(model: BaseModel) -> dict[str, Any]:
    """The fields whose values are not their defaults."""
    found = {}
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        default = field.get_default(call_default_factory=True)
        # Of one type first: arrays compare element by element.
        if type(value) is not type(default) or value != default:
            found[name] = value
    return found


def brief(value: Any) -> str:
    """A value in one line: of a record what differs, of a callable its name, of an array its shape.

    >>> brief({"widths": [64, 64]})
    "{'widths': [64, 64]}"
    """
    text = " ".join(_brief(value).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _brief(value: Any) -> str:
    if isinstance(value, BaseModel):
        fields = ", ".join(f"{name}={_brief(each)}" for name, each in differing(value).items())
        return f"{type(value).__name__}({fields})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_brief(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        inside = ", ".join(map(_brief, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if getattr(value, "shape", ()):
        return f"{'×'.join(map(str, value.shape))} {getattr(value, 'dtype', 'array')}"
    if callable(value):
        return str(getattr(value, "__name__", type(value).__name__))
    return repr(value)
