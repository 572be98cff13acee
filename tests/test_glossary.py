"""Test that the glossary defines each term in one sentence with a source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from labkit.compression import COMPRESSORS
from labkit.experiment import VirtualClock
from labkit.schedules import ALLREDUCE, PIPELINE
from labkit.strategies import STRATEGIES

ROOT = Path(__file__).parent.parent
GLOSSARY = ROOT / "notebooks/guide/reference/glossary.md"
LINES = [
    line for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if line.startswith("- ")
]
ENTRY = re.compile(r"- \*\*(?P<term>[^*]+)\*\*: (?P<definition>[A-Z].*) \((?P<source>[^()]+)\)\.")
SOURCE = re.compile(r"labkit|.+ (?:manual|standard)|.+ (?:19|20)\d\d")
MAX_TERMS = 120
MAX_WORDS = 25


def entry(line: str) -> re.Match[str]:
    match = ENTRY.fullmatch(line)
    assert match, line
    return match


TERMS = [entry(line)["term"] for line in LINES]


def order(term: str) -> str:
    return re.sub(r"[^0-9a-z]+", " ", term.lower())


def test_the_glossary_has_at_most_120_terms_sorted_and_without_duplicates() -> None:
    assert 0 < len(TERMS) <= MAX_TERMS
    assert sorted(TERMS, key=order) == TERMS
    assert len({*TERMS}) == len(TERMS)


@pytest.mark.parametrize("line", LINES, ids=TERMS)
def test_a_definition_is_one_short_sentence_with_a_source(line: str) -> None:
    match = entry(line)
    assert not re.search(r"[.!?](?:\s|$)", match["definition"])
    assert len(match["definition"].split()) <= MAX_WORDS
    assert SOURCE.fullmatch(match["source"])


@pytest.mark.parametrize("name", [*STRATEGIES, *COMPRESSORS, *PIPELINE])
def test_every_strategy_compressor_and_pipeline_schedule_has_a_term(name: str) -> None:
    assert name in TERMS or name == "layerwise"  # the glossary has the strategy Layerwise instead


@pytest.mark.parametrize("name", [*ALLREDUCE])
def test_every_allreduce_algorithm_has_a_term(name: str) -> None:
    assert name.removesuffix("_butterfly") in TERMS


def test_every_field_of_the_virtual_clock_has_a_term() -> None:
    assert {*VirtualClock.model_fields} - {"update_order"} <= {*TERMS}


def test_the_readme_links_the_glossary() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert GLOSSARY.relative_to(ROOT).as_posix() in readme
