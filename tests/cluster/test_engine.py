"""Test that ranks perform slow imports in groups, not all at once."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.cluster.engine import ImportsInWaves, SafePath

# Another process must test the lock, because its holder always finds it free.
LOOK = """
import sys
from pathlib import Path
from labkit.common.locks import Semaphore

looks = iter([True, False])
print(Semaphore(Path(sys.argv[1]), 1).acquire(lambda: next(looks)))
"""
IMPORTED = f"""
import subprocess, sys

seen = subprocess.check_output([sys.executable, "-c", {LOOK!r}, sys.argv[1]], text=True)
"""


@pytest.mark.heavy  # processes
def test_a_rank_holds_a_place_while_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "takes_long.py").write_text(IMPORTED)
    monkeypatch.syspath_prepend(tmp_path)
    finder = ImportsInWaves("takes_long", tmp_path / "keeper.lock")
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    starts = str(tmp_path / "starts")
    monkeypatch.setattr(sys, "argv", ["rank", starts])
    import takes_long

    assert takes_long.seen == "False\n"
    free = subprocess.check_output([sys.executable, "-c", LOOK, starts], text=True)
    assert free == "True\n"


def test_the_path_of_a_rank_travels_as_a_plain_list() -> None:
    path = SafePath(["library"])
    path.insert(0, "")
    found = pickle.loads(pickle.dumps(path))
    assert (type(found), found) == (list, ["library"])
