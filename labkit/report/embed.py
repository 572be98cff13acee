"""What a page shows figures with: a place for each, its words and data, and the scripts that draw.

Data are JSON that cannot get out of its place; a browser may run these scripts and nothing else.
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
from labkit.report.still import picture

BODY = '"use strict";var Plotly='
HIGHEST = 20_000  # pixels
NARROW_AXES = 4  # beside each other on a phone
MOST_WORDS = 6_000  # letters
OFFERS = '<p class="offers"></p>'  # kept free for what the page's script puts there
END = "window.Plotly = Plotly;"
# Of what may be wider than the page; the keyboard moves it, too.
_MOVED = '<div class="scroll" tabindex="0" role="group" aria-label="figure">'


def figure_html(content: Mapping[str, JSON]) -> str:
    """What the page's script finds and draws; content is a Plotly figure's JSON, trusted or not."""
    from labkit.figures.kit.canvas import CONFIG

    given = content.get("layout")
    layout: dict[str, JSON] = given if isinstance(given, dict) else {}
    record: dict[str, JSON] = {
        "data": content.get("data") or [],
        "layout": layout,
        "config": CONFIG,
    }
    if content.get("frames"):
        record["frames"] = content["frames"]
    words = html.escape(scrub(_words(layout)))
    title = html.escape(scrub(_title(layout)))
    # One of labkit's own has words, and looks well on light and dark.
    kind = "figure foreign" if _alt(layout) is None else "figure"
    canvas = f'{_MOVED}<div class="canvas">{_plot(record)}</div></div>'
    return f'<figure class="{kind}" aria-label="{title}">{canvas}{OFFERS}{_caption(words)}</figure>'


def sheet_html(sheet: Sheet) -> str:
    """The panels of a sheet, each with its title and note as text of the page; words below them."""
    from labkit.figures.kit.canvas import CONFIG, alone

    many = len(sheet.shown) > MANY
    parts, empty = [], []
    for panel in (panel for row in sheet.rows for panel in row):
        first, _, rest = panel.title.partition("\n")
        if not panel.traces:
            empty.append(f"{first}: {panel.note}")
            continue
        note = panel.note if panel.always_note else ""
        drawn = {"config": CONFIG} | alone(panel, sheet.plot, sheet.below, many)
        texts = (("h4", first), ('p class="small"', rest))
        head = "".join(f"<{tag}>{_text(text)}</{tag.split()[0]}>" for tag, text in texts if text)
        foot = f'<p class="note">{_text(note)}</p>' if note else ""
        # An axis for each of many parameters has no room on a phone: it is moved below the finger.
        is_wide = len(panel.x_axis.get("tickvals", ())) > NARROW_AXES and not panel.x
        plot = f'<div class="panel{" wide" if is_wide else ""}">{_plot(drawn)}</div>'
        parts.append(f"{_MOVED if is_wide else '<div>'}{head}{plot}{foot}{OFFERS}</div>")
    words = sheet.alt
    if len(words) > MOST_WORDS:  # nobody hears a thousand runs out, and the table has them
        words = f"{words[:MOST_WORDS].rpartition('; ')[0]}; and more, which the table has."
    title, words = _text(sheet.title), _text(words)
    remark = f'<p class="small">{_text(sheet.remark)}</p>' if sheet.remark else ""
    panels = f'<div class="panels">{"".join(parts)}</div>' if parts else ""
    panels += "".join(f'<p class="note">{_text(text)}</p>' for text in empty)
    return f'<figure class="figure" aria-label="{title}">{remark}{panels}{_caption(words)}</figure>'


def data_html(value: JSON, **attributes: str) -> str:
    """Data for the page's script. Inside a script element only "<" can begin its end."""
    text = json.dumps(_scrubbed(value), ensure_ascii=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c")
    named = "".join(f' {name}="{said}"' for name, said in attributes.items())
    return f'<script type="application/json"{named}>{text}</script>'


def _plot(record: Mapping[str, JSON]) -> str:
    layout = record["layout"]
    height = layout.get("height") if isinstance(layout, dict) else None
    # The page keeps the room of a figure free before it is drawn, so that nothing jumps.
    pixels = int(height) if isinstance(height, int | float) and 0 < height < HIGHEST else 450
    # What a browser that runs no scripts shows; the script draws in its place.
    still = picture(record)
    place = f'<div class="plot" style="min-height:{pixels}px">{still}</div>'
    return place + data_html(dict(record), **{"class": "labkit-figure"})


def _caption(words: str) -> str:
    return f"<figcaption><details><summary>In words</summary>{words}</details></figcaption>"


def _text(text: str) -> str:
    return html.escape(scrub(text), quote=False)


def _words(layout: Mapping[str, JSON]) -> str:
    alt = _alt(layout)
    return _title(layout) if alt is None else alt


def _alt(layout: Mapping[str, JSON]) -> str | None:
    meta = layout.get("meta")
    return str(meta["alt"]) if isinstance(meta, dict) and "alt" in meta else None


def _title(layout: Mapping[str, JSON]) -> str:
    """The figure's own title, as text: Plotly's has entities."""
    title = layout.get("title")
    text = title.get("text") if isinstance(title, dict) else title
    return html.unescape(str(text or "a figure without a title"))


def _scrubbed(value: JSON) -> JSON:
    """The figure's texts without this machine's names; its numbers packed, as Plotly reads them.

    A picture that lies on some host is taken out: the page asks nobody for anything.
    """
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not (k == "source" and _is_remote(v))}
        return {k: v if k == "bdata" else _scrubbed(v) for k, v in kept.items()}
    if isinstance(value, np.ndarray):
        if value.dtype == np.float32:
            return {"dtype": "f4", "bdata": base64.b64encode(value.tobytes()).decode()}
        return _scrubbed(value.tolist())
    if isinstance(value, np.generic):
        return _scrubbed(value.item())
    if isinstance(value, list | tuple):
        return [_scrubbed(item) for item in value]
    # JSON has no such numbers, and a browser that meets one reads nothing of the figure.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return scrub(value) if isinstance(value, str) else value


def _is_remote(source: JSON) -> bool:
    return isinstance(source, str) and not source.startswith("data:")


def scripts() -> list[str]:
    """Plotly, and what draws the page's figures with it."""
    from plotly.offline import get_plotlyjs

    own = ("offers.js", "narrow.js", "page.js")
    return [unwrapped(get_plotlyjs()), *(Path(__file__).with_name(n).read_text() for n in own)]


def tables() -> tuple[str, str]:
    """DataTables, as itables ships it for offline pages: a module, which tells the page; styles."""
    from itables import options

    bundle = Path(options.dt_bundle)
    code, _, rest = bundle.read_text().rpartition("export{")
    known = re.match(r"[^}]*?(\w+) as default", rest)
    if known is None:
        raise LabkitError(f"{bundle} is not of the form that itables 2.9 has: install that one")
    told = f'window.DataTable={known[1]};dispatchEvent(new Event("tables"));'
    return code + told, bundle.with_suffix(".css").read_text()


def unwrapped(bundle: str) -> str:
    """Plotly's bundle without the function around it that serves module loaders.

    A browser reads the body of a function twice, first to find its end: of 4.8 MB that takes
    Chromium 0.4 s of the time to the first figure. A bundle of another form stays as it is.
    """
    licence, begun, rest = bundle.partition("*/")
    body, found, _ = rest.rpartition(END)
    start = body.find(BODY)
    if not (begun and found) or start < 0:
        return bundle
    return licence + begun + "\n" + body[start:] + END


def policy(scripts: Sequence[str]) -> str:
    """What a browser may do here: run these scripts and nothing else, load nothing at all."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
