"""One parameter in the form of a notebook: an input widget, a help text and an error line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from html import escape
from typing import TYPE_CHECKING

from labkit.jobs.parameters import NotebookParameter, Unknown

if TYPE_CHECKING:
    import ipywidgets

    from labkit.common.canonical_json import JSON


class Field:
    """The input widget, help text and error line of a parameter.

    Args:
        parameter: Parameter as the notebook declares it.
        changed: Function that is called after each change of the widget's value.

    Attributes:
        input: Widget in which the user changes the parameter.
        widget: Container of all widgets of the field.
    """

    def __init__(self, parameter: NotebookParameter, changed: Callable[[], bool]) -> None:
        import ipywidgets

        self.parameter = parameter
        self.input = _input(parameter)
        # A change is a difference from the widget's initial value, because a widget may reformat
        # the default.
        self._initial = self.input.value
        self._error = ipywidgets.HTML()
        # The help text is escaped, because it is a comment from the notebook and may contain
        # characters of HTML.
        help = ipywidgets.HTML(f"<small>{escape(parameter.help)}</small>")
        self.widget = ipywidgets.VBox([ipywidgets.HBox([self.input, help]), self._error])
        self.input.observe(lambda _: changed(), names="value")

    @property
    def is_changed(self) -> bool:
        """Whether the value differs from the default in the notebook."""
        return bool(self.input.value != self._initial)

    @property
    def error(self) -> str:
        """The error line of the field; empty if the value is valid."""
        return self._text

    @error.setter
    def error(self, text: str) -> None:
        self._text = text
        # The error has a warning sign and words, because some users cannot see colours.
        self._error.value = f'<span role="alert">⚠ {escape(text)}</span>' if text else ""

    @property
    def value(self) -> JSON | Unknown:
        """The value, converted to the declared type; UNKNOWN if only the kernel can compute it.

        Raises:
            InvalidInput: The value does not have the declared type.
        """
        return (
            self.parameter.convert(self.input.value) if self.is_changed else self.parameter.default
        )

    _text = ""


def _input(parameter: NotebookParameter) -> ipywidgets.DOMWidget:
    """Return the input widget for a parameter's type; most types have a text input."""
    import ipywidgets

    default = parameter.default
    look: dict[str, str | bool | dict[str, str]] = {
        "description": parameter.name,
        "tooltip": parameter.help or parameter.name,
        "style": {"description_width": "12em"},
    }
    if isinstance(default, Unknown):
        return ipywidgets.Text(placeholder="computed by the notebook", **look)
    kind = parameter.type.core_schema
    if kind["type"] == "literal" and default in kind["expected"]:
        return ipywidgets.Dropdown(options=kind["expected"], value=default, **look)
    makers = {
        ("bool", bool): ipywidgets.Checkbox,
        ("int", int): ipywidgets.IntText,
        ("float", float): ipywidgets.FloatText,
        # A default may be an int although the declared type is float: `rate: float = 1`.
        ("float", int): ipywidgets.FloatText,
    }
    make = makers.get((kind["type"], type(default)))
    if make is not None:
        return make(value=default, **look)
    # A text is validated only when it is complete, because a partial list would show an error after
    # each key.
    look |= {"value": _text(default), "continuous_update": False}
    names = _names(parameter.name)
    return ipywidgets.Combobox(options=names, **look) if names else ipywidgets.Text(**look)


def _names(field: str) -> list[str]:
    """Return the known names for an Experiment field whose values are names, such as `model`."""
    from labkit.datasets import DATASETS
    from labkit.models import MODELS
    from labkit.network.network import PRESETS
    from labkit.strategies import STRATEGIES
    from labkit.strategies.validation import OPTIMIZERS

    names_of_field: dict[str, Iterable[str]] = {
        "model": MODELS,
        "dataset": DATASETS,
        "strategy": STRATEGIES,
        "network": PRESETS,
        "optimizer": OPTIMIZERS,
    }
    return list(names_of_field.get(field, ()))


def _text(value: JSON) -> str:
    """Return a value as a user would write it on a command line."""
    if isinstance(value, str):
        return value
    try:
        return "None" if value is None else json.dumps(value)
    except TypeError:  # JSON cannot represent sets or bytes, so the text is Python source
        return repr(value)
