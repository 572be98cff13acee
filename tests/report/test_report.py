"""Test that a report is one file without active content that names no machine."""

from __future__ import annotations

import base64
import json
import math
import re
import shlex
from pathlib import Path

import nbformat
import pytest
from nbformat import v4
from plotly.offline import get_plotlyjs
from sample_runs import FAILED_GATE, output, write_job, write_run

from labkit.common.errors import LabkitError
from labkit.experiment import Experiment
from labkit.figures import compare
from labkit.records import store
from labkit.report import notebook_page, report
from labkit.report.embed import figure_html, tables, unwrap
from labkit.report.inert import render, sanitized
from labkit.report.jobs import commands

MARK = "plotly.js v"


def page(path: Path) -> str:
    """Return the report without Plotly's own code, which contains names of hosts."""
    scripts = r"(?s)<script(?: type=\"module\")?>.*?</script>|<style>.*?</style>"
    return re.sub(scripts, "", path.read_text())


def test_a_report_holds_plotly_once_and_names_every_run(tmp_path: Path) -> None:
    job = write_job(tmp_path, workers=2, dataset="digits")
    runs = [write_run(job, workers=workers) for workers in (1, 2)]
    path = report(runs, tmp_path / "out" / "report.html")
    assert path == tmp_path / "out" / "report.html"
    assert path.read_text().count(MARK) == 1
    text = page(path)
    for words in ("workers 1", "workers 2", "3.1e-16", "Does it pay?", "2.21.0"):
        assert words in text
    assert "labkit run notebooks/tour.ipynb -p workers 2 -p dataset digits" in text
    assert "as all jobs ran it." not in text


def test_nothing_in_the_page_names_a_host_or_loads_a_file(tmp_path: Path) -> None:
    job = write_job(tmp_path, [output(text_html="<img src='https://x.example/a.png'>")])
    write_run(job)
    text = page(report(job, tmp_path / "report.html"))
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?\s*(https?:|//|file:)""", text)
    assert "mathjax" not in text.lower()


def test_values_that_need_quotes_are_quoted_in_the_command(tmp_path: Path) -> None:
    job = write_job(tmp_path, name="two words", widths=[64, 32], fast=True)
    write_run(job)
    text = page(report(job, tmp_path / "report.html"))
    command = "-p name &#39;two words&#39; -p widths &#39;[64, 32]&#39; -p fast true"
    assert command in text


def test_report_takes_a_folder_runs_and_paths(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "runs", workers=workers) for workers in (1, 2)]
    pages = [
        page(report(given, tmp_path / "report.html"))
        for given in (tmp_path / "runs", runs, [runs[0].path, runs[1]], [str(tmp_path / "runs")])
    ]
    assert all(text.count("data-run=") == 2 for text in pages)


def test_a_report_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(LabkitError, match="no runs to report"):
        report(tmp_path, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_markup_in_names_causes_and_parameters_is_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    runs = [write_run(tmp_path, evil, dataset=evil), write_run(tmp_path, model="cnn")]
    store.fail(runs[1].path, evil)
    text = page(report(runs, tmp_path / "report.html"))
    assert "<img" not in text
    data = text.count('class="labkit-figure"') + 1  # one script holds the table's data
    assert len(re.findall(r"<script", text)) == data


def test_notebook_outputs_are_inert(tmp_path: Path) -> None:
    evil = (
        "<p onclick='x()'>kept</p><script>x()</script><iframe src='//h'></iframe>"
        "<a href='javascript:x()'>link</a><form action='//h'><input></form><svg onload='x()'></svg>"
        "<img src='http://h/a.png'><style>@import '//h'</style>"
        "<div style='background:url(//h)' id='runs'>"
    )
    clean = sanitized(evil)
    assert "<p>kept</p>" in clean
    for word in ("script", "iframe", "onclick", "javascript", "form", "svg", "img", "h/", "id="):
        assert word not in clean


@pytest.mark.parametrize(
    ("evil", "clean"),
    [
        # Text of scripts and styles is removed even if their elements have no end.
        ("text<script>x()", "text"),
        ("text<style>a{}", "text"),
        ("<svg><style><img src=x onerror=x()></style></svg>text", "text"),
        ("<noscript><p title='</noscript><img src=x onerror=x()>'>", "&lt;p title=''&gt;"),
        ("<img alt='src=x>y' src='http://h/a.png'>", ""),
        ("<img src='data:text/html;base64,AA'>", ""),
        *(
            (f"<a href='{address}'>a</a>", '<a rel="noopener noreferrer">a</a>')
            for address in (
                "java\tscript:x",
                "&#106;avascript:x",
                "data:text/html,x",
                "//h",
                "f.html",
            )
        ),
        *(
            (f"<a href='{address}'>a</a>", f'<a href="{address}" rel="noopener noreferrer">a</a>')
            for address in ("https://h/", "mailto:a@b", "#part")
        ),
        ("<div style='x' id='y' class='z' onclick='x()'>text</div>", '<div class="z">text</div>'),
    ],
)
def test_html_of_a_notebook_keeps_text_and_safe_addresses(evil: str, clean: str) -> None:
    assert sanitized(evil) == clean


def test_a_figures_text_cannot_end_its_script_element(tmp_path: Path) -> None:
    bundle = {"application_vnd.plotly.v1+json": {"data": [], "layout": {"title": "</script><b>x"}}}
    job = write_job(tmp_path, [output(**bundle)])
    text = render(job / "output.ipynb")
    assert text.count("</script>") == 1
    assert "<b>x" not in text


def test_a_number_that_json_lacks_is_a_gap_of_its_figure(tmp_path: Path) -> None:
    text = figure_html({"data": [{"y": [1.0, math.nan, math.inf]}], "layout": {"height": math.inf}})
    content = re.search(r"labkit-figure\">(.*?)</script>", text)
    assert content is not None
    assert json.loads(content[1], parse_constant=pytest.fail)["data"] == [{"y": [1.0, None, None]}]


def test_a_notebooks_figures_tables_and_images_are_kept(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    figure = compare([run])._repr_mimebundle_()["application/vnd.plotly.v1+json"]
    pixel = base64.b64encode(b"\x89PNG not quite").decode()
    outputs = [
        output(**{"application_vnd.plotly.v1+json": figure, "text_html": "words"}),
        output(text_html="<style>td{}</style><table><tr><td>cell</td></tr></table>"),
        output(image_png=pixel),
        output(**{"image_svg+xml": "<svg xmlns='http://www.w3.org/2000/svg'/>"}),
    ]
    text = render(write_job(tmp_path, outputs) / "output.ipynb")
    assert text.count('class="labkit-figure"') == 1
    assert '<figure class="figure" aria-label="1 run' in text
    assert "<td>cell</td>" in text
    assert "td{}" not in text
    assert f"data:image/png;base64,{pixel}" in text
    assert "data:image/svg+xml;base64," in text
    assert '<details class="code"><summary>Code</summary>' in text


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_what_a_cell_prints_line_by_line_is_folded_under_its_last_line(
    tmp_path: Path, name: str
) -> None:
    texts = [{"name": name, "text": f"\x1b[2Kstep {k}\n"} for k in range(6)]
    said = [{"header": {"msg_type": "stream"}, "content": each} for each in texts]
    text = render(write_job(tmp_path, said) / "output.ipynb")
    assert "<details><summary>step 5 (6 lines)</summary>" in text
    assert text.count("step 0") == 1
    short = render(write_job(tmp_path, said[:4]) / "output.ipynb")
    assert "lines)</summary>" not in short


def test_no_path_user_or_host_leaves_with_the_report(tmp_path: Path) -> None:
    notebook = v4.new_notebook(
        cells=[
            v4.new_markdown_cell("data from /home/alice/data"),
            v4.new_code_cell(
                "open('/home/alice/x/y.csv')",
                outputs=[
                    v4.new_output("stream", name="stdout", text="wrote /srv/lab/alice/out.bin\n"),
                    v4.new_output(
                        "error",
                        ename="OSError",
                        evalue="bad",
                        traceback=["File \x1b[32m/home/alice/lib/a.py\x1b[39m:3"],
                    ),
                ],
            ),
        ]
    )
    nbformat.write(notebook, tmp_path / "executed.ipynb")
    run = write_run(tmp_path, dataset="/home/alice/mnist.npz")
    text = page(report([run], tmp_path / "report.html", notebook=tmp_path / "executed.ipynb"))
    for word in ("alice", "/home", "/srv", str(tmp_path)):
        assert word not in text
    assert "out.bin" in text
    assert "a.py" in text


def test_what_is_not_a_notebook_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.ipynb").write_text("{")
    run = write_run(tmp_path)
    with pytest.raises(LabkitError, match=r"x\.ipynb is not a notebook") as caught:
        report([run], tmp_path / "report.html", notebook=tmp_path / "x.ipynb")
    assert "\n" not in str(caught.value)


def test_a_link_in_a_job_leads_to_no_notebook_but_one_that_is_named_may(tmp_path: Path) -> None:
    write_job(tmp_path / "private", [output(text_html="a secret")]).rename(tmp_path / "mine")
    job = write_job(tmp_path / "runs")
    run = write_run(job)
    (job / "output.ipynb").unlink()
    (job / "output.ipynb").symlink_to(tmp_path / "mine" / "output.ipynb")
    with pytest.warns(UserWarning, match=r"left out: .*output\.ipynb is a symbolic link"):
        assert "a secret" not in page(report([run], tmp_path / "report.html"))
    with pytest.raises(LabkitError, match="is a symbolic link"):
        notebook_page([job / "output.ipynb"], tmp_path / "page.html", [])
    named = report([run], tmp_path / "report.html", notebook=job / "output.ipynb")
    assert "a secret" in page(named)


def test_runs_of_several_jobs_share_a_page_with_every_command(tmp_path: Path) -> None:
    for workers in (1, 2):
        write_run(write_job(tmp_path, workers=workers), workers=workers)
    text = page(report(tmp_path, tmp_path / "report.html"))
    assert "-p workers 1" in text
    assert "-p workers 2" in text


def test_the_text_of_a_notebook_that_ran_often_stands_once_without_outputs(tmp_path: Path) -> None:
    for workers in (1, 2):
        job = write_job(tmp_path, [output(text_html=f"came to {workers}")], workers=workers)
        executed = nbformat.read(job / "output.ipynb", as_version=4)
        for tag in ("injected-parameters", "papermill-error-cell-tag"):
            cell = v4.new_code_cell(f"{tag}_{workers} = 1", metadata={"tags": [tag]})
            executed.cells.insert(1, cell)
        nbformat.write(executed, job / "output.ipynb")
        write_run(job, workers=workers)
    text = page(report(tmp_path, tmp_path / "report.html"))
    assert text.count("Does it pay?") == 1
    assert text.count("<summary>Code</summary>") == 1
    assert "as all jobs ran it." in text
    for words in ("came to", "injected-parameters_", "papermill-error"):
        assert words not in text


def test_plotly_keeps_its_licence_and_loses_only_the_function_around_it() -> None:
    bundle = (
        "/** MIT */\n(function(root, factory) {}(self, () => {\n"
        '"use strict";var Plotly=(()=>1)();\n'
        "/* window.Plotly = Plotly; */\nwindow.Plotly = Plotly;\nreturn Plotly;\n}));"
    )
    assert unwrap(bundle) == (
        '/** MIT */\n"use strict";var Plotly=(()=>1)();\n'
        "/* window.Plotly = Plotly; */\nwindow.Plotly = Plotly;"
    )
    for other in ("", "var Plotly = 1;", bundle.replace("var Plotly=", "var P=")):
        assert unwrap(other) == other


def test_plotlys_bundle_is_of_the_form_that_is_unwrapped() -> None:
    whole = get_plotlyjs()
    assert len(whole) - 1000 < len(unwrap(whole)) < len(whole)


def test_the_script_of_tables_is_whole_and_gives_jquery_to_the_page() -> None:
    script, styles = tables()
    assert "window.$=" in script
    assert "</script" not in script.lower()
    assert ".dtfc-" in styles


def test_a_failed_gate_is_said_in_the_table_and_no_speed_is(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path),
        write_run(tmp_path, workers=4, measured={"equivalence": FAILED_GATE}),
    ]
    text = page(report(runs, tmp_path / "report.html"))
    assert "failed (max |Δ| 0.25)" in text
    assert "parameters differ from those of one process" in text
    assert text.count("51,200</td>") == 1


def test_runs_without_a_job_have_a_line_that_makes_them_again(tmp_path: Path) -> None:
    experiment = Experiment(
        workers=2, epochs=2, strategy={"name": "AllReduce", "algorithm": "ring"}
    )
    known = experiment.to_json()
    written = {"schema", "steps", "name"}  # these are written by write_run itself
    fields = {name: value for name, value in known.items() if name not in written}
    own = {"callable": "net", "source": "def net(): ..."}
    runs = [
        write_run(tmp_path, **fields),
        write_run(tmp_path, "mine", **fields | {"model": own}),
    ]
    [line] = commands(runs)
    told, command = line.split(" > ")
    record = json.loads(shlex.split(told)[1])
    record.pop("schema", None)
    assert Experiment(**record).hash8 == experiment.hash8
    assert command == "mlp-digits-allreduce-w2.yaml && labkit run mlp-digits-allreduce-w2.yaml"
    assert "labkit run mlp-digits" in page(report(runs, tmp_path / "report.html"))


def test_a_report_from_inside_a_run_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_run(tmp_path).path)
    text = page(report(".", tmp_path / "report.html"))
    assert "<title>mlp-digits-allreduce-w2</title>" in text
