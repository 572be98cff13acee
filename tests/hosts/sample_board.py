"""What each rank on two hosts does to test the board; it prints what the board tells it."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from labkit.common.errors import LabkitError
from labkit.communicator import Communicator, world

STOPS = 50
LIMIT = 30.0  # seconds of a wait, fewer than the test's limit, so that ranks can report
OUTAGE = 3.0  # seconds; only a step during a link outage lasts as long
NEVER = np.iinfo(np.int64).max


def say(communicator: Communicator, what: str, told: object) -> None:
    print(json.dumps([what, communicator.rank, told]), flush=True)


def error_of(call: object) -> str:
    try:
        call()
    except LabkitError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def add(communicator: Communicator, what: str = "step") -> None:
    communicator.allreduce(np.ones(8), "ring", what)


def stops(communicator: Communicator) -> list[int]:
    """Return the steps at which this rank stopped too late or too early, for random stops."""
    chance, board, wrong = random.Random(1), communicator.board, []
    rank, size, step = communicator.rank, communicator.size, 0
    for number in range(STOPS):
        by_end, at = number % 2 == 1, step + chance.randrange(4)
        asks = chance.randrange(size) if by_end else 0
        last = at + size if by_end else at + 1
        while True:
            add(communicator)
            if board.has_ended(step) if by_end else board.is_stop_requested(step):
                break
            if step == at and rank == asks:
                (board.announce_end if by_end else board.request_stop)(last)
            step += 1
        wrong.append(step - last)
        step += 1
        communicator.barrier("the next one")
        if rank == asks:
            (board.announce_end if by_end else board.request_stop)(NEVER)
        communicator.barrier("forgotten")
    return [each for each in wrong if each]


def through_an_outage(pair: Communicator) -> str:
    """Take steps until one of either rank lasts `OUTAGE` seconds because the link is down."""
    longest, last = 0.0, time.monotonic()
    while max(pair.allgather_scalar(longest, "the longest step")) < OUTAGE:
        add(pair)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return "went on"


def different_calls(pair: Communicator) -> str:
    add(pair)  # agree on a schedule first, so that no handshake finds the mismatch
    add(pair, "sum A")
    return error_of(lambda: add(pair, "sum A" if pair.rank else "sum B"))


def sound() -> None:
    refused = error_of(lambda: world(network="100Mb"))
    communicator = world(timeout=LIMIT)
    say(communicator, "network", refused)
    say(communicator, "stops", stops(communicator))
    lower = communicator.rank % 2 == 0
    pair = communicator.split(communicator.rank % 2)
    say(communicator, "ready", None)
    told = different_calls(pair) if lower else through_an_outage(pair)
    say(communicator, "mismatch" if lower else "outage", told)
    communicator.barrier("the last call of all")
    start = time.monotonic()
    try:
        communicator.barrier("the failure")  # its last check may already find the failure
        start = time.monotonic()
        if communicator.rank < 3:
            communicator.barrier("what rank 3 does not come to")
        communicator.board.fail("ValueError: planted")
    except LabkitError as error:
        say(communicator, "failure", [str(error), time.monotonic() - start])


def gone(place: str) -> None:
    communicator = world(timeout=LIMIT)
    add(communicator)
    say(communicator, "ready", None)
    last = time.monotonic()
    try:
        while True:
            add(communicator)
            last = time.monotonic()
    except LabkitError as error:
        told = [type(error).__name__, str(error), time.monotonic() - last]
        # A rank writes to a file on its own host, because its printed output does not get through.
        Path(place, f"rank{communicator.rank}").write_text(json.dumps(told))
        raise


def bereft() -> None:
    """Kill rank 2, which carries the board of its host; the board must go on."""
    communicator = world(timeout=LIMIT)
    add(communicator)
    if communicator.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    say(communicator, "death", error_of(lambda: [add(communicator) for _ in iter(int, 1)]))
    communicator.board.enter("the end")
    while (missed := communicator.board.describe_ranks("the end")).count("is in") > 1:
        time.sleep(0.01)
    say(communicator, "missed", missed)


if __name__ == "__main__":
    {"sound": sound, "gone": gone, "bereft": bereft}[sys.argv[1]](*sys.argv[2:])
