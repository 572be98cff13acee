"""Test that Jupyter kernels run no module beside a notebook unless the notebook imports it."""

from __future__ import annotations

from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import KernelManager

from labkit.cli.kernelspecs import LAUNCH, KernelSpecs

CELL = """
import os, sys, numpy, beside
print(numpy.__name__, beside.__file__, "PYTHONSAFEPATH" in os.environ, sys.flags.safe_path)
"""


def test_a_module_beside_a_notebook_hides_no_installed_one(tmp_path: Path) -> None:
    for name in ("ipykernel", "ipykernel_launcher", "traitlets", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of a stranger ran')")
    (tmp_path / "beside.py").touch()
    manager = KernelManager(kernel_spec_manager=KernelSpecs())
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        said: list[str] = []
        client.execute_interactive(
            CELL, timeout=60, output_hook=lambda each: said.append(str(each["content"]))
        )
        told = "".join(said)
        assert f"numpy {tmp_path / 'beside.py'} False False" in told
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-m", "ipykernel_launcher", "-f", "{}"], ["-c", LAUNCH, "-f", "{}"]),
        (["-Xfrozen_modules=off", "-m", "ipykernel"], ["-Xfrozen_modules=off", "-c", LAUNCH]),
        (["-m", "bash_kernel", "-f", "{}"], ["-m", "bash_kernel", "-f", "{}"]),
    ],
)
def test_only_kernels_of_ipython_are_started_otherwise(
    words: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = KernelSpec(argv=["python", *words])
    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", lambda self, name: known)
    assert KernelSpecs().get_kernel_spec("any").argv == ["python", *expected]
