"""One parameter of a form: the widget that fits its type, its help, and its error beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from html import escape
from typing import TYPE_CHECKING

from labkit.jobs.parameters import Parameter, Unknown

if TYPE_CHECKING:
    import ipywidgets

    from labkit.common.canonical_json import JSON


class Field:
    """A parameter's widget, its help and its error.

    Args:
        parameter: as the notebook declares it.
        changed: called after a change.

    Attributes:
        input: takes the value.
        widget: all of it.
    """

    def __init__(self, parameter: Parameter, changed: Callable[[], bool]) -> None:
        import ipywidgets

        self.parameter = parameter
        self.input = _input(parameter)
        # As the widget has it, which may round or reshape what the notebook says.
        self._initial = self.input.value
        self._error = ipywidgets.HTML()
        # Escaped: a comment of the notebook is text, whatever signs it holds.
        help = ipywidgets.HTML(f"<small>{escape(parameter.help)}</small>")
        self.widget = ipywidgets.VBox([ipywidgets.HBox([self.input, help]), self._error])
        self.input.observe(lambda _: changed(), names="value")

    @property
    def given(self) -> bool:
        """Whether it says anything else than the notebook."""
        return bool(self.input.value != self._initial)

    @property
    def error(self) -> str:
        """The line beside it; empty where all is well."""
        return self._text

    @error.setter
    def error(self, text: str) -> None:
        self._text = text
        # Both signs and words: colour alone tells nothing to some.
        self._error.value = f'<span role="alert">⚠ {escape(text)}</span>' if text else ""

    @property
    def value(self) -> JSON | Unknown:
        """What it says, as the declared type; UNKNOWN where the notebook computes it.

        Raises:
            InvalidInput: that is not of the type.
        """
        return self.parameter.convert(self.input.value) if self.given else self.parameter.default

    _text = ""


def _input(parameter: Parameter) -> ipywidgets.DOMWidget:
    """The widget that fits a parameter's type; of any other type text, as on a command line."""
    import ipywidgets

    default, kind = parameter.default, parameter.type.core_schema
    look: dict[str, str | bool | dict[str, str]] = {
        "description": parameter.name,
        "tooltip": parameter.help or parameter.name,
        "style": {"description_width": "12em"},
    }
    if isinstance(default, Unknown):
        return ipywidgets.Text(placeholder="the notebook computes it", **look)
    if kind["type"] == "literal" and default in kind["expected"]:
        return ipywidgets.Dropdown(options=kind["expected"], value=default, **look)
    makers = {
        ("bool", bool): ipywidgets.Checkbox,
        ("int", int): ipywidgets.IntText,
        ("float", float): ipywidgets.FloatText,
        # `rate: float = 1` is a float to the notebook, and an int to Python.
        ("float", int): ipywidgets.FloatText,
    }
    make = makers.get((kind["type"], type(default)))
    if make is not None:
        return make(value=default, **look)
    # A text is checked when it is complete: half a list is an error at each key.
    look |= {"value": _text(default), "continuous_update": False}
    names = _names(parameter.name)
    return ipywidgets.Combobox(options=names, **look) if names else ipywidgets.Text(**look)


def _names(field: str) -> list[str]:
    """What a field of an experiment may be called; offered, not demanded."""
    from labkit.datasets import DATASETS
    from labkit.models import MODELS
    from labkit.network.model import PRESETS
    from labkit.strategies import STRATEGIES
    from labkit.strategies.validation import OPTIMIZERS

    known: dict[str, Iterable[str]] = {
        "model": MODELS,
        "dataset": DATASETS,
        "strategy": STRATEGIES,
        "network": PRESETS,
        "optimizer": OPTIMIZERS,
    }
    return list(known.get(field, ()))


def _text(value: JSON) -> str:
    """A value as a command line gives it."""
    if isinstance(value, str):
        return value
    try:
        return "None" if value is None else json.dumps(value)
    except TypeError:  # a set, or bytes: shown, and left to the notebook
        return repr(value)
