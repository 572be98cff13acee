"""HTML elements for figures, with data and texts, and the scripts that draw the figures.

The JSON data of a figure are escaped, so that they cannot end their script element. The page's
content security policy allows a browser to run only the scripts that draw figures.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError
from labkit.common.privacy import scrub
from labkit.figures.kit.entries import MANY
from labkit.figures.kit.sheet import Sheet
from labkit.figures.kit.still import picture

BUNDLE_BODY = '"use strict";var Plotly='
MAX_HEIGHT = 20_000  # The page ignores a figure's height of 20,000 pixels or more.
NARROW_AXES = 4  # A phone's screen is wide enough for at most four parallel axes.
MAX_ALT_LENGTH = 6_000
# The page's script adds download buttons to the HTML element with the class `offers`.
OFFERS = '<p class="offers"></p>'
BUNDLE_END = "window.Plotly = Plotly;"
# The HTML element with the class `scroll` contains a figure that may be wider than the page. The
# HTML attribute `tabindex` allows scrolling by keyboard.
_SCROLLABLE = '<div class="scroll" tabindex="0" role="group" aria-label="figure">'


def figure_html(content: Mapping[str, JSON]) -> str:
    """Return the HTML element of a figure, into which a script of the page draws the figure.

    Args:
        content: JSON of a Plotly figure, possibly from an untrusted source.
    """
    from labkit.figures.kit.canvas import CONFIG

    layout_value = content.get("layout")
    layout: dict[str, JSON] = layout_value if isinstance(layout_value, dict) else {}
    record: dict[str, JSON] = {
        "data": content.get("data") or [],
        "layout": layout,
        "config": CONFIG,
    }
    if content.get("frames"):
        record["frames"] = content["frames"]
    words = html.escape(scrub(_description(layout)))
    title = html.escape(scrub(_title(layout)))
    # A figure without alternative text was not made by labkit, and may be unreadable on a dark
    # background.
    kind = "figure foreign" if _alt(layout) is None else "figure"
    canvas = f'{_SCROLLABLE}<div class="canvas">{_plot(record)}</div></div>'
    return f'<figure class="{kind}" aria-label="{title}">{canvas}{OFFERS}{_caption(words)}</figure>'


def sheet_html(sheet: Sheet) -> str:
    """Return the HTML of a sheet with several panels: their titles, notes and alternative text."""
    from labkit.figures.kit.canvas import CONFIG, panel_content

    many = len(sheet.shown) > MANY
    parts, empty = [], []
    for panel in (panel for row in sheet.rows for panel in row):
        first, _, rest = panel.title.partition("\n")
        if not panel.traces:
            empty.append(f"{first}: {panel.note}")
            continue
        note = panel.note if panel.always_note else ""
        drawn = {"config": CONFIG} | panel_content(panel, sheet.plot, sheet.below, many)
        texts = (("h4", first), ('p class="small"', rest))
        head = "".join(f"<{tag}>{_text(text)}</{tag.split()[0]}>" for tag, text in texts if text)
        foot = f'<p class="note">{_text(note)}</p>' if note else ""
        # A panel with many parallel coordinates is too wide for a phone, so it can be scrolled.
        is_wide = len(panel.x_axis.get("tickvals", ())) > NARROW_AXES and not panel.x
        plot = f'<div class="panel{" wide" if is_wide else ""}">{_plot(drawn)}</div>'
        parts.append(f"{_SCROLLABLE if is_wide else '<div>'}{head}{plot}{foot}{OFFERS}</div>")
    words = sheet.alt
    # A very long alternative text is useless in a screen reader, and the table also contains all
    # values.
    if len(words) > MAX_ALT_LENGTH:
        words = f"{words[:MAX_ALT_LENGTH].rpartition('; ')[0]}; the table lists all other runs."
    title, words = _text(sheet.title), _text(words)
    remark = f'<p class="small">{_text(sheet.remark)}</p>' if sheet.remark else ""
    panels = f'<div class="panels">{"".join(parts)}</div>' if parts else ""
    panels += "".join(f'<p class="note">{_text(text)}</p>' for text in empty)
    return f'<figure class="figure" aria-label="{title}">{remark}{panels}{_caption(words)}</figure>'


def data_html(value: JSON, **attributes: str) -> str:
    """Return a script element with JSON; "<" is escaped, so no text ends the element early."""
    text = json.dumps(_scrub(value), ensure_ascii=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c")
    named = "".join(f' {name}="{content}"' for name, content in attributes.items())
    return f'<script type="application/json"{named}>{text}</script>'


def _plot(record: Mapping[str, JSON]) -> str:
    layout = record["layout"]
    height = layout.get("height") if isinstance(layout, dict) else None
    # The page reserves the height of a figure before drawing the figure. The text below the figure
    # therefore does not move.
    pixels = int(height) if isinstance(height, int | float) and 0 < height < MAX_HEIGHT else 450
    # A browser without JavaScript shows a still picture of the figure. With JavaScript, the page's
    # script replaces the still picture by the interactive figure.
    still = picture(record)
    place = f'<div class="plot" style="min-height:{pixels}px">{still}</div>'
    return place + data_html(dict(record), **{"class": "labkit-figure"})


def _caption(words: str) -> str:
    return f"<figcaption><details><summary>In words</summary>{words}</details></figcaption>"


def _text(text: str) -> str:
    return html.escape(scrub(text), quote=False)


def _description(layout: Mapping[str, JSON]) -> str:
    alt = _alt(layout)
    return _title(layout) if alt is None else alt


def _alt(layout: Mapping[str, JSON]) -> str | None:
    meta = layout.get("meta")
    return str(meta["alt"]) if isinstance(meta, dict) and "alt" in meta else None


def _title(layout: Mapping[str, JSON]) -> str:
    """Return the title of a figure as text without HTML entities."""
    title = layout.get("title")
    text = title.get("text") if isinstance(title, dict) else title
    return html.unescape(str(text or "a figure without a title"))


def _scrub(value: JSON) -> JSON:
    """Return a figure's JSON without private names, and with float32 arrays in packed form.

    Remote images are removed, because the page makes no network requests.
    """
    if isinstance(value, dict):
        fields = {k: v for k, v in value.items() if not (k == "source" and _is_remote(v))}
        return {k: v if k == "bdata" else _scrub(v) for k, v in fields.items()}
    if isinstance(value, np.ndarray):
        if value.dtype == np.float32:
            return {"dtype": "f4", "bdata": base64.b64encode(value.tobytes()).decode()}
        return _scrub(value.tolist())
    if isinstance(value, np.generic):
        return _scrub(value.item())
    if isinstance(value, list | tuple):
        return [_scrub(item) for item in value]
    # NaN and infinity are replaced by null, because JSON has neither. A browser would reject a
    # figure with NaN or infinity.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return scrub(value) if isinstance(value, str) else value


def _is_remote(source: JSON) -> bool:
    return isinstance(source, str) and not source.startswith("data:")


def scripts() -> list[str]:
    """Return the scripts that draw figures: Plotly's script, and those of the report page."""
    from plotly.offline import get_plotlyjs

    scripts_ = ("offers.js", "narrow.js", "page.js")
    return [unwrap(get_plotlyjs()), *(Path(__file__).with_name(n).read_text() for n in scripts_)]


def tables() -> tuple[str, str]:
    """Return the script and the style sheet of DataTables; the script signals when it is loaded.

    The script and the styles come from the offline bundle of the package itables.
    """
    from itables import options

    bundle = Path(options.dt_bundle)
    code, _, rest = bundle.read_text().rpartition("export{")
    match = re.match(r"[^}]*?(\w+) as default", rest)
    if match is None:
        raise LabkitError(f"{bundle} has an unknown format; install itables 2.9")
    code_end = f'window.DataTable={match[1]};dispatchEvent(new Event("tables"));'
    return code + code_end, bundle.with_suffix(".css").read_text()


def unwrap(bundle: str) -> str:
    """Return Plotly's script without the enclosing function, which only module loaders need.

    A browser parses the code inside a function twice. For Plotly's 4.8 MB, the second parsing
    delays the first figure by 0.4 s in Chromium. A script in another format is returned unchanged.
    """
    licence, separator, rest = bundle.partition("*/")
    body, end_found, _ = rest.rpartition(BUNDLE_END)
    start = body.find(BUNDLE_BODY)
    if not (separator and end_found) or start < 0:
        return bundle
    return licence + separator + "\n" + body[start:] + BUNDLE_END


def policy(scripts: Sequence[str]) -> str:
    """Return a content security policy that allows only `scripts`, and no network requests."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
