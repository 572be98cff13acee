"""Test that a user can play the message trace of a report without a mouse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_runs import output, write_job, write_run

from labkit.figures import message_trace
from labkit.figures.kit.canvas import Figure
from labkit.report import report
from tests.acceptance.report import READ

pytestmark = pytest.mark.slow


def test_keys_move_through_the_rounds_of_a_message_trace(page: Any, tmp_path: Path) -> None:
    trace = Figure._repr_mimebundle_(message_trace("ring", 3))["application/vnd.plotly.v1+json"]
    job = write_job(tmp_path / "runs", [output(**{"application_vnd.plotly.v1+json": trace})])
    write_run(job)
    page.goto(report(job, tmp_path / "report.html").as_uri())
    page.wait_for_selector("html[data-first]", timeout=120_000)
    page.evaluate(READ)
    page.wait_for_selector("html[data-drawn]", timeout=120_000)
    bar, drawn = page.locator(".frames"), page.locator(".notebook svg text")
    bar.locator("input").focus()
    assert bar.locator("output").text_content() == "after round 1 of 4"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    drawn.filter(has_text="round 3 of 4").first.wait_for()
    assert bar.locator("output").text_content() == "after round 3 of 4"
    bar.locator("button").evaluate(
        """(button) => { window.said = []; new MutationObserver(
            () => said.push(button.textContent)).observe(button, { childList: true }); }"""
    )
    bar.locator("button").press("Enter")
    drawn.filter(has_text="round 4 of 4").first.wait_for()
    page.wait_for_function("said.join() === 'pause,play'")
    assert page.locator(".updatemenu-button, .slider-group").count() == 0
