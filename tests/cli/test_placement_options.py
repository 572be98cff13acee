"""Test the options that say where ranks start: they set variables of the environment."""

from __future__ import annotations

import os

import pytest

from labkit.cli.shared_options import place
from labkit.cluster.start import TOLERANT, VARIABLES, Start
from labkit.common.errors import InvalidInput

NOTHING = dict.fromkeys(("launcher", "hosts", "nodes", "agent", "slurm"))


def settled() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES.values() if name in os.environ}


@pytest.mark.parametrize(
    ("before", "given", "after"),
    [
        ({"LABKIT_HOSTS": "a"}, {}, {"LABKIT_HOSTS": "a"}),
        ({}, {"slurm": "-p x"}, {"LABKIT_LAUNCHER": "slurm", "LABKIT_SLURM": "-p x"}),
        (
            {"LABKIT_LAUNCHER": "slurm", "LABKIT_NODES": "2", "LABKIT_SLURM": "-t 1"},
            {"slurm": "-p x"},
            {"LABKIT_LAUNCHER": "slurm", "LABKIT_NODES": "2", "LABKIT_SLURM": "-p x"},
        ),
        (
            {"LABKIT_LAUNCHER": "hosts", "LABKIT_HOSTS": "a:2,b:2"},
            {"agent": "rsh"},
            {"LABKIT_LAUNCHER": "hosts", "LABKIT_HOSTS": "a:2,b:2", "LABKIT_AGENT": "rsh"},
        ),
        (
            {"LABKIT_LAUNCHER": "slurm", "LABKIT_NODES": "2"},
            {"hosts": "a:2,b:2"},
            {"LABKIT_LAUNCHER": "hosts", "LABKIT_HOSTS": "a:2,b:2", "LABKIT_NODES": "2"},
        ),
    ],
)
def test_what_is_given_is_settled_and_the_rest_stays(
    monkeypatch: pytest.MonkeyPatch,
    before: dict[str, str],
    given: dict[str, str],
    after: dict[str, str],
) -> None:
    own = {name: value for name, value in os.environ.items() if name not in VARIABLES.values()}
    monkeypatch.setattr(os, "environ", own | before)
    place(**NOTHING | given)
    assert settled() == after


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"launcher": "local", "nodes": 2}, "--nodes has no effect with --launcher local"),
        ({"hosts": "a,b", "slurm": "-p x"}, "--slurm has no effect with --launcher hosts"),
        ({"agent": "rsh"}, "--agent .* local; give it with --launcher hosts or slurm"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, object], words: str
) -> None:
    for name in VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidInput, match=words):
        place(**NOTHING | given)


def test_clusters_are_fault_tolerant_that_do_not_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != TOLERANT})
    assert not Start.from_options(2).fault_tolerant
    place(**NOTHING, fault_tolerant=True)
    assert Start.from_options(2).fault_tolerant
    assert settled() == {}
