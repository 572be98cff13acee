"""An experiment: what it asks that others do not, and all the rest folded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from labkit.common.html import card, folded, line, pairs

if TYPE_CHECKING:
    from labkit.experiment import Experiment

LONGEST = 200  # letters of a value


def experiment_html(experiment: Experiment) -> str:
    """The fields that differ from their defaults; folded: all."""
    own = {name: brief(value) for name, value in differing(experiment).items()}
    every = {name: brief(getattr(experiment, name)) for name in type(experiment).model_fields}
    return card(
        f"Experiment {experiment.label}",
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
