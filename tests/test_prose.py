"""Hold the prose of pages and notebooks to ceilings, which only fall."""

from __future__ import annotations

import re

from sample_sentences import prose, sentences, words

LONGEST = 25  # words of a sentence
# How many sentences are longer today. Lower a number when you shorten sentences; never raise it.
LONG = {".md": 3, ".ipynb": 2}
# Words that make sentences obscure: participles and adverbs that stand for a thing.
BANNED = re.compile(r"\b(?:seldom|luggage|who comes first|is heard|are told|stands? still)\b")


def test_few_sentences_are_long_and_none_is_obscure() -> None:
    long: dict[str, list[str]] = {kind: [] for kind in LONG}
    for path, text in prose():
        for sentence in sentences(text):
            if words(sentence) > LONGEST and not sentence.startswith(("|", "![")):
                long[path.suffix].append(f"{path.name}: {sentence}")
            assert not BANNED.search(sentence), (path, sentence)
    for kind, found in long.items():
        assert len(found) <= LONG[kind], "\n".join(found)
