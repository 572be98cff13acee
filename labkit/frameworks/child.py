"""A fresh process that a rank starts, asks for steps and weights, and ends."""

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

FOREIGN = ("OMPI_", "PMIX_", "PRTE_")  # would make it believe that it is a rank of ours
END = 5.0  # seconds that it has to end by itself
WORDS = 1000  # letters of an error, of which TensorFlow makes many


class Child:
    """A module of Python, run in a process of its own, that answers one question after the other.

    It is told what to do by its first message, as an object, and says when it is ready. Each later
    message is a name and arguments, and is answered by an object; an error there is raised here.
    It ends with this process, however that ends.

    Args:
        module: to run, which calls `serve`.
        name: of its task, such as "worker 1".
        task: what it is told first.
        communicator: the ranks whose children work together: if one of them fails, nobody waits.
        threads: that it may compute with.
        python: another one than this, in which labkit need not be installed.
        inside: words before the command, that say where it runs.
        gpus: whether it may see the GPUs of this machine.
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
        self._patience = communicator.patience
        self._open = opened = ExitStack()
        self._pipe, other = Pipe()
        given = environment(python or sys.executable)
        kept = {k: v for k, v in given.items() if not k.startswith(FOREIGN)}
        run = [sys.executable, "-P", "-m"] if python is None else [python, foreign.__file__]
        self._said = opened.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._process = subprocess.Popen(
            [*inside, *run, module, name, str(other.fileno())],
            env=kept | computing(threads, gpus),
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            pass_fds=[other.fileno()],
            start_new_session=True,  # an interrupt of the rank is not one of it
        )
        other.close()  # or its end would never be noticed
        self._tell(task)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it has."""
        return self._process.poll() is not None

    def ask(
        self, what: str, *arguments: object, meanwhile: Callable[[], None] = lambda: None
    ) -> Any:
        """The answer to a question.

        Args:
            what: the name of one of its calls.
            arguments: of the call.
            meanwhile: called now and then while it is waited for.
        """
        self._tell((what, *arguments))
        return self.answer(what, meanwhile)

    def answer(self, what: str = "start", meanwhile: Callable[[], None] = lambda: None) -> Any:
        """The next answer; the first one comes without a question, when it is ready."""
        self._patience.enter(f"{what!r} of {self.name}", collective=False)
        self._patience.begin()
        polls = 0
        while not self._pipe.poll():
            self._patience.pause(polls)
            polls += 1
            if polls % 256 == 0:
                meanwhile()
        try:
            answer = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._gone() from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        """Let it end, and end it if it does not."""
        self._pipe.close()
        try:
            self._process.wait(END)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        self._open.close()

    def last_words(self) -> str:
        """The last line that it wrote; or how it ended."""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        words = [line.strip() for line in lines if line.strip()]
        return words[-1] if words else f"exit code {self._process.poll()}"

    def _tell(self, message: object) -> None:
        import cloudpickle  # inside: what answers may run where it is not installed

        try:
            self._pipe.send_bytes(cloudpickle.dumps(message))
        except OSError:
            raise self._gone() from None

    def _gone(self) -> LabkitError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END)  # its last words come before
        return LabkitError(f"{self.name} ended early: {self.last_words()}")


def serve(calls_of: Callable[[Any], Mapping[str, Callable[..., object]]]) -> None:
    """Be told a task, say when ready, and answer questions until nobody is there to ask any.

    The process ends at once when the one that started it does, whatever it is in.

    Args:
        calls_of: the calls that can be asked for, by name, made of the task.
    """
    imports.add_inherited()  # what the task names may lie beside a notebook
    end = Connection(int(sys.argv[2]))
    told: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    Thread(target=_listen, args=(end, told), daemon=True).start()
    try:
        calls = calls_of(pickle.loads(told.get()))
    except Exception as error:  # it is raised where the process was started
        _answer(end, error)
        raise
    _answer(end, None)
    while True:
        name, *arguments = pickle.loads(told.get())
        try:
            answer = calls[name](*arguments)
        except Exception as error:  # it is raised where it was asked for
            answer = error
        _answer(end, answer)


def _answer(end: Connection, answer: object) -> None:
    if isinstance(answer, Exception) and not isinstance(answer, LabkitError):
        said = " ".join(str(answer).split())[:WORDS]
        answer = LabkitError(f"{sys.argv[1]}: {type(answer).__name__}: {said}")
    end.send_bytes(pickle.dumps(answer))


def _listen(end: Connection, told: queue.SimpleQueue[bytes]) -> None:
    """In a thread, so that the end of the other process is noticed in the midst of a step."""
    with suppress(EOFError, OSError):
        while True:
            told.put(end.recv_bytes())
    os._exit(0)  # threads of TensorFlow's collectives can hang a normal exit


def environment(python: str) -> dict[str, str]:
    """Variables for a process of that Python: those of this one, without what is only its own."""
    # They would bring this Python's packages to another one.
    own = () if python == sys.executable else ("PYTHONPATH", "PYTHONHOME")
    return {name: value for name, value in os.environ.items() if name not in own}


def computing(threads: int, gpus: bool = False) -> dict[str, str]:
    """Variables of a framework with so many threads; GPUs are hidden from it unless wanted."""
    hidden = {} if gpus else {"CUDA_VISIBLE_DEVICES": "-1"}
    return hidden | {
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "TF_NUM_INTEROP_THREADS": str(max(threads, 2)),  # one may wait for a message
        "OMP_NUM_THREADS": str(threads),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "no_proxy": "127.0.0.1,localhost",
    }
