"""A figure that a notebook updates, with a placeholder until Plotly has drawn the figure."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import anywidget
import ipywidgets
import traitlets

from labkit.figures.kit.panels import Trace
from labkit.figures.kit.still import picture


class _Source(ipywidgets.Widget):
    """A widget that stores Plotly's script, and sends the script to the figures that request it.

    A reloaded page receives the states of widgets before anything else. Plotly's script would make
    the state of a widget too large. The other widgets must appear on the reloaded page within four
    seconds.
    """

    def __init__(self) -> None:
        from plotly.offline import get_plotlyjs

        super().__init__()
        script = get_plotlyjs().encode()
        self.on_msg(lambda *_: self.send({}, buffers=[script]))


class _Plot(anywidget.AnyWidget):
    """A widget in which the browser draws a figure with Plotly.

    Attributes:
        figure: Data and layout of the figure; each change replaces both.
        ended: Whether the figure will not change any more.
        chosen: Key of the run that the user highlights; an empty key highlights no run.
    """

    _esm = Path(__file__).with_name("screen.js")
    _source = traitlets.Unicode().tag(sync=True)
    figure = traitlets.Dict().tag(sync=True)
    ended = traitlets.Bool().tag(sync=True)
    chosen = traitlets.Unicode().tag(sync=True)


class FigureScreen:
    """A display area in a notebook for a figure that changes over time.

    A placeholder (a picture or text) uses only standard Jupyter widgets. Each browser shows the
    placeholder until Plotly is loaded and has drawn a change. Plotly may need seconds for this, or
    may never load.

    Args:
        content: Data and layout of the first figure, as Plotly JSON.
        words: HTML text of the placeholder; default: an SVG picture of the figure.

    Attributes:
        widget: The widget that the notebook displays.
        content: Current data and layout of the figure, as Plotly JSON.
        plot: The widget in which Plotly draws the figure; None before the first change.
    """

    def __init__(self, content: Trace, words: str = "") -> None:
        self._words, self._picture = words, ipywidgets.HTML()
        self._picture.add_class("labkit-picture")
        self.plot: _Plot | None = None
        self.widget = ipywidgets.VBox([self._picture])
        self.widget.add_class("labkit-screen")
        self._set_content(content)

    def show(self, content: Trace, ended: bool = False) -> None:
        """Replace the shown figure by `content`; `ended` marks the last change of the figure."""
        self._set_content(content)
        if self.plot is None:
            # The picture is sent before the plot, because Plotly's script of several megabytes
            # delays later messages.
            self.plot = _Plot(_source=_source().model_id, figure=content, ended=ended)
            self.widget.children = [self._picture, self.plot]
        else:
            self.plot.set_state({"figure": content, "ended": ended})

    def _set_content(self, content: Trace) -> None:
        self.content, self._picture.value = content, self._words or picture(content, True)


@cache
def _source() -> _Source:
    return _Source()
