"""Test that the doctor names missing parts of live figures, in the kernel or in JupyterLab."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.cli.doctor import programs


def test_a_renderer_that_plotly_does_not_know_is_broken() -> None:
    script = "from labkit.cli.doctor import programs; print(next(programs.plotly()).line)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PLOTLY_RENDERER": "crayon"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("broken  plotly: PLOTLY_RENDERER=crayon is not a renderer")
    assert done.stdout.endswith("fix: unset PLOTLY_RENDERER\n")


def test_another_kernel_under_the_name_python3_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text('{"argv": ["/opt/other/python"], "display_name": "x", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    (found,) = programs.kernel()
    assert found.state == "note"
    assert "ipykernel install --sys-prefix" in found.fix


def test_an_extension_that_is_not_there_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brought = {**programs.EXTENSIONS, "@nobody/has-this": "nothing"}
    monkeypatch.setattr(programs, "EXTENSIONS", brought)
    (found,) = programs.widgets()
    assert "JupyterLab lacks the extensions @nobody/has-this" in found.what
    assert found.fix.endswith("pip install --force-reinstall --no-deps nothing")


@pytest.mark.parametrize("off", [["anywidget"], {"anywidget:plugin": True, "other": True}])
def test_an_extension_that_is_switched_off_is_noted(
    off: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = programs.widgets()
    assert found.state == "ok"
    page = tmp_path / "labconfig" / "page_config.json"
    page.parent.mkdir()
    page.write_text(json.dumps({"disabledExtensions": off}))
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(tmp_path))
    (found,) = programs.widgets()
    assert (found.state, found.fix) == ("note", "jupyter labextension enable anywidget")
