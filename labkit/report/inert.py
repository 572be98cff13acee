"""An executed notebook as inert HTML: text, figures and folded code, but no active content."""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from labkit.common.canonical_json import JSON, LONGEST_TEXT, read_plain_json
from labkit.common.errors import LabkitError
from labkit.common.files import read_file
from labkit.common.privacy import scrub
from labkit.records.executed_notebook import MAX_NOTEBOOK_BYTES, notebook_bytes
from labkit.report.embed import figure_html

if TYPE_CHECKING:
    from nbformat import NotebookNode


IMAGES = ("image/svg+xml", "image/png", "image/jpeg", "image/gif", "image/webp")
_NAME = r"(?P<name>(?:[^()<>\n]|\([^()\n]*\))*)"
_ATTACHMENTS_IMAGE = re.compile(rf"!\[[^\]\n]*\]\(\s*<?attachment:{_NAME}>?[^()\n]*\)")
_TAG = re.compile(r"<img\b[^<>]*\battachment:(?P<name>[^\"'<>\s]*)[^<>]*>")
_PLACE = re.compile(r"^(?P<head> {0,3}\[[^\]\n]+\]:\s*)<?attachment:(?P<name>\S+)", re.MULTILINE)


def embed_images(source: str, attachments: Mapping[str, Any]) -> str:
    """Return Markdown with embedded images, in which a line of text replaces each missing image.

    Args:
        source: Markdown text that refers to images as `attachment:NAME`.
        attachments: Mapping from image names to images, each as a mapping from MIME types to base64
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
    # Longer attachment names are replaced first, because one name may begin another: "a.png" begins
    # "a.png.png".
    for form in sorted(addresses, key=len, reverse=True):
        source = source.replace(f"attachment:{form}", addresses[form])
    source = _ATTACHMENTS_IMAGE.sub(_missing_note, _TAG.sub(_missing_note, source))
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


# `_TAGS` contains the HTML elements that remain after sanitizing: text, tables and foldable
# sections. HTML attributes outside `_ATTRIBUTES` are removed. Ids are forbidden, because the report
# page's script finds its own elements by id.
_TAGS = {
    *("a", "abbr", "b", "blockquote", "br", "caption", "code", "dd", "del", "details", "div", "dl"),
    *("dt", "em", "figcaption", "figure", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "img"),
    *("ins", "kbd", "li", "ol", "p", "pre", "s", "small", "span", "strong", "sub", "summary"),
    *("sup", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "u", "ul"),
}
_ATTRIBUTES = {"class", "title", "alt", "colspan", "rowspan", "scope", "start"}
_PLOTLY = "application/vnd.plotly.v1+json"
_SHOWN = ("text/html", "text/markdown", "image/png", "image/jpeg", "text/plain")

# The template makes code cells and long text outputs of a notebook foldable. The template of
# nbconvert renders all other parts of a notebook.
_TEMPLATE = """
{%- extends 'basic/index.html.j2' -%}
{%- block input_group -%}
{%- if cell.source.strip() -%}
<details class="code"><summary>Code</summary>{{ super() }}</details>
{%- endif -%}
{%- endblock input_group -%}
{%- macro folded(text, shown) -%}
{%- set lines = text.strip().split("\n") -%}
{%- if lines|length > 4 -%}
<details><summary>{{ lines[-1]|strip_ansi|escape }} ({{ lines|length }} lines)</summary>
{{ shown }}</details>
{%- else -%}
{{ shown }}
{%- endif -%}
{%- endmacro -%}
{%- block stream_stdout -%}{{ folded(output.text, super()) }}{%- endblock stream_stdout -%}
{%- block stream_stderr -%}{{ folded(output.text, super()) }}{%- endblock stream_stderr -%}
"""


def render(path: Path, outputs: bool = True, links: bool = False) -> str:
    """Return a notebook as HTML with Plotly figures, which the script of the report page can draw.

    Args:
        path: Executed notebook file.
        outputs: True to show the outputs of cells, and the parameters of the notebook's job.
        links: True to follow symbolic links, which is safe only for a path that the user named.

    Raises:
        LabkitError: If the file is not a notebook or cannot be shown; the error message has one
            line.
    """
    from jinja2 import DictLoader
    from nbconvert import HTMLExporter

    notebook = _read(path, links)
    if not outputs:
        notebook.cells = [
            _without_outputs(cell) for cell in notebook.cells if not _is_job_specific(cell)
        ]
    figures: dict[str, str] = {}
    for cell in notebook.cells:
        _join_streams(cell)
        cell.source = scrub(_truncate(cell.source))
        attachments = cell.pop("attachments", {})
        if cell.cell_type == "markdown":
            cell.source = embed_images(cell.source, attachments)
        for output in cell.get("outputs", []):
            for content in _make_safe(output):
                # The placeholder of a figure is random, so that the notebook's author cannot
                # predict it.
                placeholder = f"figure-{secrets.token_hex(16)}"
                figures[placeholder] = figure_html(content)
                # A placeholder replaces each figure until the HTML is sanitized, because sanitizing
                # would remove the figure's script.
                output["data"] = {"text/html": f"<div>{placeholder}</div>"}
    exporter = HTMLExporter(
        extra_loaders=[DictLoader({"labkit.html.j2": _TEMPLATE})],
        # The list of template folders is empty, because templates in the current folder can run
        # code.
        extra_template_basedirs=[],
        template_file="labkit.html.j2",
        template_name="basic",
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    try:
        text = sanitized(exporter.from_notebook_node(notebook)[0])
    except Exception as error:  # A notebook by another author may cause any error in nbconvert.
        reason = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
        raise LabkitError(f"{path} cannot be shown: {reason}") from error
    for placeholder, figure in figures.items():
        # Figures are inserted after sanitizing, which does not change the placeholders.
        text = text.replace(f"<div>{placeholder}</div>", figure)
    return text


def _is_job_specific(cell: NotebookNode) -> bool:
    """Return True if papermill inserted the cell, with the job's parameters or its error."""
    tags = {"injected-parameters", "papermill-error-cell-tag", "papermill-error-cell"}
    return not tags.isdisjoint(cell.metadata.get("tags", []))


def _without_outputs(cell: NotebookNode) -> NotebookNode:
    if cell.cell_type == "code":
        cell.outputs = []
    return cell


def sanitized(text: str) -> str:
    """Return HTML without scripts, styles, handlers, ids, forms, frames and remote images."""
    import nh3

    clean = nh3.clean(
        text,
        tags=_TAGS,
        attributes={"*": _ATTRIBUTES, "a": {"href"}, "img": {"src"}},
        attribute_filter=_safe_value,
        url_schemes={"http", "https", "mailto", "data"},
    )
    # Images without an address are removed, because `nh3` removes forbidden addresses but keeps
    # the images.
    return re.sub(r"<img(?![^>]* src=)[^>]*>", "", clean)


_ADDRESSES = {
    "href": re.compile(r"(?i)\s*(https?:|mailto:|#)"),
    "src": re.compile(r"data:image/(png|jpeg|gif|webp|svg\+xml);base64,"),
}


def _safe_value(tag: str, name: str, value: str) -> str | None:
    """Return an attribute's value; None for a forbidden address."""
    return value if name not in _ADDRESSES or _ADDRESSES[name].match(value) else None


def _read(path: Path, links: bool) -> NotebookNode:
    import nbformat

    try:
        # By default, symbolic links are not followed. A link in an untrusted job folder may lead to
        # a private file.
        content = notebook_bytes(path) if links else read_file(path, MAX_NOTEBOOK_BYTES)
        # The call of `read_plain_json` rejects JSON that is nested too deeply or is too large.
        read_plain_json(content, strict=False)
        notebook = nbformat.reads(content.decode(), as_version=4)
        # The function `nbformat.reads` only warns about invalid notebooks.
        nbformat.validate(notebook)
        return notebook
    # If a file is not a notebook, nbformat may raise errors of many types.
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise LabkitError(f"{path} is not a notebook that can be read: {lines[0][:200]}") from error


def _make_safe(output: NotebookNode) -> list[dict[str, JSON]]:
    """Reduce an output to content that is safe in a page; return its Plotly figure in a list."""
    if output.output_type == "stream":
        output.text = scrub(_overwritten_text(_truncate(output.text)))
    if output.output_type == "error":
        output.traceback = [scrub(line) for line in output.traceback]
    data = output.get("data")
    if data is None:
        return []
    if isinstance(data.get(_PLOTLY), dict):
        return [data[_PLOTLY]]
    # An SVG image is shown in an image element, where its scripts and links are inactive.
    if "image/svg+xml" in data:
        code = base64.b64encode(data["image/svg+xml"].encode()).decode()
        words = scrub(str(data.get("text/plain", "drawing"))).replace('"', "'")
        data["text/html"] = f'<img src="data:image/svg+xml;base64,{code}" alt="{words}">'
    shown_data = {kind: data[kind] for kind in _SHOWN if kind in data}
    output["data"] = {
        kind: scrub(_truncate(value)) if kind.startswith("text/") else value
        for kind, value in shown_data.items()
    }
    return []


def _join_streams(cell: NotebookNode) -> None:
    """Join the printed outputs of a cell, so that a page shows them as one text box."""
    joined: list[NotebookNode] = []
    for output in cell.get("outputs", []):
        last = joined[-1] if joined else None
        if last is not None and output.output_type == last.output_type == "stream":
            last.text += output.text
        else:
            joined.append(output)
    if "outputs" in cell:
        cell.outputs = joined


def _truncate(text: str) -> str:
    """Return a text, cut to the maximum length with a note that it was cut."""
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]}\n… {LONGEST_TEXT:,} of {len(text):,} characters are shown."


def _overwritten_text(text: str) -> str:
    """Return the text as a terminal shows it, where carriage returns overwrite lines."""
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
