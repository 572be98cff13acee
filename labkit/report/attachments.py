"""Images pasted into Markdown cells, as a page shows them: inside the text, from no other place."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

IMAGES = ("image/svg+xml", "image/png", "image/jpeg", "image/gif", "image/webp")
_NAME = r"(?P<name>(?:[^()<>\n]|\([^()\n]*\))*)"
_IMAGE = re.compile(rf"!\[[^\]\n]*\]\(\s*<?attachment:{_NAME}>?[^()\n]*\)")
_TAG = re.compile(r"<img\b[^<>]*\battachment:(?P<name>[^\"'<>\s]*)[^<>]*>")
_PLACE = re.compile(r"^(?P<head> {0,3}\[[^\]\n]+\]:\s*)<?attachment:(?P<name>\S+)", re.MULTILINE)


def attached(source: str, attachments: Mapping[str, Any]) -> str:
    """Return Markdown whose pasted images are part of it; where one is missing, a line says so.

    Args:
        source: Markdown that names images as `attachment:NAME`.
        attachments: of its cell: names, and for each its content in base64 by kind.
    """
    if "attachment:" not in source:
        return source
    addresses = {
        form: address
        for name, bundle in attachments.items()
        if (address := _address(bundle))
        for form in (name, quote(name), quote(name, safe="()!*'"))
    }
    # The longest first: "a.png" is the begin of "a.png.png".
    for form in sorted(addresses, key=len, reverse=True):
        source = source.replace(f"attachment:{form}", addresses[form])
    source = _IMAGE.sub(_absence, _TAG.sub(_absence, source))
    return _PLACE.sub(lambda found: f"{found['head']}#\n\n{_absence(found)}\n", source)


def _absence(found: re.Match[str]) -> str:
    name = unquote(found["name"]).split('"')[0].strip()[:80]
    return f"*The image {name} is missing in this notebook.*"


def _address(bundle: Any) -> str:
    """Return an image as a `data:` address; empty where it is none that a page shows."""
    kinds = [kind for kind in IMAGES if kind in bundle] if isinstance(bundle, Mapping) else []
    if not kinds:
        return ""
    content = bundle[kinds[0]]
    text = "".join("".join(map(str, content if isinstance(content, list) else [content])).split())
    try:
        b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return ""
    return f"data:{kinds[0]};base64,{text}"
