"""A figure in a notebook that changes: Plotly draws it; until Plotly is there, a picture does."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import anywidget
import ipywidgets
import traitlets

from labkit.figures.kit.panels import Trace
from labkit.figures.kit.picture import picture


class _Source(ipywidgets.Widget):
    """Plotly's script, which the figures of a kernel share; sent to who asks for it.

    As a part of the state it would be sent to each page that is loaded anew before all other
    widgets, which have four seconds there to come up.
    """

    def __init__(self) -> None:
        from plotly.offline import get_plotlyjs

        super().__init__()
        script = get_plotlyjs().encode()
        self.on_msg(lambda *_: self.send({}, buffers=[script]))


class _Plot(anywidget.AnyWidget):
    """What Plotly draws in a browser.

    Attributes:
        figure: data and layout, anew whenever it changes.
        ended: it will not change any more.
        chosen: the key of the run that stands out; the empty one: all alike.
    """

    _esm = Path(__file__).with_name("screen.js")
    _source = traitlets.Unicode().tag(sync=True)
    figure = traitlets.Dict().tag(sync=True)
    ended = traitlets.Bool().tag(sync=True)
    chosen = traitlets.Unicode().tag(sync=True)


class Screen:
    """Shows a figure that changes.

    What stands in needs nothing but the widgets of Jupyter. In each browser it stands until Plotly
    has come up there and has drawn a change: on a busy machine that takes seconds, elsewhere for
    ever.

    Args:
        content: data and layout.
        words: HTML that stands in; without any, a picture does.

    Attributes:
        widget: to be displayed.
        content: what is shown, data and layout.
        plot: what Plotly draws; None before the first change.
    """

    def __init__(self, content: Trace, words: str = "") -> None:
        self._words, self._picture = words, ipywidgets.HTML()
        self._picture.add_class("labkit-picture")
        self.plot: _Plot | None = None
        self.widget = ipywidgets.VBox([self._picture])
        self.widget.add_class("labkit-screen")
        self._put(content)

    def show(self, content: Trace, ended: bool = False) -> None:
        """Show it now."""
        self._put(content)
        if self.plot is None:
            # Not before the picture is there: these are megabytes, which others would wait for.
            self.plot = _Plot(_source=_source().model_id, figure=content, ended=ended)
            self.widget.children = [self._picture, self.plot]
        else:
            self.plot.set_state({"figure": content, "ended": ended})

    def _put(self, content: Trace) -> None:
        self.content, self._picture.value = content, self._words or picture(content)


@cache
def _source() -> _Source:
    return _Source()
