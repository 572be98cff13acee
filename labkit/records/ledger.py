"""Who was fed which samples in which step, by hashes of the samples, and whether that adds up.

It knows nothing of plans: what ranks have been fed is held against the samples that there are.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from labkit.common.safe_files import read_file

SUFFIX = ".ledger"


class Entry(NamedTuple):
    """What a rank was fed in a step.

    Attributes:
        step: of training, from 0.
        rank: its number before any was gone.
        world: how many ranks were gone; who was fed in an earlier world alone was fed in vain.
        samples: a hash of each.
    """

    step: int
    rank: int
    world: int
    samples: Sequence[str]


class Account(NamedTuple):
    """What a ledger comes to.

    Attributes:
        epochs, steps: that were taken.
        lost: samples that an epoch lacks, over all epochs.
        repeated: samples that came more than once in an epoch, or belong to none.
        steps_repeated: steps that were begun and taken back.
        steps_missing: steps that nobody was fed.
        by_rank: samples that counted.
    """

    epochs: int
    steps: int
    lost: int
    repeated: int
    steps_repeated: int
    steps_missing: int
    by_rank: dict[int, int]

    @property
    def is_exact(self) -> bool:
        """Every sample came exactly once an epoch."""
        return not (self.lost or self.repeated or self.steps_missing)


def hashes(leaves: Sequence[np.ndarray]) -> list[str]:
    """Of each sample: the bytes of its row in every leaf."""
    rows = zip(*([row.tobytes() for row in leaf] for leaf in leaves), strict=True)
    return [hashlib.blake2b(b"".join(row), digest_size=8).hexdigest() for row in rows]


def line(entry: Entry) -> bytes:
    """An entry as it is written: in one write, so that a rank may die after any of them."""
    return json.dumps(entry).encode() + b"\n"


def read(folder: Path) -> list[Entry]:
    """The entries of all ranks; the last line of one that died may be torn."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        whole = read_file(path).rpartition(b"\n")[0]
        found += [Entry(*json.loads(splitline)) for splitline in whole.splitlines()]
    return found


def check(
    entries: Iterable[Entry], samples: Sequence[np.ndarray], steps: int, epochs: int
) -> Account:
    """Hold what was fed against all samples.

    Args:
        entries: of all ranks.
        samples: arrays with a row a sample, as leaves of the data set.
        steps: of an epoch.
        epochs: that were trained.
    """
    by_step: dict[int, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_step[entry.step].append(entry)
    counted = {step: _taken(found) for step, found in by_step.items()}
    wanted, lost, repeated = Counter(hashes(samples)), 0, 0
    for epoch in range(epochs):
        numbers = range(epoch * steps, (epoch + 1) * steps)
        fed = Counter(s for n in numbers for each in counted.get(n, ()) for s in each.samples)
        lost += (wanted - fed).total()
        repeated += (fed - wanted).total()
    by_rank: Counter[int] = Counter()
    for entry in (each for found in counted.values() for each in found):
        by_rank[entry.rank] += len(entry.samples)
    again = sum(len({each.world for each in found}) - 1 for found in by_step.values())
    missing = sum(step not in counted for step in range(epochs * steps))
    return Account(epochs, len(counted), lost, repeated, again, missing, dict(by_rank))


def _taken(found: Sequence[Entry]) -> list[Entry]:
    """Those of the world in which the step was taken: the last."""
    last = max(entry.world for entry in found)
    return [entry for entry in found if entry.world == last]
