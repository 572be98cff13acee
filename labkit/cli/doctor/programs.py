"""Other programs: TensorFlow and its devices, and those that labkit can do without."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import version

from labkit.cli.doctor.diagnosis import Finding, last_line, output, python
from labkit.communicator import launcher

_TENSORFLOW = """
import json, keras, tensorflow as tf
gpus = len(tf.config.list_physical_devices("GPU"))
print(json.dumps([tf.__version__, keras.__version__, gpus]))
"""
BROWSERS = (
    *("chromium", "chromium-browser", "google-chrome"),
    *(  # macOS puts no programs of windows on PATH
        f"/Applications/{name}.app/Contents/MacOS/{name}" for name in ("Chromium", "Google Chrome")
    ),
)


def tensorflow() -> Iterator[Finding]:
    """TensorFlow for real, and the devices that it finds."""
    # A process of its own: a TensorFlow that is broken may take its process with it.
    done = output([sys.executable, "-P", "-c", _TENSORFLOW], launcher.environment())
    if done.returncode != 0:
        fix = f"{python()} -m pip install --force-reinstall tensorflow=={version('tensorflow')}"
        yield Finding("broken", f"tensorflow: {last_line(done)}", fix)
        return
    own, keras, found = json.loads(done.stdout.splitlines()[-1])
    yield Finding("ok", f"tensorflow: {own}, keras {keras}")
    yield gpus(found, devices())


def devices() -> list[str]:
    """The GPUs that the driver knows, by name."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    lines = output([command, "-L"]).stdout.splitlines()
    return [line.split(":")[1].split("(")[0].strip() for line in lines if line.startswith("GPU ")]


def gpus(found: int, there: list[str]) -> Finding:
    """Which rank takes which GPU.

    Args:
        found: how many TensorFlow finds.
        there: those that the driver knows.
    """
    if found < len(there):
        what = f"gpus: TensorFlow finds {found} of {len(there)} ({there[0]})"
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            hidden = f"; CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} hides the others"
            return Finding("note", what + hidden, "unset CUDA_VISIBLE_DEVICES")
        cuda = f"{python()} -m pip install 'tensorflow[and-cuda]=={version('tensorflow')}'"
        return Finding("note", what, cuda)
    if not found:
        return Finding("ok", "gpus: none; ranks compute on cores")
    shares = ", ".join(f"rank {rank} takes GPU {rank % found}" for rank in range(found + 1))
    return Finding("ok", f"gpus: {found}; on a host {shares}, …")


def chromium() -> Iterator[Finding]:
    """The browser of the browser tests and of screenshots."""
    command = next(filter(None, map(shutil.which, BROWSERS)), None)
    mac = sys.platform == "darwin"
    if command is None:
        what = "chromium: none; only the browser tests want it"
        fix = "brew install --cask chromium" if mac else "apt-get install chromium"
        yield Finding("note", what, fix)
        return
    done = output([command, "--version"])
    if done.returncode == 0 and done.stdout.strip():
        yield Finding("ok", f"chromium: {done.stdout.strip()}")
    else:
        again = "brew reinstall --cask" if mac else "apt-get install --reinstall"
        fix = f"{again} chromium"
        yield Finding("note", f"chromium: {last_line(done)}", fix)


def slurm() -> Iterator[Finding]:
    """The queue of a computing centre, where there is one."""
    command = shutil.which("sinfo")
    if command is None:
        yield Finding("ok", "slurm: none; ranks start on this machine")
        return
    done = output([command, "--noheader", "--format=%P %D %t"])
    if done.returncode != 0 or not done.stdout.strip():
        fix = "systemctl restart munge slurmctld slurmd  # then: sinfo"
        yield Finding("note", f"slurm: sinfo: {last_line(done)}", fix)
        return
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()]
    shown = ", ".join(f"{count} {state} in {partition}" for partition, count, state in rows)
    job = os.environ.get("SLURM_JOB_ID")
    yield Finding("ok", f"slurm: nodes: {shown}{f'; in allocation {job}' if job else ''}")
