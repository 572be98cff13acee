"""The page's two scripts, and the policy that lets a browser run these and nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

BODY = '"use strict";var Plotly='
END = "window.Plotly = Plotly;"


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
