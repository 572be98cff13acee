"""A kernel that is there at once: a process that has imported everything and becomes one.

An interpreter that starts anew for each notebook spends two seconds on the same imports. Here a
process is forked that has done them, before it has any thread or socket, and waits for its orders.
It is a process of its own as any kernel is; it shares with others only memory pages never written.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
import traceback
from typing import Any, NoReturn

from jupyter_client.provisioning.local_provisioner import LocalProvisioner


class Embryo:
    """A forked process that waits to become a kernel; afterwards what `Popen` is to others."""

    stdin = stdout = stderr = None

    def __init__(self) -> None:
        orders, self._pipe = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._pipe)
            _become_kernel(orders)
        os.close(orders)

    def launch(self, arguments: list[str], environment: dict[str, str]) -> None:
        """Become the kernel with these arguments."""
        with os.fdopen(self._pipe, "w") as pipe:
            json.dump([arguments, environment], pipe)

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        """Wait for the end."""
        while (code := self.poll()) is None:
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


class Provisioner(LocalProvisioner):
    """What jupyter_client starts and signals kernels with, here with an Embryo."""

    embryo: Embryo

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:
        """Let the embryo become the kernel."""
        self.embryo.launch(cmd[cmd.index("labkit.jobs.kernel") + 1 :], kwargs["env"])
        self.process = self.embryo
        self.pid = self.pgid = self.embryo.pid
        return self.connection_info


def provisioner(embryo: Embryo, **given: Any) -> Provisioner:
    """A provisioner for this embryo."""
    made = Provisioner(**given)
    made.embryo = embryo
    return made


def prepare() -> None:
    """Import what kernels import."""
    import ipykernel.ipkernel
    import ipykernel.zmqshell  # noqa: F401
    import ipyparallel  # noqa: F401

    import labkit.jobs.kernel  # noqa: F401


def _become_kernel(orders: int) -> NoReturn:
    """Wait for the order, be the kernel, and end as an interpreter ends."""
    code = 1
    try:
        os.setsid()
        with os.fdopen(orders) as pipe:
            text = pipe.read()
        if text:  # else its job has ended without it
            arguments, environment = json.loads(text)
            os.environ.clear()
            os.environ.update(environment)
            _run_kernel(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """End a forked process, whatever happens: what stands below on its stack is another's work."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run_kernel(arguments: list[str]) -> None:
    from labkit.jobs.kernel import LosslessKernel

    sys.modules.pop("rfc3987_syntax", None)  # a notebook may want it
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()  # else all members would draw the same numbers
    sys.argv = ["labkit.kernel", *arguments]
    # Given here, as ipykernel reads the variable when it is imported.
    LosslessKernel.launch_instance(arguments, parent_handle=os.getppid())
    atexit._run_exitfuncs()
