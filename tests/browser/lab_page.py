"""JupyterLab as `labkit lab` opens it, in a folder of its own, and a notebook in a browser.

The same server has Notebook 7, too.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOKEN = "labkit-test"
SETTINGS = {
    # Cells outside the window are drawn, too; nobody is asked for news.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
}


@contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """The address of a JupyterLab that serves a folder with a `notebooks` in it."""
    own = folder / "jupyter"
    for name, values in SETTINGS.items():
        file = own / "settings" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    places = {
        "JUPYTER_CONFIG_DIR": own,
        "JUPYTER_DATA_DIR": own / "data",
        "JUPYTER_RUNTIME_DIR": own / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": own / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": own / "workspaces",
        "IPYTHONDIR": own / "ipython",
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from labkit.cli.app import app; app()", "lab", "--no-browser"]
    options = [f"--port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}"]
    log = (folder / "jupyter.log").open("wb")
    server = subprocess.Popen(
        [*command, *options],
        cwd=folder,
        env=os.environ | {name: str(place) for name, place in places.items()},
        stdout=log,
        stderr=log,
    )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_for(f"{address}/api/status?token={TOKEN}", server, folder / "jupyter.log")
        yield address
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(120)
        finally:
            server.kill()
            log.close()


def _wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(address, timeout=30).close()
        except (urllib.error.URLError, OSError):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        else:
            return


class Notebook:
    """A notebook in JupyterLab ("lab") or Notebook 7 ("notebook"), as a person sees it."""

    def __init__(self, page: Any, address: str, name: str, app: str = "lab") -> None:
        self.page, self._app = page, app
        place = {"lab": "lab/tree/notebooks", "notebook": "notebooks/notebooks"}[app]
        page.goto(f"{address}/{place}/{name}?reset&token={TOKEN}", timeout=120_000)
        # Who asks for a run before the kernel is there is asked which one it shall be.
        if app == "lab":
            page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=120_000)
        else:
            page.locator("[data-status=idle]").wait_for(state="attached", timeout=120_000)

    def save(self, file: Path, what: str) -> None:
        """Save, until the file holds something that stands in the notebook."""
        for _ in range(60):
            self.page.keyboard.press("Control+s")
            self.page.wait_for_timeout(1000)
            if what in file.read_text():
                return
        raise AssertionError(f"{file.name} was saved without {what}")

    def reload(self, what: str) -> None:
        """Load the page anew, until an element is there again.

        For two seconds Jupyter's widgets look for a model; where the kernel's answer comes just
        as they give up they never look again, and a person would load the page once more.
        """
        for _ in range(4):
            self.page.reload(timeout=120_000)
            lost = self.page.get_by_text("model not found")
            self.page.locator(what).or_(lost).first.wait_for(timeout=120_000)
            if not lost.count():
                return
        raise AssertionError(f"no {what} on a page that was loaded anew")

    def run_all(self) -> None:
        """Run > Run All Cells; Notebook 7 says idle, and forgets it, before it has a kernel."""
        asked = self.page.locator(".jp-CodeCell .jp-InputPrompt", has_text=re.compile(r"\[[*\d]"))
        for _ in range(60):
            self.page.get_by_role("menuitem", name="Run", exact=True).click()
            self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
            if self._app == "lab":
                return
            self.page.wait_for_timeout(2000)
            if asked.count():
                return
        raise AssertionError("no cell was run")

    def cell(self, text: str) -> Any:
        """The code cell whose source holds a text."""
        return self.page.locator(".jp-CodeCell").filter(
            has=self.page.locator(".jp-InputArea-editor", has_text=text)
        )

    def wait_until_run(self, seconds: float = 240) -> None:
        """Until every code cell has its number."""
        self.page.wait_for_function(
            """() => [...document.querySelectorAll(".jp-CodeCell .jp-InputPrompt")].every(
                (prompt) => /^\\[\\d+\\]:$/.test(prompt.textContent.trim()))""",
            timeout=1000 * seconds,
        )

    def troubles(self) -> list[str]:
        """Dialogs and errors that a person would see."""
        error = "[data-mime-type='application/vnd.jupyter.error']"
        return [each.inner_text() for each in self.page.locator(f".jp-Dialog, {error}").all()]
