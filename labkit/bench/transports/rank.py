"""`python -m labkit.bench.transports.rank`: two MPI ranks that transfer arrays on request."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.bench.transports.timed import WARM, ExchangeCost, array, exchanges, sent_by_tcp, timed
from labkit.communicator import AnyMailbox, Communicator, open_mailbox, world

LIMIT = 3600.0  # timeout in seconds; long, because other transports are measured in between
THERE, BACK = (0, 1), (1, 0)


class TransportPair:
    """Two ranks that send arrays to each other through a mailbox.

    Args:
        communicator: Communicator of the two ranks.
        transport: Name of a transport in `labkit.communicator.TRANSPORTS`.
        nbytes: Size of the arrays in bytes, which one-sided messages with static placement need in
            advance.
    """

    def __init__(self, communicator: Communicator, transport: str, nbytes: int) -> None:
        self._communicator, self._patience = communicator, communicator.wait_policy
        self._carrier: AnyMailbox = open_mailbox(
            transport, communicator, {THERE: nbytes, BACK: nbytes}
        )

    def exchange(self, values: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Send an array to rank 1 and return the reply (called on rank 0)."""
        self._carrier.post(THERE, np.zeros(1), values)
        return self._letter()

    def answer(self) -> None:
        """Receive an array and send it back without a copy (on rank 1)."""
        self._carrier.post(BACK, np.zeros(1), self._letter())

    def rest(self) -> None:
        """Wait until all messages that this rank has posted are delivered."""
        self._patience.start_wait()
        polls = 0
        while not self._carrier.idle:
            self._patience.pause(polls)
            polls += 1

    def close(self) -> None:
        """Close the mailbox (collective)."""
        self._carrier.close()

    def _letter(self) -> NDArray[np.uint8]:
        self._patience.name_call("an array of a benchmark", collective=False)
        self._patience.start_wait()
        polls = 0
        while True:
            for letter in self._carrier.collect():
                return letter.values
            self._patience.pause(polls)
            polls += 1


def case(communicator: Communicator, transport: str, nbytes: int) -> ExchangeCost:
    """Time round trips of an array for as long as the time budget allows (collective)."""
    values, right = array(nbytes, seed=nbytes), True
    pair = TransportPair(communicator, transport, nbytes)
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
    calls = communicator.broadcast_object(calls, label="the number of exchanges")
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
    return ExchangeCost(seconds=half, processor=float(spent), tcp=sent, right=right)


def run_task(communicator: Communicator, task: dict[str, Any]) -> object:
    """Run a requested measurement or training, and return the result of rank 0 (collective)."""
    if "training" in task:
        from labkit.bench.transports.measuring import ServerTraining, served, train_here

        training = ServerTraining(*task["training"])
        experiment = training.by(served(task["transport"]))
        return train_here(communicator, experiment, training.target)
    return case(communicator, task["transport"], task["bytes"])


def main() -> None:
    """Answer each line of rank 0's standard input with one line of output, until the input ends."""
    communicator = world(timeout=LIMIT)
    first = communicator.rank == 0
    if first:
        print("ready", flush=True)
        sys.stdin.readline()
    while True:
        line = communicator.broadcast_object(
            sys.stdin.readline() if first else "", label="the next question"
        )
        if not line:
            break
        result = run_task(communicator, json.loads(line))
        if first:
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
