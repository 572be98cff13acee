"""A child process that a rank starts, sends requests to, and ends."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Thread
from typing import TYPE_CHECKING, Any

from labkit.common import imports
from labkit.common.errors import LabkitError
from labkit.frameworks import foreign

if TYPE_CHECKING:
    from labkit.communicator import Communicator

# `FOREIGN` lists the prefixes of environment variables that would make a child process an MPI rank.
FOREIGN = ("OMPI_", "PMIX_", "PRTE_")
EXIT_TIMEOUT = 5.0  # seconds that `close` waits until the child ends
# An error message is cut to this number of characters, because TensorFlow's messages are long.
MAX_ERROR_LENGTH = 1000


class Child:
    """A child process that runs a Python module and answers requests, one at a time.

    The first message to the child is its task; the child answers this message when it is ready.
    Each later message to the child consists of a function's name and arguments. The child answers
    with the function's result. If the child raises an exception, the parent process raises the same
    exception. The child ends when its parent process ends for any reason.

    Args:
        module: Module to run, which calls `serve`.
        name: Name of the child's task in error messages, such as "worker 1".
        task: First message to the child.
        communicator: Communicator of the ranks whose children train together; if one child fails,
            no rank waits forever.
        threads: Number of compute threads of the child.
        python: Path of another Python interpreter, in which labkit need not be installed. By
            default, the child uses the interpreter of this process.
        inside: Words before the child's command, for example to enter a network namespace; default:
            none.
        gpus: True if the child may use this machine's GPUs; default: False.
    """

    def __init__(
        self,
        module: str,
        name: str,
        task: object,
        communicator: Communicator,
        threads: int,
        python: str | None = None,
        inside: Sequence[str] = (),
        gpus: bool = False,
    ) -> None:
        self.name = name
        self._patience = communicator.wait_policy
        self._open = resources = ExitStack()
        self._pipe, other = Pipe()
        run = [sys.executable, "-P", "-m"] if python is None else [python, foreign.__file__]
        self._output = resources.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._process = subprocess.Popen(
            [*inside, *run, module, name, str(other.fileno())],
            env=outside_mpi(python or sys.executable) | computing(threads, gpus),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=[other.fileno()],
            start_new_session=True,  # Ctrl-C in the rank's terminal does not interrupt the child.
        )
        # The parent process closes its copy of the child's pipe end. An open copy would hide the
        # end of the child from the parent.
        other.close()
        self._send(task)

    @property
    def pid(self) -> int:
        """The process number (PID) of the child."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """True if the child process has ended."""
        return self._process.poll() is not None

    def ask(
        self, request: str, *arguments: object, while_waiting: Callable[[], None] = lambda: None
    ) -> Any:
        """Send a request to the child, and return the answer.

        Args:
            request: Name of the child's function to call.
            arguments: Arguments of the function.
            while_waiting: Function to call while this process waits, at every 256th poll of the
                connection.
        """
        self._send((request, *arguments))
        return self.answer(request, while_waiting)

    def answer(
        self, request: str = "start", while_waiting: Callable[[], None] = lambda: None
    ) -> Any:
        """Return the child's next answer; the first answer reports that the child is ready."""
        self._patience.name_call(f"{request!r} of {self.name}", collective=False)
        self._patience.start_wait()
        polls = 0
        while not self._pipe.poll():
            self._patience.pause(polls)
            polls += 1
            if polls % 256 == 0:
                while_waiting()
        try:
            answer = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._early_end() from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        """Close the connection, which ends the child; kill the child after a timeout."""
        self._pipe.close()
        try:
            self._process.wait(EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        self._open.close()

    def last_output(self) -> str:
        """Return the last line of the child's output, or its exit code."""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        nonempty_lines = [line.strip() for line in lines if line.strip()]
        return nonempty_lines[-1] if nonempty_lines else f"exit code {self._process.poll()}"

    def _send(self, message: object) -> None:
        # Child processes use the same module and may lack cloudpickle. Only this function therefore
        # imports cloudpickle.
        import cloudpickle

        try:
            self._pipe.send_bytes(cloudpickle.dumps(message))
        except OSError:
            raise self._early_end() from None

    def _early_end(self) -> LabkitError:
        with suppress(subprocess.TimeoutExpired):
            # The child's output is complete only after the child has ended.
            self._process.wait(EXIT_TIMEOUT)
        return LabkitError(f"{self.name} ended early: {self.last_output()}")


def serve(calls_of: Callable[[Any], Mapping[str, Callable[..., object]]]) -> None:
    """Receive a task, report readiness, and answer requests until the parent process ends.

    The child ends immediately when its parent ends, even during a step.

    Args:
        calls_of: Function that takes the task and returns functions that answer requests. The
            result maps each request name to its function.
    """
    imports.append_inherited()  # The task may refer to modules in the notebook's folder.
    end = Connection(int(sys.argv[2]))
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    Thread(target=_receive_messages, args=(end, messages), daemon=True).start()
    try:
        calls = calls_of(pickle.loads(messages.get()))
    except Exception as error:  # The parent raises errors of the task when it starts the child.
        _answer(end, error)
        raise
    _answer(end, None)
    while True:
        name, *arguments = pickle.loads(messages.get())
        try:
            answer = calls[name](*arguments)
        # An error becomes the answer to the request, so that the parent process can raise the
        # error.
        except Exception as error:
            answer = error
        _answer(end, answer)


def _answer(end: Connection, answer: object) -> None:
    if isinstance(answer, Exception) and not isinstance(answer, LabkitError):
        text = " ".join(str(answer).split())[:MAX_ERROR_LENGTH]
        answer = LabkitError(f"{sys.argv[1]}: {type(answer).__name__}: {text}")
    end.send_bytes(pickle.dumps(answer))


def _receive_messages(end: Connection, messages: queue.SimpleQueue[bytes]) -> None:
    """Receive messages in a thread, which detects the parent's end even during a training step."""
    with suppress(EOFError, OSError):
        while True:
            messages.put(end.recv_bytes())
    os._exit(0)  # A normal exit may hang in TensorFlow's communication threads.


def environment(python: str) -> dict[str, str]:
    """Return the environment variables for a child process with the interpreter `python`."""
    # With PYTHONPATH or PYTHONHOME, another Python interpreter would import packages of the
    # interpreter that runs labkit.
    python_variables = () if python == sys.executable else ("PYTHONPATH", "PYTHONHOME")
    return {name: value for name, value in os.environ.items() if name not in python_variables}


def outside_mpi(python: str) -> dict[str, str]:
    """Return the variables of `environment` without those that make a process an MPI rank."""
    return {k: v for k, v in environment(python).items() if not k.startswith(FOREIGN)}


def computing(threads: int, gpus: bool = False) -> dict[str, str]:
    """Return environment variables that set the number of threads, and hide GPUs unless `gpus`."""
    gpu_variables = {} if gpus else {"CUDA_VISIBLE_DEVICES": "-1"}
    return gpu_variables | {
        "TF_NUM_INTRAOP_THREADS": str(threads),
        # TensorFlow needs at least two inter-op threads, because one thread may wait for a message.
        "TF_NUM_INTEROP_THREADS": str(max(threads, 2)),
        "OMP_NUM_THREADS": str(threads),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "no_proxy": "127.0.0.1,localhost",
    }
