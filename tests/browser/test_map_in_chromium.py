"""Test the map of methods in a browser: filters empty its cells, and a tap shows methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from labkit.cli.methods import map_page

pytestmark = pytest.mark.slow
NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
FULL = "[...document.querySelector('{0} .plot').data[1].text].filter((text) => text !== '—').length"


def opened(page: Any, folder: Path) -> Any:
    path = folder / "map.html"
    path.write_text(map_page(NOTEBOOKS, folder))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-first]")
    return page


def test_a_chosen_compression_leaves_its_methods_in_grid_list_and_words(
    page: Any, tmp_path: Path
) -> None:
    opened(page, tmp_path)
    before = page.evaluate(FULL.format(".names"))
    assert page.locator("[data-place]:visible").count() == before
    page.select_option("select[data-axis=compression]", "quantization")
    page.select_option("select[data-axis=scheduling]", "priority")
    assert page.evaluate(FULL.format(".names")) == 1
    assert page.locator("[data-place]:visible li:visible").count() == 1
    assert page.text_content(".count") == "1 method in 1 of 90 cells"
    assert "parameter servers × data: none at all" in page.text_content("#bare")
    page.select_option("select[data-axis=compression]", "")
    page.select_option("select[data-axis=scheduling]", "")
    assert page.evaluate(FULL.format(".names")) == before
    assert all(url.startswith("file:") for url in page.requests)


def test_a_tap_on_a_phone_leads_to_the_methods_of_a_cell(page: Any, tmp_path: Path) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    opened(page, tmp_path)
    page.wait_for_function("document.querySelector('.numbers .plot').data !== undefined")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    box = page.locator(".numbers .plot .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 12, box["y"] + 14)
    page.mouse.click(box["x"] + 12, box["y"] + 14)
    page.wait_for_function("document.activeElement.dataset.place === '0'")
    cell = page.locator("[data-place='0']")
    assert "AllReduce" in cell.text_content()
    assert cell.locator("a[href^='https://arxiv.org/abs/']").count() >= 1
