"""`python -m labkit.bench.transports.rank`: two MPI ranks that exchange arrays as they are told."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.bench.transports.timed import WARM, Found, array, exchanges, sent_by_tcp, timed
from labkit.communicator import Carrier, Communicator, carrier, world

LIMIT = 3600.0  # s; the other ways have their turns meanwhile
THERE, BACK = (0, 1), (1, 0)


class Pair:
    """The two ranks, and what carries letters between them.

    Args:
        communicator: of both.
        transport: a name of `labkit.communicator.TRANSPORTS`.
        nbytes: of the arrays, which a static placement knows from the begin.
    """

    def __init__(self, communicator: Communicator, transport: str, nbytes: int) -> None:
        self._communicator, self._patience = communicator, communicator.patience
        self._carrier: Carrier = carrier(transport, communicator, {THERE: nbytes, BACK: nbytes})

    def exchange(self, values: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """On rank 0: send, and wait for what comes back."""
        self._carrier.post(THERE, np.zeros(1), values)
        return self._letter()

    def answer(self) -> None:
        """On rank 1: send back what comes, from where it lies."""
        self._carrier.post(BACK, np.zeros(1), self._letter())

    def rest(self) -> None:
        """Until nothing is on its way any more."""
        self._patience.begin()
        polls = 0
        while not self._carrier.idle:
            self._patience.pause(polls)
            polls += 1

    def close(self) -> None:
        """Both together."""
        self._carrier.close()

    def _letter(self) -> NDArray[np.uint8]:
        self._patience.enter("an array of a benchmark", collective=False)
        self._patience.begin()
        polls = 0
        while True:
            for letter in self._carrier.collect():
                return letter.values
            self._patience.pause(polls)
            polls += 1


def case(communicator: Communicator, transport: str, nbytes: int) -> Found:
    """Exchange an array there and back, as often as fits the budget (collective)."""
    values, right = array(nbytes, seed=nbytes), True
    pair = Pair(communicator, transport, nbytes)
    seconds: list[float] = []
    if communicator.rank == 0:
        warm = timed(WARM, lambda: pair.exchange(values))
        right = bool(np.array_equal(pair.exchange(values), values))
        calls = exchanges(min(warm))
    else:
        for _ in range(WARM + 1):
            pair.answer()
        calls = 0
    pair.rest()
    calls = communicator.share(calls, what="the number of exchanges")
    processor, tcp = time.process_time(), sent_by_tcp()
    if communicator.rank == 0:
        seconds = timed(calls, lambda: pair.exchange(values))
    else:
        for _ in range(calls):
            pair.answer()
    pair.rest()
    spent = np.sum(communicator.allgather(time.process_time() - processor)) / (2 * calls)
    sent = (sent_by_tcp() - tcp) / calls
    pair.close()
    half = float(np.median(seconds)) / 2 if seconds else 0.0
    return Found(seconds=half, processor=float(spent), tcp=sent, right=right)


def answered(communicator: Communicator, asked: dict[str, Any]) -> object:
    """What rank 0 answers to a question (collective)."""
    if "training" in asked:
        from labkit.bench.transports.trained import Training, served, train_here

        training = Training(*asked["training"])
        experiment = training.by(served(asked["transport"]))
        return train_here(communicator, experiment, training.target)
    return case(communicator, asked["transport"], asked["bytes"])


def main() -> None:
    """Answer rank 0's lines with lines, until there are no more."""
    communicator = world(limit=LIMIT)
    first = communicator.rank == 0
    if first:
        print("ready", flush=True)
        sys.stdin.readline()
    while True:
        line = communicator.share(sys.stdin.readline() if first else "", what="the next question")
        if not line:
            break
        found = answered(communicator, json.loads(line))
        if first:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
