"""Short texts and HTML for pydantic records: only fields with non-default values are shown."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from labkit.common.html import card, folded, line, pairs

MAX_CHARACTERS = 200


def html_of(title: str, record: BaseModel) -> str:
    """Return HTML that shows a record's non-default fields; a click unfolds all fields."""
    changed = {name: brief(value) for name, value in non_default_fields(record).items()}
    fields = {name: brief(getattr(record, name)) for name in type(record).model_fields}
    return card(
        title,
        pairs(changed) if changed else line("every field has its default value"),
        folded("all fields", pairs(fields)),
    )


def non_default_fields(model: BaseModel) -> dict[str, Any]:
    """Return the fields of a record whose values differ from their defaults, by field name."""
    changed = {}
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        default = field.get_default(call_default_factory=True)
        # Types are compared before values, because arrays would be compared element by element.
        if type(value) is not type(default) or value != default:
            changed[name] = value
    return changed


def brief(value: Any) -> str:
    """Return a value as one line of at most `MAX_CHARACTERS` characters.

    A record is shown by its non-default fields. A callable is shown by its name, and an array by
    its shape and dtype.

    >>> brief({"widths": [64, 64]})
    "{'widths': [64, 64]}"
    """
    text = " ".join(_brief(value).split())
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"


def _brief(value: Any) -> str:
    if isinstance(value, BaseModel):
        fields = ", ".join(
            f"{name}={_brief(item)}" for name, item in non_default_fields(value).items()
        )
        return f"{type(value).__name__}({fields})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_brief(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        items = ", ".join(map(_brief, value))
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    if getattr(value, "shape", ()):
        return f"{'×'.join(map(str, value.shape))} {getattr(value, 'dtype', 'array')}"
    if callable(value):
        return str(getattr(value, "__name__", type(value).__name__))
    return repr(value)
