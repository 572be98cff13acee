"""Test in a script that ranks survive a death: each is notified, and they get a new world."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from labkit.communicator import Communicator, RankDied, world

LENGTH = 3000
Call = Callable[[Communicator], None]


def added(algorithm: str) -> Call:
    def call(communicator: Communicator) -> None:
        buffer = np.full(LENGTH, 1.0 + communicator.rank)
        communicator.allreduce(buffer, algorithm)
        size = communicator.size
        assert np.all(buffer == size * (size + 1) / 2), (algorithm, buffer[:3], size)

    return call


def ring_of_messages(communicator: Communicator) -> None:
    data, found = np.full(9, communicator.rank), np.zeros(9, int)
    sent = communicator.post(data, (communicator.rank + 1) % communicator.size)
    communicator.recv(found, (communicator.rank - 1) % communicator.size)
    communicator.finish(sent)
    assert np.all(found == (communicator.rank - 1) % communicator.size)


def in_windows(communicator: Communicator) -> None:
    buffer = communicator.allocate(64)
    buffer[...] = 1.0
    communicator.allreduce(buffer, "shared_memory")
    assert np.all(buffer == communicator.size)


def gathered(communicator: Communicator) -> None:
    told = communicator.allgather(communicator.rank)
    assert told == list(range(communicator.size))


def stopped_together(communicator: Communicator) -> None:
    communicator.board.announce_end(1 << 40)
    communicator.barrier("the next one")


def parted(communicator: Communicator) -> None:
    part = communicator.split(communicator.rank % 2)
    added("mpi")(part)
    part.close()


CALLS: dict[str, Call] = {
    "ring": added("ring"),
    "two_level": added("two_level"),
    "mpi": added("mpi"),
    "shared_memory": added("shared_memory"),
    "messages": ring_of_messages,
    "memory": in_windows,
    "gather": gathered,
    "broadcast": lambda c: c.broadcast(np.zeros(LENGTH), root=c.size - 1),
    "board": stopped_together,
    "parts": parted,
    "links": added("ring"),
}


def main() -> None:
    faulthandler.dump_traceback_later(25)
    """`sample_deaths.py CALL VICTIMS SECONDS`: who dies first, second, …, after so long each."""
    name, victims = sys.argv[1], [int(each) for each in sys.argv[2].split(",")]
    seconds = float(sys.argv[3])
    network = "10GbE" if name == "links" else None
    communicator, call = world(timeout=20.0, network=network), CALLS[name]
    own = communicator.rank
    for victim in victims:
        if own == victim:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        last = time.monotonic()
        try:
            while True:
                call(communicator)
                last = time.monotonic()
        except RankDied as error:
            noticed, told = time.monotonic(), error.ranks
            dead = communicator.shrink()
        assert told in ((victim,), ()), told
        assert dead == [victim], dead
        done = time.monotonic()
        call(communicator)
        for other in CALLS:
            apart = other in ("shared_memory", "memory") and not communicator.on_one_host
            metered = other in ("mpi", "shared_memory", "memory", "parts") and network
            if not (apart or metered):
                CALLS[other](communicator)
        assert communicator.number == own
        told = communicator.allgather((noticed - last, done - noticed))
        if communicator.rank == 0:
            detect, rebuild = np.max(told, axis=0)
            print(f"{name}: without {dead[0]}, noticed {detect:.3f} s, rebuilt {rebuild:.3f} s")
    communicator.close()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
