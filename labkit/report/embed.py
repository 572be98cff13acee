"""What a page shows figures with: a place for each, its words and data, and the scripts that draw.

Data are JSON that cannot get out of its place; a browser may run these scripts and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from labkit.common.content import JSON
from labkit.common.privacy import scrub

BODY = '"use strict";var Plotly='
HIGHEST = 20_000  # pixels
END = "window.Plotly = Plotly;"


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
    # Inside a script element only "<" can begin its end.
    text = json.dumps(_scrubbed(record), ensure_ascii=False).replace("<", "\\u003c")
    words = html.escape(scrub(_words(layout)))
    title = html.escape(scrub(_title(layout)))
    # One of labkit's own has words, and looks well on light and dark.
    kind = "figure foreign" if _alt(layout) is None else "figure"
    height = layout.get("height")
    # The page keeps the room of a figure free before it is drawn, so that nothing jumps.
    pixels = int(height) if isinstance(height, int | float) and 0 < height < HIGHEST else 450
    return (
        f'<figure class="{kind}" aria-label="{title}">'
        f'<div class="plot" style="min-height:{pixels}px"></div>'
        f'<script type="application/json" class="labkit-figure">{text}</script>'
        f"<figcaption><details><summary>In words</summary>{words}</details></figcaption></figure>"
    )


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
    """The figure's texts without this machine's names; its numbers (base64) as they are.

    A picture that lies on some host is taken out: the page asks nobody for anything.
    """
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not (k == "source" and _is_remote(v))}
        return {k: v if k == "bdata" else _scrubbed(v) for k, v in kept.items()}
    if isinstance(value, list):
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

    return [unwrapped(get_plotlyjs()), Path(__file__).with_name("page.js").read_text()]


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
