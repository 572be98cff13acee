"""Small parts of what labkit shows as widgets in JupyterLab."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import ipywidgets


def button(label: str, what: str, icon: str, act: Callable[[], None]) -> ipywidgets.Button:
    """A button that also answers while a cell runs; `what` it does is told beside it.

    JupyterLab sends clicks to a subshell of the kernel, which is a thread of its own. But ipykernel
    passes a message on to where its widget last spoke from, which is the cell that made the
    button, and has to end first; so the button forgets where it spoke from. A front end that
    knows no subshells (JupyterLab before 4.4, some others) delivers the click after the cell.
    """
    made = ipywidgets.Button(description=label, tooltip=what, icon=icon)
    made.layout.width = "auto"
    made.on_click(lambda _: act())
    vars(made.comm).pop("_reply_subshell_id", None)
    return made


def status(text: str) -> str:
    """A line that screen readers say when it changes."""
    return f'<div role="status">{escape(text)}</div>'


def meter(share: float | None, label: str) -> str:
    """A bar that shows how much is done, from 0 to 1; None where nobody knows."""
    value = "" if share is None else f' value="{share:.4f}"'
    return (
        f'<progress max="1"{value} aria-label="{escape(label)}" '
        f'style="width:100%;max-width:40em;height:1em;accent-color:#0072B2"></progress>'
    )
