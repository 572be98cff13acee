"""Checks of JupyterLab: Plotly, widgets for live figures, and the kernel's interpreter."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from labkit.cli.doctor.diagnosis import Diagnosis, python

# `EXTENSIONS` maps each JupyterLab extension that live figures need to the Python package that
# provides the extension.
EXTENSIONS = {"@jupyter-widgets/jupyterlab-manager": "jupyterlab_widgets", "anywidget": "anywidget"}


def plotly() -> Iterator[Diagnosis]:
    """Check that Plotly can be imported with the renderer that PLOTLY_RENDERER names."""
    chosen = os.environ.get("PLOTLY_RENDERER")
    try:
        from plotly.io import renderers  # noqa: F401
    except ValueError:  # plotly's import fails if the renderer is unknown
        what = f"plotly: PLOTLY_RENDERER={chosen} is not a renderer of Plotly"
        yield Diagnosis("broken", what, "unset PLOTLY_RENDERER")
    else:
        shown = chosen or "chosen by Plotly"
        yield Diagnosis("ok", f"plotly: {version('plotly')}, renderer {shown}")


def widgets() -> Iterator[Diagnosis]:
    """Check that JupyterLab has the extensions that draw live figures."""
    import anywidget  # noqa: F401 (the kernel needs anywidget, too)
    from jupyter_core.paths import jupyter_path

    folders = [Path(folder) for folder in jupyter_path("labextensions")]
    absent = [name for name in EXTENSIONS if not any((path / name).is_dir() for path in folders)]
    if absent:
        packages = " ".join(EXTENSIONS[name] for name in absent)
        what = (
            f"widgets: JupyterLab lacks the extensions {', '.join(absent)}; live figures stay empty"
        )
        fix = f"{python()} -m pip install --force-reinstall --no-deps {packages}"
        yield Diagnosis("note", what, fix)
        return
    disabled = sorted(_disabled() & EXTENSIONS.keys())
    if disabled:
        what = f"widgets: these extensions are disabled in JupyterLab: {', '.join(disabled)}"
        yield Diagnosis("note", what, f"jupyter labextension enable {' '.join(disabled)}")
    else:
        yield Diagnosis("ok", f"widgets: anywidget {version('anywidget')}; live figures work")


def _disabled() -> set[str]:
    """Return the extensions that a user or an administrator has disabled."""
    from jupyter_core.paths import jupyter_config_path

    extensions: set[str] = set()
    for folder in jupyter_config_path():
        path = Path(folder) / "labconfig" / "page_config.json"
        if path.is_file():
            entries = json.loads(path.read_text()).get("disabledExtensions", {})
            # In older configuration files, the disabled extensions are a list of names. A plugin of
            # an extension has a name of the form "extension:plugin".
            names = (
                entries
                if isinstance(entries, list)
                else [name for name in entries if entries[name]]
            )
            extensions |= {name.split(":")[0] for name in names}
    return extensions


def kernel() -> Iterator[Diagnosis]:
    """Check that JupyterLab's kernel python3 runs this interpreter, like `labkit run`."""
    from jupyter_client.kernelspec import KernelSpecManager

    command = KernelSpecManager().get_kernel_spec("python3").argv[0]
    ours = {"python", "python3", f"python3.{sys.version_info.minor}", sys.executable}
    if command in ours or Path(command).absolute() == Path(sys.executable).absolute():
        yield Diagnosis("ok", "kernel: JupyterLab's kernel python3 runs this Python interpreter")
    else:
        fix = f"{python()} -m ipykernel install --sys-prefix"
        yield Diagnosis(
            "note",
            f"kernel: JupyterLab's kernel python3 runs {command}, not this Python interpreter",
            fix,
        )
