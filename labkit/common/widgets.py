"""Widgets of a notebook that change while a cell runs."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import ipywidgets


def button(label: str, tooltip: str, icon: str, act: Callable[[], None]) -> ipywidgets.Button:
    """Return a button that reacts to clicks even while a notebook cell is running.

    JupyterLab sends clicks to a subshell of the kernel, which has its own thread. However,
    ipykernel sends a click to the shell that last used the button. The shell that last used a new
    button is the running cell's shell. `button` removes the new button's reference to the busy
    shell, so that a subshell receives the click. Some front ends have no subshells, such as
    JupyterLab before 4.4. Without subshells, a click takes effect only after the cell has ended.
    """
    widget = ipywidgets.Button(description=label, tooltip=tooltip, icon=icon)
    widget.layout.width = "auto"
    widget.on_click(lambda _: act())
    vars(widget.comm).pop("_reply_subshell_id", None)
    return widget


def status(text: str) -> str:
    """Return HTML of a status line, which screen readers announce when its text changes."""
    return f'<div role="status">{escape(text)}</div>'


def meter(share: float | None, label: str) -> str:
    """Return HTML of a progress bar; `share` is between 0 and 1, or None if it is unknown."""
    value = "" if share is None else f' value="{share:.4f}"'
    return (
        f'<progress max="1"{value} aria-label="{escape(label)}" '
        f'style="width:100%;max-width:40em;height:1em;accent-color:#0072B2"></progress>'
    )
