"""JupyterLab as `labkit lab` starts it, in a separate folder, and a notebook page in a browser.

The same server also offers Notebook 7.
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
    # JupyterLab also renders cells outside the window, and does not ask whether to show news.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
}


@contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """Start JupyterLab in a folder that contains `notebooks`; yield the server's address."""
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
    """The page of a notebook in JupyterLab ("lab") or in Notebook 7 ("notebook")."""

    def __init__(self, page: Any, address: str, name: str, app: str = "lab") -> None:
        self.page, self._app = page, app
        place = {"lab": "lab/tree/notebooks", "notebook": "notebooks/notebooks"}[app]
        page.goto(f"{address}/{place}/{name}?reset&token={TOKEN}", timeout=120_000)
        # If a user runs cells before the kernel is ready, Jupyter asks which kernel to use.
        if app == "lab":
            page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=120_000)
        else:
            page.locator("[data-status=idle]").wait_for(state="attached", timeout=120_000)

    def save(self, file: Path, what: str) -> None:
        """Save the notebook repeatedly, until its file contains a given text."""
        for _ in range(60):
            self.page.keyboard.press("Control+s")
            self.page.wait_for_timeout(1000)
            if what in file.read_text():
                return
        raise AssertionError(f"{file.name} was saved without {what}")

    def reload(self, what: str) -> None:
        """Reload the page until it shows an element, without the message "model not found".

        Jupyter's widgets look for their model for two seconds. If the kernel answers just when they
        give up, they never look again, and a user would reload the page.
        """
        for _ in range(4):
            self.page.reload(timeout=120_000)
            lost = self.page.get_by_text("model not found")
            self.page.locator(what).or_(lost).first.wait_for(timeout=120_000)
            if not lost.count():
                return
        raise AssertionError(f"no {what} on a page that was loaded anew")

    def run_all(self) -> None:
        """Choose Run > Run All Cells; Notebook 7 may ignore it before its kernel is ready."""
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
        """Return the code cell whose source contains a text."""
        return self.page.locator(".jp-CodeCell").filter(
            has=self.page.locator(".jp-InputArea-editor", has_text=text)
        )

    def wait_until_run(self, seconds: float = 240) -> None:
        """Wait until every code cell shows its execution number."""
        self.page.wait_for_function(
            """() => [...document.querySelectorAll(".jp-CodeCell .jp-InputPrompt")].every(
                (prompt) => /^\\[\\d+\\]:$/.test(prompt.textContent.trim()))""",
            timeout=1000 * seconds,
        )

    def troubles(self) -> list[str]:
        """Return the texts of dialogs and errors that a user would see."""
        error = "[data-mime-type='application/vnd.jupyter.error']"
        return [each.inner_text() for each in self.page.locator(f".jp-Dialog, {error}").all()]
