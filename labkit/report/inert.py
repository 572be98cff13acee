"""An executed notebook as inert HTML: text and figures shown, code folded, nothing trusted."""

from __future__ import annotations

import base64
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError
from labkit.common.privacy import scrub
from labkit.common.safe_files import read_file
from labkit.common.safe_json import LONGEST_TEXT, read_plain_json
from labkit.records.notebook import LONGEST_NOTEBOOK, notebook_bytes
from labkit.report.attachments import attached
from labkit.report.embed import figure_html

if TYPE_CHECKING:
    from nbformat import NotebookNode

# Beyond text: what tables and folded parts need. No ids: a page's script finds elements by them.
_TAGS = {
    *("a", "abbr", "b", "blockquote", "br", "caption", "code", "dd", "del", "details", "div", "dl"),
    *("dt", "em", "figcaption", "figure", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "img"),
    *("ins", "kbd", "li", "ol", "p", "pre", "s", "small", "span", "strong", "sub", "summary"),
    *("sup", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "u", "ul"),
}
_ATTRIBUTES = {"class", "title", "alt", "colspan", "rowspan", "scope", "start"}
_PLOTLY = "application/vnd.plotly.v1+json"
_SHOWN = ("text/html", "text/markdown", "image/png", "image/jpeg", "text/plain")

# Each code cell's input is folded; nbconvert's own template does the rest.
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
    """The notebook's HTML; its Plotly figures in the form that the report's script draws.

    Args: path, an executed notebook; outputs, whether to show what its cells gave and the values
    that this one job ran with; links, whether to follow one, as of a path that the user names.

    Raises: LabkitError, in one line, for what is not a notebook.
    """
    from jinja2 import DictLoader
    from nbconvert import HTMLExporter

    notebook = _read(path, links)
    if not outputs:
        notebook.cells = [_as_written(cell) for cell in notebook.cells if not _is_of_one_job(cell)]
    figures: dict[str, str] = {}
    for cell in notebook.cells:
        _join_streams(cell)
        cell.source = scrub(_shortened(cell.source))
        attachments = cell.pop("attachments", {})
        if cell.cell_type == "markdown":
            cell.source = attached(cell.source, attachments)
        for output in cell.get("outputs", []):
            for content in _make_safe(output):
                # A place name that the notebook's author could not foresee.
                place = f"figure-{secrets.token_hex(16)}"
                figures[place] = figure_html(content)
                # As text first: what cleans the HTML would take the figure's script away.
                output["data"] = {"text/html": f"<div>{place}</div>"}
    exporter = HTMLExporter(
        extra_loaders=[DictLoader({"labkit.html.j2": _TEMPLATE})],
        extra_template_basedirs=[],  # nbconvert's default is the current folder: templates are code
        template_file="labkit.html.j2",
        template_name="basic",
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    try:
        text = sanitized(exporter.from_notebook_node(notebook)[0])
    except Exception as error:  # of nbconvert's many parts, over what a stranger has written
        reason = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
        raise LabkitError(f"{path} cannot be shown: {reason}") from error
    for place, figure in figures.items():
        # After the cleaning, which has left the text of the place alone.
        text = text.replace(f"<div>{place}</div>", figure)
    return text


def _is_of_one_job(cell: NotebookNode) -> bool:
    """Whether papermill put the cell in: the parameters of one job, or where it failed."""
    tags = {"injected-parameters", "papermill-error-cell-tag", "papermill-error-cell"}
    return not tags.isdisjoint(cell.metadata.get("tags", []))


def _as_written(cell: NotebookNode) -> NotebookNode:
    if cell.cell_type == "code":
        cell.outputs = []
    return cell


def sanitized(text: str) -> str:
    """HTML without scripts, styles, handlers, ids, forms, frames, and without remote images."""
    import bleach

    # For the eye: their content would remain as text. What makes the HTML safe is what follows.
    text = re.sub(r"(?is)<(script|style)\b.*?</\1\s*>", "", text)
    clean = bleach.clean(text, tags=_TAGS, attributes=_allowed, protocols=_PROTOCOLS, strip=True)
    return re.sub(r"<img(?![^>]* src=)[^>]*>", "", clean)  # whose address was taken away


_PROTOCOLS = {"http", "https", "mailto", "data"}
_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp|svg\+xml);base64,")


def _allowed(tag: str, name: str, value: str) -> bool:
    if name == "src":
        return tag == "img" and _IMAGE.match(value) is not None
    if name == "href":
        return tag == "a" and re.match(r"(?i)(https?:|mailto:|#)", value.strip()) is not None
    return name in _ATTRIBUTES


def _read(path: Path, links: bool) -> NotebookNode:
    import nbformat

    try:
        # A job's folder may be a stranger's, and the link lead to what is not for others' eyes.
        content = notebook_bytes(path) if links else read_file(path, LONGEST_NOTEBOOK)
        read_plain_json(content, strict=False)  # what is too deep or too much fails here
        notebook = nbformat.reads(content.decode(), as_version=4)
        nbformat.validate(notebook)  # `reads` itself only complains
        return notebook
    except Exception as error:  # nbformat raises many kinds for what is not a notebook
        lines = str(error).splitlines() or [type(error).__name__]
        raise LabkitError(f"{path} is not a notebook that can be read: {lines[0][:200]}") from error


def _make_safe(output: NotebookNode) -> list[dict[str, JSON]]:
    """Keep of an output what a page can show, without paths; return its figure if it is one."""
    if output.output_type == "stream":
        output.text = scrub(_last_words(_shortened(output.text)))
    if output.output_type == "error":
        output.traceback = [scrub(line) for line in output.traceback]
    data = output.get("data")
    if data is None:
        return []
    if isinstance(data.get(_PLOTLY), dict):
        return [data[_PLOTLY]]
    if "image/svg+xml" in data:  # as an image its scripts and links are dead
        code = base64.b64encode(data["image/svg+xml"].encode()).decode()
        words = scrub(str(data.get("text/plain", "drawing"))).replace('"', "'")
        data["text/html"] = f'<img src="data:image/svg+xml;base64,{code}" alt="{words}">'
    kept = {kind: data[kind] for kind in _SHOWN if kind in data}
    output["data"] = {
        kind: scrub(_shortened(value)) if kind.startswith("text/") else value
        for kind, value in kept.items()
    }
    return []


def _join_streams(cell: NotebookNode) -> None:
    """What a cell printed bit by bit as one text: progress of many runs is a box, not a page."""
    joined: list[NotebookNode] = []
    for output in cell.get("outputs", []):
        last = joined[-1] if joined else None
        if last is not None and output.output_type == last.output_type == "stream":
            last.text += output.text
        else:
            joined.append(output)
    if "outputs" in cell:
        cell.outputs = joined


def _shortened(text: str) -> str:
    """Return a text with a sentence in the place of what no reader would reach."""
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]}\n… {LONGEST_TEXT:,} of {len(text):,} letters are shown."


def _last_words(text: str) -> str:
    """What a terminal would show of lines that carriage returns have overwritten."""
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
