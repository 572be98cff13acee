"""What JupyterLab needs for live figures and for a kernel that is this interpreter."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from labkit.cli.doctor.diagnosis import Finding, python

# What figures that change are made of in the browser, and the package that brings each.
EXTENSIONS = {"@jupyter-widgets/jupyterlab-manager": "jupyterlab_widgets", "anywidget": "anywidget"}


def plotly() -> Iterator[Finding]:
    """The figures."""
    chosen = os.environ.get("PLOTLY_RENDERER")
    try:
        from plotly.io import renderers  # noqa: F401
    except ValueError:  # plotly refuses to be imported with a renderer that it does not know
        what = f"plotly: PLOTLY_RENDERER={chosen} is no renderer of plotly's"
        yield Finding("broken", what, "unset PLOTLY_RENDERER")
    else:
        shown = chosen or "of its own choice"
        yield Finding("ok", f"plotly: {version('plotly')}, renderer {shown}")


def widgets() -> Iterator[Finding]:
    """Whether JupyterLab finds what draws figures that change, as they do while ranks work."""
    import anywidget  # noqa: F401  (the kernel's half)
    from jupyter_core.paths import jupyter_path

    folders = [Path(folder) for folder in jupyter_path("labextensions")]
    absent = [name for name in EXTENSIONS if not any((path / name).is_dir() for path in folders)]
    if absent:
        packages = " ".join(EXTENSIONS[name] for name in absent)
        what = f"widgets: JupyterLab does not have {', '.join(absent)}: live figures stay empty"
        fix = f"{python()} -m pip install --force-reinstall --no-deps {packages}"
        yield Finding("note", what, fix)
        return
    off = sorted(_disabled() & EXTENSIONS.keys())
    if off:
        what = f"widgets: disabled in JupyterLab: {', '.join(off)}"
        yield Finding("note", what, f"jupyter labextension enable {' '.join(off)}")
    else:
        yield Finding("ok", f"widgets: anywidget {version('anywidget')}; live figures grow")


def _disabled() -> set[str]:
    """Extensions that a user or an administrator has switched off."""
    from jupyter_core.paths import jupyter_config_path

    found: set[str] = set()
    for folder in jupyter_config_path():
        path = Path(folder) / "labconfig" / "page_config.json"
        if path.is_file():
            given = json.loads(path.read_text()).get("disabledExtensions", {})
            # Older ones are a list; a plugin of an extension is "extension:plugin".
            names = given if isinstance(given, list) else [name for name in given if given[name]]
            found |= {name.split(":")[0] for name in names}
    return found


def kernel() -> Iterator[Finding]:
    """`labkit run` always takes this interpreter; JupyterLab takes what is installed."""
    from jupyter_client.kernelspec import KernelSpecManager

    found = KernelSpecManager().get_kernel_spec("python3").argv[0]
    ours = {"python", "python3", f"python3.{sys.version_info.minor}", sys.executable}
    if found in ours or Path(found).absolute() == Path(sys.executable).absolute():
        yield Finding("ok", "kernel: JupyterLab's python3 is this interpreter")
    else:
        fix = f"{python()} -m ipykernel install --sys-prefix"
        yield Finding("note", f"kernel: JupyterLab's python3 is {found}, not this one", fix)
