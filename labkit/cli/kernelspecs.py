"""JupyterLab kernels that prefer installed modules over modules in the notebook's folder."""

from __future__ import annotations

from itertools import pairwise

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

MODULES = ("ipykernel_launcher", "ipykernel")
# With the options `-m` and `-c`, Python puts the current folder first on sys.path. For a kernel,
# the current folder is the notebook's folder. The code in LAUNCH moves the current folder from the
# start to the end of sys.path. The current folder must stay in sys.path: if it were absent, IPython
# would insert it at the front. The code in LAUNCH changes sys.path only in the kernel, not in the
# subprocesses that cells start. A Python option or an environment variable would also change
# sys.path in the subprocesses that cells start.
LAUNCH = (
    "import sys; sys.path[:] = [*filter(None, sys.path), '']; "
    "from ipykernel import kernelapp; kernelapp.launch_new_instance()"
)


class KernelSpecs(KernelSpecManager):
    """A kernel spec manager that starts IPython kernels with the code in LAUNCH."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """Return the named kernel spec; if it is an IPython kernel, its command runs LAUNCH."""
        spec = super().get_kernel_spec(kernel_name)
        words = spec.argv
        for place, (option, module) in enumerate(pairwise(words)):
            if option == "-m" and module in MODULES:
                words[place : place + 2] = ["-c", LAUNCH]
                break
        return spec
