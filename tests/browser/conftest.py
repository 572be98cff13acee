"""Fixtures: the system's Chromium without a network, and a page that records its requests."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # the folder of sample_runs.py

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
PATIENCE = 120.0  # timeout for tasks that take one second on an idle machine


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Yield a headless Chromium; without Chromium, skip the browser tests, or fail them in CI."""
    if not CHROMIUM:
        say = pytest.fail if "CI" in os.environ else pytest.skip
        say("no Chromium found: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=1e3 * PATIENCE
        )
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Yield an offline page whose `requests` lists all its requests; page errors fail the test."""
    context = browser.new_context(viewport={"width": 1200, "height": 1000}, offline=True)
    context.set_default_timeout(1e3 * PATIENCE)
    page = context.new_page()
    page.requests, page.errors = [], []
    page.on("request", lambda request: page.requests.append(request.url))
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on(
        "console",
        lambda message: page.errors.append(message.text) if message.type == "error" else None,
    )
    yield page
    context.close()
    assert page.errors == []
