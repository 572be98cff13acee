"""Embedding of images, which were pasted into Markdown cells, as data URLs in the text."""

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


def embed_images(source: str, attachments: Mapping[str, Any]) -> str:
    """Return Markdown with embedded images; each missing image is replaced by a line of text.

    Args:
        source: Markdown text that refers to images as `attachment:NAME`.
        attachments: Images of the cell by name, each as a mapping from MIME types to base64
            content.
    """
    if "attachment:" not in source:
        return source
    addresses = {
        form: address
        for name, bundle in attachments.items()
        if (address := _address(bundle))
        for form in (name, quote(name), quote(name, safe="()!*'"))
    }
    # Longer names are replaced first, because one name may be the beginning of another, as "a.png"
    # of "a.png.png".
    for form in sorted(addresses, key=len, reverse=True):
        source = source.replace(f"attachment:{form}", addresses[form])
    source = _IMAGE.sub(_missing_note, _TAG.sub(_missing_note, source))
    return _PLACE.sub(lambda match: f"{match['head']}#\n\n{_missing_note(match)}\n", source)


def _missing_note(match: re.Match[str]) -> str:
    name = unquote(match["name"]).split('"')[0].strip()[:80]
    return f"*The image {name} is missing from this notebook.*"


def _address(bundle: Any) -> str:
    """Return an image as a `data:` URL, or "" if a page cannot show images of its type."""
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
