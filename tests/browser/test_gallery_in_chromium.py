"""Test the gallery's index page in Chromium without a network, on wide and narrow screens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sample_runs import output, write_job, write_run

from labkit.figures import compare
from labkit.jobs.gallery import write_index, write_page
from labkit.jobs.notebook import JobResult

pytestmark = pytest.mark.slow

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the index of two notebook runs: one with a figure and an answer, one that failed."""
    root = tmp_path_factory.mktemp("gallery")
    runs = [write_run(root / "before", workers=workers, step_ms=8 / workers) for workers in (1, 2)]
    drawn = compare(runs)._repr_mimebundle_()["application/vnd.plotly.v1+json"]
    answer = output(text_markdown="- nothing\n- **workers 2** against workers 1: 2.00x")
    shown = [output(**{"application_vnd.plotly.v1+json": drawn}), answer]
    job = write_job(root / "runs", shown)
    executed = json.loads((job / "output.ipynb").read_text())
    for cell in executed["cells"]:
        cell["metadata"]["tags"] = ["answer"]
    (job / "output.ipynb").write_text(json.dumps(executed))
    ended = [
        (NOTEBOOKS / "tour.ipynb", JobResult(job, "completed")),
        (NOTEBOOKS / "replay.ipynb", JobResult(root / "nowhere", "failed", "workers = 'x' is not")),
    ]
    for notebook, result in ended:
        write_page(result, root / f"{notebook.stem}.html")
    write_index(ended, root)
    return root / "index.html"


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_index_is_drawn_without_a_host_fits_its_screen_and_is_accessible(
    page: Any, index: Path, width: int, scheme: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.goto(index.as_uri())
    page.wait_for_selector("html[data-drawn='1']", timeout=120_000)
    assert [url for url in page.requests if not url.startswith("data:")] == [index.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    picture = page.locator(".picture .main-svg").first.bounding_box()
    assert picture["width"] <= width
    assert "workers 2 against workers 1: 2.00x" in page.locator(".answer").inner_text()
    assert page.locator(".failed").inner_text() == "failed: workers = 'x' is not"
    found = Axe().run(page).response["violations"]
    worst = [each["id"] for each in found if each["impact"] in ("serious", "critical")]
    assert worst == []
    page.get_by_role("link", name="Does a second process change").click()
    page.wait_for_selector("html[data-first]", timeout=120_000)
    assert page.url.endswith("/tour.html")
