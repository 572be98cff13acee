"""Checks of TensorFlow, Keras, GPUs, Chromium, Slurm, and of Jupyter's figures and widgets."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from labkit.cli.doctor.diagnosis import Diagnosis, last_line, output, python
from labkit.common import keras_settings
from labkit.common.imports import installed
from labkit.communicator import launcher

_TENSORFLOW = """
import json, keras, tensorflow as tf
gpus = len(tf.config.list_physical_devices("GPU"))
print(json.dumps([tf.__version__, keras.__version__, gpus]))
"""
BROWSERS = (
    *("chromium", "chromium-browser", "google-chrome"),
    *(  # On macOS, the programs of applications are not on PATH.
        f"/Applications/{name}.app/Contents/MacOS/{name}" for name in ("Chromium", "Google Chrome")
    ),
)


def tensorflow() -> Iterator[Diagnosis]:
    """Import TensorFlow, and report its version and the GPUs that it finds."""
    installed("tensorflow")
    # A subprocess imports TensorFlow, because a broken TensorFlow may crash the process that
    # imports it.
    done = output([sys.executable, "-P", "-c", _TENSORFLOW], launcher.environment())
    if done.returncode != 0:
        fix = f"{python()} -m pip install --force-reinstall tensorflow=={version('tensorflow')}"
        yield Diagnosis("broken", f"tensorflow: {last_line(done)}", fix)
        return
    tensorflow_version, keras_version, count = json.loads(done.stdout.splitlines()[-1])
    yield Diagnosis("ok", f"tensorflow: {tensorflow_version}, keras {keras_version}")
    yield gpus(count, devices())


def keras() -> Iterator[Diagnosis]:
    """Report the user's Keras settings that differ from the settings that runs use."""
    findings = [
        Diagnosis("note", f"keras: {what}", advice) for what, advice in keras_settings.notes()
    ]
    yield from findings or [Diagnosis("ok", "keras: your Keras settings equal those of runs")]


def devices() -> list[str]:
    """Return the names of the GPUs that the driver lists."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    lines = output([command, "-L"]).stdout.splitlines()
    return [line.split(":")[1].split("(")[0].strip() for line in lines if line.startswith("GPU ")]


def gpus(count: int, names: list[str]) -> Diagnosis:
    """Report which GPU each rank uses, or why TensorFlow does not find all GPUs.

    Args:
        count: Number of GPUs that TensorFlow finds.
        names: Names of the GPUs that the driver lists.
    """
    if count < len(names):
        what = f"gpus: TensorFlow finds {count} of the driver's {len(names)} GPUs ({names[0]})"
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            hidden = f"; CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} hides the others"
            return Diagnosis("note", what + hidden, "unset CUDA_VISIBLE_DEVICES")
        cuda = f"{python()} -m pip install 'tensorflow[and-cuda]=={version('tensorflow')}'"
        return Diagnosis("note", what, cuda)
    if not count:
        return Diagnosis("ok", "gpus: none found; ranks compute on CPU cores")
    shares = ", ".join(f"rank {rank} takes GPU {rank % count}" for rank in range(count + 1))
    return Diagnosis("ok", f"gpus: {count}; on a host {shares}, …")


def chromium() -> Iterator[Diagnosis]:
    """Report the browser that takes screenshots and runs the browser tests."""
    command = next(filter(None, map(shutil.which, BROWSERS)), None)
    mac = sys.platform == "darwin"
    if command is None:
        what = "chromium: not found; only browser tests need Chromium"
        fix = "brew install --cask chromium" if mac else "apt-get install chromium"
        yield Diagnosis("note", what, fix)
        return
    done = output([command, "--version"])
    if done.returncode == 0 and done.stdout.strip():
        yield Diagnosis("ok", f"chromium: {done.stdout.strip()}")
    else:
        again = "brew reinstall --cask" if mac else "apt-get install --reinstall"
        fix = f"{again} chromium"
        yield Diagnosis("note", f"chromium: {last_line(done)}", fix)


def slurm() -> Iterator[Diagnosis]:
    """Report the nodes of the Slurm cluster, if there is a Slurm cluster."""
    command = shutil.which("sinfo")
    if command is None:
        yield Diagnosis("ok", "slurm: not installed; ranks start on this machine")
        return
    done = output([command, "--noheader", "--format=%P %D %t"])
    if done.returncode != 0 or not done.stdout.strip():
        fix = "systemctl restart munge slurmctld slurmd  # then: sinfo"
        yield Diagnosis("note", f"slurm: sinfo: {last_line(done)}", fix)
        return
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()]
    shown = ", ".join(f"{count} {state} in {partition}" for partition, count, state in rows)
    job = os.environ.get("SLURM_JOB_ID")
    yield Diagnosis("ok", f"slurm: nodes: {shown}{f'; in allocation {job}' if job else ''}")


# Live figures in a notebook need some JupyterLab extensions. The dictionary EXTENSIONS maps each
# JupyterLab extension to its Python package.
EXTENSIONS = {"@jupyter-widgets/jupyterlab-manager": "jupyterlab_widgets", "anywidget": "anywidget"}


def plotly() -> Iterator[Diagnosis]:
    """Check that Plotly can be imported with the renderer that PLOTLY_RENDERER names."""
    chosen = os.environ.get("PLOTLY_RENDERER")
    try:
        from plotly.io import renderers  # noqa: F401
    except ValueError:  # The import of plotly fails if PLOTLY_RENDERER names an unknown renderer.
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
            # Older configuration files contain the disabled extensions as a list of names. A plugin
            # of an extension has a name of the form "extension:plugin".
            names = (
                entries
                if isinstance(entries, list)
                else [name for name in entries if entries[name]]
            )
            extensions |= {name.split(":")[0] for name in names}
    return extensions


def kernel() -> Iterator[Diagnosis]:
    """Check that JupyterLab's kernel python3 runs this interpreter, like `labkit run`."""
    installed("ipykernel")
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
