"""Test that an image pasted into a notebook appears in its page, and a missing one as a line."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import v4

from labkit.report.inert import render

PNG = b64encode(b"\x89PNG\r\n\x1a\n" + bytes(40)).decode()
IMAGE = {"image/png": PNG}


def page(tmp_path: Path, source: str, attachments: dict[str, Any] | None) -> str:
    cell = v4.new_markdown_cell(source)
    if attachments is not None:
        cell["attachments"] = attachments
    path = tmp_path / "n.ipynb"
    nbformat.write(v4.new_notebook(cells=[cell]), path)
    return render(path)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("![image.png](attachment:image.png)", "image.png"),
        ('![i](attachment:my%20image%20%281%29.png "a title")', "my image (1).png"),
        ("![i](attachment:my%20image%20(1).png)", "my image (1).png"),
        ("![i](attachment:bild-ä.png)", "bild-ä.png"),
        ("<img src='attachment:a.png' width='30'>", "a.png"),
        ("![i][one]\n\n[one]: attachment:a.png", "a.png"),
    ],
)
def test_a_pasted_image_is_part_of_the_page(tmp_path: Path, source: str, name: str) -> None:
    assert f'src="data:image/png;base64,{PNG}"' in page(tmp_path, source, {name: IMAGE})


@pytest.mark.battery(5, 5)
@pytest.mark.parametrize(
    "attachments",
    [None, {}, {"b.png": IMAGE}, {"a.png": {}}, {"a.png": {"image/png": '"><script>'}}],
)
@pytest.mark.parametrize(
    "source",
    [
        "![a](attachment:a.png) and text",
        '<img src="attachment:a.png"> and text',
        "![a][one] and text\n\n[one]: attachment:a.png",
    ],
)
def test_an_image_that_is_missing_is_one_line(
    tmp_path: Path, source: str, attachments: dict[str, Any] | None
) -> None:
    text = page(tmp_path, source, attachments)
    assert text.count("The image a.png is missing from this notebook.") == 1
    assert "and text" in text
    assert "<script" not in text


def test_the_word_in_a_sentence_is_left_alone(tmp_path: Path) -> None:
    assert "an attachment: see below" in page(tmp_path, "an attachment: see below", None)
