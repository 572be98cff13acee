"""Test JupyterLab as `labkit lab` starts it: notebooks run, and figures grow and respond."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from lab_page import Notebook, jupyterlab
from sample_runs import write_run

from labkit import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOTEBOOKS = Path(__file__).parent.parent.parent / "notebooks"


@pytest.fixture(scope="module")
def lab(own_folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Start JupyterLab in a folder with copies of the notebooks; yield address and folder."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "notebooks").mkdir()
    for path in NOTEBOOKS.glob("*.ipynb"):
        shutil.copy(path, folder / "notebooks")
    with jupyterlab(folder) as address:
        yield address, folder


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Yield a page that can reach only this machine; any error of the page fails the test."""
    context = browser.new_context(viewport={"width": 1500, "height": 1100})
    context.set_default_timeout(120_000)
    page = context.new_page()
    page.elsewhere, page.errors = [], []
    local = re.compile(r"^(?:https?|wss?)://127\.0\.0\.1[:/]|^(?:data|blob):")
    page.route(
        lambda url: not local.match(url),
        lambda route: (page.elsewhere.append(route.request.url), route.abort()),
    )
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    yield page
    context.close()
    assert page.errors == []
    assert page.elsewhere == []


def changed(folder: Path, name: str, **values: str) -> str:
    """Change the values of parameters in the copy of a notebook; return its file name."""
    path = folder / "notebooks" / name
    text = path.read_text()
    for parameter, value in values.items():
        text, found = re.subn(rf'("{parameter}: [^=]+ = )[^#]+?(  #)', rf"\g<1>{value}\g<2>", text)
        assert found == 1
    path.write_text(text)
    return name


CURVES = """() => [...document.querySelectorAll(".js-plotly-plot .scatterlayer path.js-line")].map(
    (path) => path.getAttribute("d")).join(";")"""


def test_the_tour_runs_and_its_figure_grows_while_ranks_work(
    page: Any, lab: tuple[str, Path]
) -> None:
    address, folder = lab
    notebook = Notebook(page, address, changed(folder, "tour.ipynb", epochs="100"))
    notebook.run_all()
    page.wait_for_function(f"({CURVES})().length > 0", timeout=240_000)
    page.wait_for_function(
        f"""(first) => ({CURVES})() !== first && [...document.querySelectorAll(".jp-InputPrompt")]
            .some((prompt) => prompt.textContent.trim() === "[*]:")""",
        arg=page.evaluate(CURVES),
        timeout=120_000,
    )
    notebook.wait_until_run()
    assert notebook.troubles() == []
    runs = ("baseline_run = cluster.run", "parallel_run = cluster.run")
    for source in (*runs, "lk.compare", "lk.summarize"):
        assert notebook.cell(source).locator(".jp-OutputArea-output").count() > 0, source
    assert notebook.cell("lk.table").locator("table").is_visible()
    figure = notebook.cell("lk.compare").locator(".js-plotly-plot")
    assert figure.locator(".scatterlayer path.js-line").count() >= 2 * 3
    before = figure.bounding_box()
    page.set_viewport_size({"width": 1300, "height": 900})
    page.wait_for_timeout(1000)  # JupyterLab tells its outputs of a resize only after a delay
    assert figure.bounding_box()["height"] == pytest.approx(before["height"], abs=2)


OPACITIES = """() => [...document.querySelectorAll(".js-plotly-plot")].map((plot) => plot.data
    .filter((trace) => trace.meta && trace.meta.run).map((trace) => trace.opacity ?? 1))"""


def opacities(page: Any) -> list[list[float]]:
    """Return the opacities of the runs' traces, for each figure."""
    found: list[list[float]] = page.evaluate(OPACITIES)
    return found


def test_a_run_chosen_in_one_figure_of_compare_stands_out_in_the_others(
    page: Any, lab: tuple[str, Path]
) -> None:
    address, folder = lab
    for workers in (1, 2):
        write_run(folder / "runs" / "made", workers=workers, step_ms=8 / workers)
    notebook = Notebook(page, address, changed(folder, "compare.ipynb", runs='[\\"runs/made\\"]'))
    notebook.run_all()
    notebook.wait_until_run()
    assert notebook.troubles() == []
    linked = notebook.cell("figures.linked")
    choice = linked.locator("select")
    drawn = linked.locator(".js-plotly-plot:visible")
    for figure in range(3):  # until Plotly is loaded, a figure is only text
        drawn.nth(figure).locator(".main-svg").first.wait_for(timeout=120_000)
    assert all({*opacity} == {1} for opacity in opacities(page)[:3])
    drawn.nth(1).locator(".legendtoggle").first.click()
    page.wait_for_function("document.querySelector('.jp-CodeCell select').selectedIndex === 1")
    page.wait_for_function(f"JSON.stringify(({OPACITIES})()[2]).includes('0.12')")
    assert all({*opacity} == {1, 0.12} for opacity in opacities(page)[:3])
    choice.select_option(index=0)
    page.wait_for_function(f"!JSON.stringify(({OPACITIES})().slice(0, 3)).includes('0.12')")


# The slow network makes this training last half an hour. More epochs would delay its start, because
# ranks first plan the batches of all epochs.
ENDLESS = (
    "import labkit as lk\ncluster = lk.Cluster(workers=2, name={name!r})\n"
    "ask = lk.Experiment(workers=2, dataset='digits', model='linear', epochs=8000, network='wan')",
    "run = cluster.run(ask.replace(verify=False))",
)
OWN = re.compile(r"'schema'|^Command '[\w:-]+' not registered")
# For each figure: the number of pixels by which it is wider than its cell's visible output.
CUT = """() => [...document.querySelectorAll(".labkit-live svg.main-svg")].map((svg) =>
    svg.getBoundingClientRect().right -
    svg.closest(".jp-OutputArea-output").getBoundingClientRect().right)"""


def wait_until_it_grows(page: Any) -> None:
    # The first run on new ranks traces and compiles, which takes minutes on a busy machine.
    page.wait_for_function(f"({CURVES})().length > 0", timeout=300_000)
    seen = page.evaluate(CURVES)
    page.wait_for_function(f"(seen) => ({CURVES})() !== seen", arg=seen, timeout=120_000)


@pytest.mark.parametrize("app", ["lab", "notebook"])
def test_a_page_that_is_loaded_anew_finds_the_panel_and_stops_the_ranks_while_the_cell_runs(
    page: Any, lab: tuple[str, Path], cluster: Cluster, app: str
) -> None:
    page.set_viewport_size({"width": 1300, "height": 900})
    cells = [nbformat.v4.new_code_cell(each.format(name=cluster.name)) for each in ENDLESS]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    file = lab[1] / "notebooks" / f"endless-{app}.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), file)
    notebook = Notebook(page, lab[0], file.name, app)
    notebook.run_all()
    wait_until_it_grows(page)
    page.wait_for_function(f"Math.max(...({CUT})()) <= 0")
    notebook.save(file, "widget-view+json")
    notebook.reload(".labkit-live")
    wait_until_it_grows(page)
    page.get_by_role("button", name="Stop training").click()
    assert (
        cluster.last_submitted().result().status["cause"].startswith("stopped by the user after ")
    )
    said = page.locator(".labkit-live [role=status]", has_text="interrupted")
    said.wait_for(timeout=120_000)
    assert notebook.troubles() == []
    if app == "notebook":  # the start of Notebook 7 itself raises these errors
        page.errors[:] = [error for error in page.errors if not OWN.search(error)]
