"""Test reports in Chromium without a network."""

from __future__ import annotations

import csv
import io
import json
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from sample_runs import experiment, output, write_job, write_run

from labkit.figures import compare
from labkit.records import store
from labkit.report import report
from tests.acceptance.report import READ

pytestmark = pytest.mark.slow

# The number of labkit's figures: loss, accuracy, throughput, speed-up, efficiency, two Pareto
# plots, and parallel coordinates.
OURS = 8

EVIL = "<script>window.hit = 1</script><img src='https://x.example/i.png' onerror='window.hit = 1'>"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a report of a notebook with a comparison, a foreign figure and malicious HTML."""
    import plotly.graph_objects as go

    root = tmp_path_factory.mktemp("report")
    runs = [write_run(root / "before", workers=workers, step_ms=8 / workers) for workers in (1, 2)]
    ours = compare(runs)._repr_mimebundle_()["application/vnd.plotly.v1+json"]
    picture = {"source": "https://x.example/logo.png", "x": 0, "y": 1, "sizex": 1, "sizey": 1}
    theirs = go.Figure(go.Scatter(y=[1, 3, 2]), {"title": {"text": EVIL}, "images": [picture]})
    job = write_job(
        root / "runs",
        [
            output(**{"application_vnd.plotly.v1+json": ours}),
            output(**{"application_vnd.plotly.v1+json": json.loads(theirs.to_json())}),
            output(text_html=EVIL),
        ],
        workers=2,
    )
    for run in runs:  # the report is about the runs that the notebook drew
        run.path.rename(job / run.name)
    write_run(job, workers=4, step_ms=3.0, dataset=EVIL)
    return report(job, root / "report.html")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a report of three methods on two networks with two seeds each, and a failed run."""
    root = tmp_path_factory.mktemp("many")
    methods = (None, {"name": "TopK", "ratio": 0.01}, {"name": "OneBit"})
    for place, (compressor, network) in enumerate(product(methods, ("1GbE", "100Mb"))):
        strategy = {"name": "AllReduce", "algorithm": "ring", "compressor": compressor}
        for seed in range(2):
            measured = {"network": network, "test_accuracy": 0.7 + place / 50 + seed / 100}
            given = {"network": network, "strategy": strategy, "seed": seed, "measured": measured}
            write_run(root, step_ms=5.0 + place, **given)
    failed = store.new_run_directory(root, "failed")
    other = {"model": "cnn", "model_options": {}, "learning_rate": 0.3}
    store.start(failed, experiment(workers=4, network="1GbE", **other), {})
    store.fail(failed, "out of memory", rank=1)
    return report(root, root / "report.html")


def read(page: Any) -> None:
    """Scroll to each figure, so that the page draws it, and then back to the top."""
    page.wait_for_selector("html[data-first]", timeout=120_000)
    page.evaluate(READ)
    page.wait_for_selector("html[data-drawn]", timeout=120_000)
    page.evaluate("scrollTo(0, 0)")


def opened(page: Any, written: Path) -> Any:
    """Open a report; return its page when all figures are drawn and the table can be used."""
    page.goto(written.as_uri())
    read(page)
    if page.locator("#filter").count():
        page.wait_for_selector("html[data-table]", timeout=120_000)
    return page


def settled(page: Any) -> None:
    """Wait until all figures show the latest selection."""
    page.wait_for_selector("html[data-settled]", timeout=120_000)


def lone(page: Any, value: str) -> list[Any]:
    """Return the value of a JavaScript expression of `plot` for each figure."""
    found: list[Any] = page.evaluate(
        f"() => [...document.querySelectorAll('.js-plotly-plot')].map((plot) => {value})"
    )
    return found


def hidden(page: Any) -> list[list[str]]:
    """Return the hidden runs, for each figure."""
    found: list[list[str]] = page.evaluate(
        """() => [...document.querySelectorAll(".js-plotly-plot")].map((plot) => [...new Set(
            plot.data.filter((t) => t.visible === false && t.meta.run).map((t) => t.meta.run))])"""
    )
    return found


def faint(page: Any) -> list[list[str]]:
    """Return the dimmed runs, for each figure."""
    found: list[list[str]] = page.evaluate(
        """() => [...document.querySelectorAll(".js-plotly-plot")].map((plot) => [...new Set(
            plot.data.filter((t) => t.opacity < 1 && t.meta.run).map((t) => t.meta.run))])"""
    )
    return found


def test_all_figures_are_drawn_and_nothing_is_asked_of_any_host(page: Any, written: Path) -> None:
    opened(page, written)
    drawn = page.locator("figure .plot")
    assert page.get_attribute("html", "data-drawn") == str(drawn.count()) == str(OURS + 2)
    for figure in drawn.all():
        assert figure.locator("svg.main-svg").count() > 0
    lines = page.locator(".panel").first.locator(".scatterlayer .trace path.js-line")
    assert lines.count() >= 3
    assert page.locator(".panel").nth(2).locator(".bars .point").count() == 3
    assert [url for url in page.requests if not url.startswith("data:")] == [written.as_uri()]


DESK, TABLET, PHONE, PRINT = (1280, "screen"), (1024, "screen"), (390, "screen"), (700, "print")


def test_a_run_by_itself_is_seen_in_every_figure(page: Any, tmp_path: Path) -> None:
    alone = write_run(tmp_path, workers=2, step_ms=4.0)
    opened(page, report(alone.path, tmp_path / "report.html"))
    assert page.locator("input[data-run]").count() == 0
    seen = lone(page, "plot.data.filter((t) => t.meta && t.meta.run).map((t) => t.visible)")
    assert sum(map(len, seen)) >= 3
    assert all(each for figure in seen for each in figure)


@pytest.mark.battery(0, 2)
@pytest.mark.parametrize(
    ("of", "scheme", "shapes"),
    [
        ("written", "light", (DESK, TABLET, PHONE, PRINT)),
        ("written", "dark", (DESK, TABLET, PHONE, PRINT)),
        ("many", "light", (DESK,)),
        ("many", "dark", (PHONE,)),
    ],
)
def test_it_keeps_the_rules_of_accessibility(
    page: Any,
    of: str,
    scheme: str,
    shapes: tuple[tuple[int, str], ...],
    request: pytest.FixtureRequest,
) -> None:
    """Axe-core finds no serious or critical violation on a wide screen, on a phone, or on paper."""
    from axe_playwright_python.sync_playwright import Axe

    page.emulate_media(color_scheme=scheme)
    opened(page, request.getfixturevalue(of))
    for width, medium in shapes:
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme, media=medium)
        found = Axe().run(page).response["violations"]
        grave = [each for each in found if each["impact"] in ("serious", "critical")]
        told = [(each["id"], each["nodes"][0]["html"][:200]) for each in grave]
        assert told == [], (width, medium)


def test_a_figure_is_drawn_when_a_reader_comes_by(page: Any, many: Path) -> None:
    """Until then, a static image is shown; later, the figure applies the selections made so far."""
    page.set_viewport_size({"width": 1280, "height": 600})
    page.goto(many.as_uri())
    page.wait_for_selector("html[data-table]", timeout=120_000)
    last = page.locator(".plot").last
    assert last.locator(".still").count() == 1
    page.locator("#facet").select_option("network")
    settled(page)
    page.locator("#filter").fill("network=1GbE")
    settled(page)
    assert last.locator(".still").count() == 1
    read(page)
    assert page.locator(".still").count() == 0
    heads = page.locator(".panel .facet").all_text_contents()
    assert heads == ["network 1GbE", "network 100Mb"] * 2
    assert all(len(keys) == 3 for keys in hidden(page)[::2][:2])


def test_nothing_of_a_notebook_or_a_parameter_is_executed(page: Any, written: Path) -> None:
    opened(page, written)
    assert page.evaluate("window.hit") is None
    assert page.locator("img[onerror], .notebook script:not([type])").count() == 0


def test_without_scripts_there_are_the_table_and_a_picture_of_each_figure(
    browser: Any, many: Path
) -> None:
    context = browser.new_context(java_script_enabled=False, offline=True)
    context.set_default_timeout(120_000)
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(many.as_uri())
    table = page.locator("#table tbody tr")
    assert table.count() == 7
    assert all(row.is_visible() for row in table.all())
    plots = page.locator(".plot")
    stills = page.locator(".plot > svg.still")
    assert stills.count() == plots.count() == OURS
    assert all(still.is_visible() for still in stills.all())
    # Each completed run has the same line colour in the static images as in the table.
    colors = {
        style.split()[-1].rstrip(";")
        for each in page.locator("tbody .swatch").all()
        if "OneBit" in (each.locator("..").text_content() or "")
        and (style := each.get_attribute("style"))
    }
    assert len(colors) == 2
    for color in colors:
        assert stills.first.locator(f"polyline[stroke='{color}']").count() == 1
    assert [url for url in asked if not url.startswith("data:")] == [many.as_uri()]
    assert page.locator("noscript p").is_visible()
    context.close()


def test_each_plot_offers_its_numbers_and_itself_for_a_paper(page: Any, written: Path) -> None:
    opened(page, written)
    assert page.locator(".still").count() == 0
    plots = page.locator(".plot").count()
    for way in ("CSV", "SVG"):
        assert page.locator(".offers button", has_text=way).count() == plots
    page.locator("#filter").fill("workers!=4")
    settled(page)

    def saved(way: str, title: str) -> str:
        with page.expect_download(timeout=120_000) as download:
            page.get_by_role("button", name=f"{way}: {title}", exact=True).first.press("Enter")
        assert download.value.suggested_filename.endswith(
            f"-{title.lower().replace(' ', '-')}.{way.lower()}"
        )
        return Path(download.value.path()).read_text()

    rows = list(csv.DictReader(io.StringIO(saved("CSV", "Test accuracy"))))
    assert [row["step"] for row in rows] == ["20", "40", "60"] * 2
    final = [float(row["test accuracy"]) for row in rows]
    assert final == pytest.approx([0.4, 0.65, 0.9 - 0.4 / 2.4] * 2, abs=0.2)
    assert len({row["run"] for row in rows}) == 2
    svg = ElementTree.fromstring(saved("SVG", "Training loss"))
    name = "{http://www.w3.org/2000/svg}text"
    told = {"".join(each.itertext()) for each in svg.iter(name)}
    assert {"Training loss", "step", *(row["run"] for row in rows)} <= told
    assert all("http" not in value for each in svg.iter() for value in each.attrib.values())
    assert [url for url in page.requests if not url.startswith(("data:", "blob:"))] == [
        written.as_uri()
    ]


def test_a_tick_shows_a_run_in_every_figure_that_has_it(page: Any, written: Path) -> None:
    opened(page, written)
    box = page.locator("input[data-run]").first
    key = box.get_attribute("data-run")
    assert not any(hidden(page))
    box.uncheck()
    settled(page)
    assert all(own in ([key], []) for own in hidden(page))
    assert hidden(page)[:3] == [[key]] * 3
    box.focus()
    page.keyboard.press("Space")
    settled(page)
    assert not any(hidden(page))
    page.get_by_role("button", name="none", exact=True).click()
    settled(page)
    assert [len(keys) for keys in hidden(page)[:3]] == [3] * 3
    page.get_by_role("button", name="all", exact=True).press("Enter")
    settled(page)
    assert not any(hidden(page))


def test_a_run_that_is_chosen_stands_out_in_every_figure(page: Any, written: Path) -> None:
    opened(page, written)
    button = page.locator("[data-mark]").first
    chosen = button.get_attribute("data-mark")
    others = {b.get_attribute("data-mark") for b in page.locator("[data-mark]").all()} - {chosen}
    button.press("Enter")
    settled(page)
    assert button.get_attribute("aria-pressed") == "true"
    assert [set(keys) for keys in faint(page)[:3]] == [others] * 3
    assert "is highlighted" in page.locator("[role=status]").text_content()
    page.keyboard.press("Escape")
    settled(page)
    assert button.get_attribute("aria-pressed") == "false"
    assert faint(page)[:3] == [[]] * 3
    # A click on a line in a figure does the same.
    page.evaluate(
        """(key) => { const plot = document.querySelectorAll(".js-plotly-plot")[0];
            const data = plot.data.find((trace) => trace.meta && trace.meta.run === key);
            plot.emit("plotly_click", { points: [{ data, pointNumber: 0 }] }); }""",
        chosen,
    )
    settled(page)
    assert [set(keys) for keys in faint(page)[:3]] == [others] * 3


def test_the_table_is_filtered_as_one_types_and_the_figures_follow(
    page: Any, written: Path
) -> None:
    opened(page, written)
    page.locator("#filter").fill("workers=2")
    settled(page)
    rows = page.locator("#table tbody tr")
    assert rows.count() == 1
    kept = rows.first.get_attribute("data-key")
    assert page.locator("[role=status]").text_content() == "1 of 3 pass"
    assert all(kept not in own and len(own) == 2 for own in hidden(page)[:3])
    for text, count in (
        ("workers>=2", 2),
        ("workers!=2 state=completed", 2),
        ("strategy=allred", 3),
        ("nothing=2", 0),
        ("test_accuracy>0.5", 3),
        ("", 3),
    ):
        page.locator("#filter").fill(text)
        settled(page)
        rows = page.locator("#table tbody tr[data-key]")
        assert rows.count() == count, text


def test_what_is_typed_means_what_is_shown_also_beside_a_run_that_failed(
    page: Any, many: Path
) -> None:
    from playwright.sync_api import expect

    opened(page, many)
    rows, status = page.locator("#table tbody tr[data-key]"), page.locator("[role=status]")
    for text, count in (
        ("test_accuracy>75", 3),  # the column's head says per cent
        ("test_accuracy=76.50", 1),
        ('"test accuracy">="76.5 %"', 3),
        ('compressor="TopK 1 %"', 2),  # the text is that of the table's cell
        ('compressor="TopK 1 %" network=100Mb', 1),
        ("state=failed", 1),
        ("samples_per_second>=25,000", 6),
        ("tset_accuracy>75", 0),
    ):
        page.locator("#filter").fill(text)
        expect(status).to_contain_text(f"{count} of 7 pass")
        assert rows.count() == count, text
    expect(status).to_contain_text("no run has tset_accuracy; available: label, ")
    page.locator("#filter").fill("state=failed")
    settled(page)
    unseen = page.locator(".unseen").first
    assert "This plot draws none of the visible runs. It has 6 of 7 runs" in (unseen.text_content())
    page.locator("#filter").fill("")
    settled(page)
    assert page.locator(".unseen").count() == 0
    head = page.locator("#table th[data-name=test_accuracy]")
    place = head.evaluate("(each) => [...each.parentElement.children].indexOf(each)")
    cells = page.locator(f"#table tbody tr > :nth-child({place + 1})")
    # The failed run has no accuracy; wherever its row is, the other rows are sorted.
    rising = ["70.50", "72.50", "74.50", "76.50", "78.50", "80.50"]
    for way, order in (("ascending", rising), ("descending", rising[::-1])):
        head.click()
        expect(head).to_have_attribute("aria-sort", way)
        assert [text for text in cells.all_text_contents() if text != "—"] == order


def test_of_very_many_values_some_are_facets_and_dashes_tell_them_apart(
    page: Any, tmp_path: Path
) -> None:
    for place in range(26):
        write_run(tmp_path / "runs", learning_rate=(1 + place) / 100)
    opened(page, report(tmp_path / "runs", tmp_path / "report.html"))
    page.locator("#facet").select_option("learning_rate")
    settled(page)
    heads = page.locator(".panel .facet:not(.note)")
    assert heads.count() == 2 * 12
    said = page.locator(".panel .facet.note").all_text_contents()
    assert (
        said == ["12 of 26 values of learning_rate are shown; filter the runs to see others."] * 2
    )
    page.locator("#filter").fill("learning_rate>=0.26")
    settled(page)
    assert heads.first.text_content() == "learning_rate 0.26"
    page.locator("#filter").fill("")
    page.locator("#facet").select_option("")
    page.locator("#by").select_option("learning_rate")
    settled(page)
    looks = page.locator("[data-swatch]").evaluate_all(
        "(all) => all.map((each) => getComputedStyle(each).borderTop)"
    )
    assert len(set(looks)) == 24
    dashes = "JSON.stringify([...new Set(plot.data.map((t) => t.line && t.line.dash))].sort())"
    assert lone(page, dashes)[0] == '["dash","dashdot","dot","solid"]'
    said = page.locator("[role=status]").text_content()
    assert said == "26 values of learning_rate: colours and dashes repeat after 24."


def test_a_head_sorts_by_number(page: Any, written: Path) -> None:
    from playwright.sync_api import expect

    opened(page, written)
    place = page.evaluate(
        "[...document.querySelectorAll('#table th')].findIndex((h) => h.dataset.name === 'workers')"
    )
    cells = page.locator(f"#table tbody tr td:nth-child({place + 1})")
    for way, order in (("ascending", "1 2 4"), ("descending", "4 2 1")):
        head = page.locator("#table thead th").nth(place)
        head.click()
        expect(head).to_have_attribute("aria-sort", way, timeout=120_000)
        expect(cells).to_have_text(order.split(), timeout=120_000)


def test_one_switch_moves_all_curves_to_another_axis(page: Any, written: Path) -> None:
    opened(page, written)
    title = "plot.layout.xaxis.title && plot.layout.xaxis.title.text"
    assert lone(page, title)[:2] == ["step", "step"]
    page.get_by_role("radio", name="seconds").check()
    settled(page)
    assert lone(page, title)[:2] == ["seconds since the first step"] * 2
    assert all(ends[1] < 5 for ends in lone(page, "plot._fullLayout.xaxis.range")[:2])


def test_smoothing_moves_the_line_and_not_the_results(page: Any, written: Path) -> None:
    opened(page, written)
    line = "(t) => t.meta && t.meta.run && t.line && t.line.width === 2"
    last = f"JSON.stringify((plot.data.find({line}) || {{}}).y)"
    before = lone(page, last)[:2]
    page.locator("#smooth").fill("25")
    settled(page)
    after = lone(page, last)[:2]
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_facets_and_colours_are_by_a_parameter(page: Any, written: Path) -> None:
    opened(page, written)
    count = page.locator(".plot").count()
    page.locator("#facet").select_option("workers")
    settled(page)
    assert page.locator(".panel .facet").all_text_contents()[:3] == [
        "workers 1",
        "workers 2",
        "workers 4",
    ]
    assert page.locator(".plot").count() == count + 2 * 2
    page.locator("#facet").select_option("")
    page.locator("#by").select_option("dataset")
    settled(page)
    assert page.locator(".plot").count() == count
    assert page.locator("#table tr.dtrg-group").count() == 2
    colors = page.evaluate(
        """() => [...document.querySelectorAll("[data-swatch]")].map(
            (each) => getComputedStyle(each).borderTopColor)"""
    )
    assert len(set(colors)) == 2


@pytest.mark.battery(0, 1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_of_figures_takes_the_pages_colour(page: Any, written: Path, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    opened(page, written)
    ink, paper, text = page.evaluate(
        """() => [getComputedStyle(document.body).color,
            getComputedStyle(document.body).backgroundColor,
            getComputedStyle(document.querySelector("figure .gtitle")).fill]"""
    )
    assert text == ink
    assert sum(map(int, paper[4:-1].split(","))) > 600 if scheme == "light" else True
    assert sum(map(int, paper[4:-1].split(","))) < 150 if scheme == "dark" else True


OVERLAPS = """() => {
    const own = [...document.querySelectorAll("figure .main-svg text")].filter(
        (text) => text.textContent.trim() && !text.closest(".hoverlayer"));
    const page = [...document.querySelectorAll(
        "h1, h2, h3, h4, p, legend, label, li, figcaption, #table :is(th, td)")].filter(
        (part) => part.checkVisibility() && !part.closest(".aloud, .notebook, .dtfc-fixed-start"));
    const table = page.filter((part) => part.closest("#table"));
    const groups = [[...own, ...page.filter((part) => !part.closest("#table"))], table];
    const hits = [], said = (part) => part.textContent.trim().slice(0, 40);
    for (const group of groups) {
        const boxes = group.map((part) => [part, part.getBoundingClientRect()]);
        boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
            const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
            const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
            const apart = !a.contains(b) && !b.contains(a);
            if (wide > 3 && high > 3 && apart) hits.push(`${said(a)} | ${said(b)}`);
        }));
    }
    return hits;
}"""


@pytest.mark.battery(0, 3)
@pytest.mark.parametrize("of", ["many", "written"])
@pytest.mark.parametrize("width", [1280, 1024, 390])
def test_no_two_texts_overlap(
    page: Any, of: str, width: int, request: pytest.FixtureRequest
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    opened(page, request.getfixturevalue(of))
    assert page.evaluate(OVERLAPS) == []
    # The page itself never scrolls sideways; its table and its wide figures may.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    plots = [box.bounding_box() for box in page.locator(".panel .plot").all()]
    beside = [b for a, b in pairwise(plots) if abs(a["y"] - b["y"]) < 5]
    assert bool(beside) == (width > 700)
    assert page.locator(".modebar-btn").count() == 0 or width > 700
    # On a phone, the panels of a notebook's figure are below each other, so the figure does not
    # scroll.
    canvas = ".notebook .figure:not(.foreign) .scroll"
    moved = page.locator(canvas).evaluate_all(
        "(all) => all.map((each) => each.scrollWidth - each.clientWidth)"
    )
    assert len(moved) == (of == "written")
    assert all(by <= 1 for by in moved)


@pytest.mark.battery(0, 1)
@pytest.mark.parametrize("width", [1280, 390])
def test_the_table_fits_or_moves_under_its_names(page: Any, many: Path, width: int) -> None:
    """A wide screen shows all columns; on a phone the table scrolls, but names and heads stay."""
    page.set_viewport_size({"width": width, "height": 900})
    opened(page, many)
    frame = page.locator(".runs")
    inside, whole = frame.evaluate("(each) => [each.clientWidth, each.scrollWidth]")
    assert (whole <= inside) == (width == 1280)
    # Only one element scrolls the table, although DataTables adds further elements around a table.
    assert page.evaluate(
        """() => [...document.querySelectorAll(".runs *")].every((part) =>
            part.scrollWidth <= part.clientWidth + 1 ||
            getComputedStyle(part).overflowX === "visible")"""
    )
    frame.evaluate("(each) => { each.style.maxHeight = '8rem'; each.scrollTo(9999, 60); }")
    box, last = frame.bounding_box(), frame.locator("thead th").last.bounding_box()
    assert last["x"] + last["width"] <= box["x"] + box["width"] + 1
    assert last["y"] == pytest.approx(box["y"], abs=2)
    assert frame.locator("tbody th").nth(3).bounding_box()["x"] == pytest.approx(box["x"], abs=2)


def hundred(root: Path) -> Path:
    """Write runs of a sweep: 4 numbers of workers, 5 compressors, 5 learning rates, 25 epochs."""
    compressors = [None, *({"name": name} for name in ("Int8", "OneBit", "TopK", "QSGD"))]
    for workers in (1, 2, 4, 8):
        for compressor in compressors:
            for rate in (0.1, 0.2, 0.3, 0.4, 0.5):
                strategy = {"name": "AllReduce", "algorithm": "ring", "compressor": compressor}
                given = {"learning_rate": rate, "workers": workers, "strategy": strategy}
                write_run(root, epochs=25, **given)
    return root


def test_a_hundred_runs_take_at_most_8_mb_and_are_seen(page: Any, tmp_path: Path) -> None:
    path = report(hundred(tmp_path / "runs"), tmp_path / "report.html")
    assert path.stat().st_size <= 8e6
    opened(page, path)
    assert int(page.get_attribute("html", "data-first")) > 0  # `tests.acceptance report` times this
    assert page.get_attribute("html", "data-drawn") == "10"
    # One trace contains the points of many runs, and knows the run of each point.
    of_points = """(say) => [...document.querySelectorAll(".js-plotly-plot")].flatMap((plot) =>
        plot.data.filter((t) => t.meta && t.meta.points)).map(new Function("t", "return " + say))"""
    assert 100 in page.evaluate(of_points, "t.meta.points.length")
    page.locator("[data-mark]").last.click()  # a run that sent bytes; runs of one worker send none
    settled(page)
    assert set(page.evaluate(of_points, "t.selectedpoints.length")) == {1}
    page.get_by_role("button", name="none", exact=True).click()
    settled(page)
    assert all(page.evaluate(of_points, "t.y.every((y) => y === null)"))


PAPER = 700  # approximate width between the margins of A4, pixels

# Words in the table, headings and sentences that continue on another line without a hyphen.
BROKEN = """() => {
    const found = [];
    for (const part of document.querySelectorAll("#table :is(th, td), h1, h2, h3, h4, p, li")) {
        const texts = document.createTreeWalker(part, NodeFilter.SHOW_TEXT);
        while (texts.nextNode()) {
            for (const word of texts.currentNode.data.matchAll(/[\\p{L}\\p{N}_]+/gu)) {
                const range = document.createRange();
                range.setStart(texts.currentNode, word.index);
                range.setEnd(texts.currentNode, word.index + word[0].length);
                const tops = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
                if (tops.size > 1) found.push(word[0]);
            }
        }
    }
    return found;
}"""


def on_paper(page: Any, path: Path) -> list[float]:
    """Lay out the page for A4; return each drawing's ratio of width to height on the screen."""
    page.emulate_media(color_scheme="dark")
    opened(page, path)
    plots = page.locator(".plot").all()
    boxes = [each.locator(".main-svg").first.bounding_box() for each in plots]
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate(f"document.body.style.width = '{PAPER}px'")
    return [box["width"] / box["height"] for box in boxes]


@pytest.mark.battery(0, 1)
@pytest.mark.parametrize("of", ["written", "many"])
def test_on_paper_words_are_whole_and_each_panel_takes_its_width(
    page: Any, of: str, request: pytest.FixtureRequest
) -> None:
    shapes = on_paper(page, request.getfixturevalue(of))
    assert page.evaluate(BROKEN) == []
    outside = page.evaluate(
        """(width) => [...document.body.querySelectorAll(":not(svg *, .aloud)")].filter(
            (part) => part.getClientRects().length && part.getBoundingClientRect().right >
                document.body.getBoundingClientRect().left + width + 1
        ).map((part) => part.outerHTML.slice(0, 120))""",
        PAPER,
    )
    assert outside == []
    plots = page.locator(".plot").all()
    assert len(plots) == len(shapes)
    for plot, shape in zip(plots, shapes, strict=True):
        frame, drawing = plot.bounding_box(), plot.locator(".main-svg").first.bounding_box()
        assert drawing["width"] == pytest.approx(frame["width"], abs=1)
        assert drawing["height"] <= frame["height"] + 1
        assert drawing["width"] / drawing["height"] == pytest.approx(shape, rel=0.01)
        kept = "(each) => getComputedStyle(each.closest('.panels > *, figure')).breakInside"
        assert plot.evaluate(kept) == "avoid"


def test_on_paper_controls_are_gone_and_it_is_black_on_white(page: Any, written: Path) -> None:
    """This holds for any colours of the screen; sections that are closed stay closed."""
    on_paper(page, written)
    for control in (".controls", "input", ".modebar", "figcaption", ".skip", "details.code"):
        assert not any(each.is_visible() for each in page.locator(control).all()), control
    assert page.locator("details[open]").count() == 0  # parameters stay closed
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert (ink, paper) == ("rgb(0, 0, 0)", "rgb(255, 255, 255)")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    assert page.locator("details[open]").count() == 0
    assert page.locator(".main-svg[viewBox]").count() == 0
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_a_strangers_odd_figures_are_their_own_lines(tmp_path: Path, page: Any) -> None:
    kind = "application_vnd.plotly.v1+json"
    odd = [
        {"data": [{"type": "scatter", "y": [1.0, float("nan"), 2.0]}], "layout": {}},
        {"data": [{"type": "scatter", "y": [1]}], "layout": {}, "frames": 5},
        {"data": 5, "layout": {"sliders": 3}, "frames": [None]},
    ]
    job = write_job(tmp_path / "runs", [output(**{kind: figure}) for figure in odd])
    write_run(job)
    opened(page, report(job, tmp_path / "report.html"))
    figures = page.locator(".notebook figure .plot")
    assert figures.count() == 3
    assert figures.nth(0).locator(".main-svg").count() > 0  # the missing value is drawn as a gap
    undrawn = page.get_by_text("This figure cannot be drawn")
    assert undrawn.count() >= 1
    drawn = page.locator("figure .main-svg").count()
    assert drawn > 0  # the report's own figures are drawn
