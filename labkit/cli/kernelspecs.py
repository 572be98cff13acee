"""Kernels of JupyterLab, which import installed modules before those beside their notebook."""

from __future__ import annotations

from itertools import pairwise

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

MODULES = ("ipykernel_launcher", "ipykernel")
# Python puts the folder of the notebook first for `-m` and `-c`, and IPython before what is
# installed unless it stands anywhere. No option and no variable: subprocesses of cells keep theirs.
LAUNCH = (
    "import sys; sys.path[:] = [*filter(None, sys.path), '']; "
    "from ipykernel import kernelapp; kernelapp.launch_new_instance()"
)


class KernelSpecs(KernelSpecManager):
    """Finds the kernels that Jupyter knows; those of IPython begin with LAUNCH."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """Return how a kernel of this name is started."""
        spec = super().get_kernel_spec(kernel_name)
        words = spec.argv
        for place, (option, module) in enumerate(pairwise(words)):
            if option == "-m" and module in MODULES:
                words[place : place + 2] = ["-c", LAUNCH]
                break
        return spec
