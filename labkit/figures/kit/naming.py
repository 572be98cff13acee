"""What tells runs apart, in few words: the same name in every figure, legend and table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from labkit.common.canonical_json import is_number
from labkit.common.privacy import scrub
from labkit.records.analysis.columns import Value
from labkit.records.compressors import called

LONGEST = 60  # letters of a name, without its number
_MOST = 60  # parameters of which names are made
_WORD = 28  # letters of one of its parts
# From what tells most to what tells least: where two tell the same, the former stays. Chance comes
# last.
_ORDER = ("name", "strategy", "compressor", "network", "workers", "model", "dataset", "algorithm")
_LAST = ("repeats", "seed")
# Values that say by themselves what they are.
_BARE = {*_ORDER} - {"workers"}
_SHORT = {"learning_rate": "lr", "batch_size": "batch"}
_CALL = re.compile(r"(?:\w+\()*(\w+)(?:\((\w+=[^(),]+(?:, \w+=[^(),]+)*)\))?\)*")

Row = Mapping[str, Value]


def names(rows: Sequence[Row], fallback: Sequence[str]) -> list[str]:
    """One name a row, of the fewest parameters that tell the rows apart; no two are the same.

    What is none goes without saying, where no two names become one by it. Rows that differ in
    nothing get numbers.

    Args: rows, the parameters in which runs differ, by name; fallback, what to call a row that has
    none.
    """
    told = _telling(rows)
    # Where the compressor is the method, to have none is one, too.
    dense = "compressor" if "strategy" not in told else ""
    words = [
        [(n == dense or row.get(n) is not None, told[n][repr(row.get(n))]) for n in told]
        for row in rows
    ]
    whole = [tuple(word for _, word in own) for own in words]
    for drop_usual in (True, False):
        brief = _brief(words, drop_usual)
        if all(brief) and _distinct(brief) == _distinct(whole):
            whole = brief
            break
    joined = [", ".join(parts) or other for parts, other in zip(whole, fallback, strict=True)]
    return _numbered([_cut(text, LONGEST) for text in joined])


def _brief(words: Sequence[Sequence[tuple[bool, str]]], drop_usual: bool) -> list[tuple[str, ...]]:
    """Each row's words without none, and without what more than half of the rows have."""
    counts = Counter(each for own in words for each in enumerate(word for _, word in own))
    found = []
    for own in words:
        kept = [(place, word) for place, (is_some, word) in enumerate(own) if is_some]
        rare = [each for each in kept if 2 * counts[each] <= len(words)]
        nothing = [each for each in enumerate(word for _, word in own) if each not in kept]
        # Where all is usual but what it lacks, that tells it apart.
        rare = rare or [each for each in nothing if 2 * counts[each] <= len(words)][:1]
        # A name of one word says little: what is usual then stands before it.
        told = kept if not drop_usual else rare if len(rare) > 1 else kept[: 2 - len(rare)] + rare
        found.append(tuple(word for _, word in sorted(set(told))))
    return found


def _telling(rows: Sequence[Row]) -> dict[str, dict[str, str]]:
    """The parameters without which two rows would be one, with the words of their values."""
    given = dict.fromkeys(name for row in rows for name in row)
    # Of more than so many parameters nobody reads a name, and each is tried against all others.
    told = sorted(given, key=_rank)[:_MOST]
    kept = {name: _words(name, [row.get(name) for row in rows]) for name in told}
    whole = _told_apart(rows, kept)
    for name in reversed(list(kept)):
        others = {each: words for each, words in kept.items() if each != name}
        if _told_apart(rows, others) == whole:
            kept = others
    return kept


def _rank(name: str) -> int:
    if name in _LAST:
        return len(_ORDER) + 1 + _LAST.index(name)
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _told_apart(rows: Sequence[Row], words: Mapping[str, Mapping[str, str]]) -> int:
    return _distinct([tuple(own[repr(row.get(n))] for n, own in words.items()) for row in rows])


def _distinct(found: Sequence[tuple[str, ...]]) -> int:
    return len(set(found))


def _words(name: str, values: Sequence[Value]) -> dict[str, str]:
    """A word a value: as short as can be without two values sharing one."""
    distinct = {repr(value): _plain(name, value) for value in values}
    forms: list[Callable[[str], str]]
    forms = [_cut] if name != "compressor" else [spoken, partial(spoken, with_feedback=True)]
    for form in forms:
        short = {key: _cut(form(text)) for key, text in distinct.items()}
        if len(set(short.values())) == len(short):
            return short
    return {key: _cut(text, LONGEST) for key, text in distinct.items()}


def _plain(name: str, value: Value) -> str:
    if name == "compressor":
        return called(value)
    if value is None:
        return f"no {name.replace('_', ' ')}"
    text = f"{value:.6g}" if isinstance(value, float) else scrub(str(value))
    bare = name in _BARE and not is_number(value)
    return text if bare else f"{_SHORT.get(name, name.replace('_', ' '))} {text}"


def spoken(compressor: str, with_feedback: bool = False) -> str:
    """`TopK 1 %` for `ErrorFeedback(TopK(ratio=0.01))`, `PowerSGD rank 2`; what else, as it is."""
    call = _CALL.fullmatch(compressor)
    if call is None or " " in compressor.partition("(")[0]:
        return _cut(compressor)
    said = [call[1]]
    for key, _, value in (field.partition("=") for field in (call[2] or "").split(", ") if field):
        is_share = key == "ratio" and re.fullmatch(r"[\d.e-]+", value)
        said.append(f"{100 * float(value):.3g} %" if is_share else f"{key.split('_')[-1]} {value}")
    outer = ["EF"] if with_feedback and compressor.startswith("ErrorFeedback(") else []
    return " ".join([*outer, *said])


def _cut(text: str, letters: int = _WORD) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def _numbered(found: Sequence[str]) -> list[str]:
    """Those that are the same get numbers, which no other name has."""
    alike, taken, said = Counter(found), set(found), []
    for text in found:
        name, number = text, 0
        while alike[text] > 1 and (name == text or name in taken):
            number += 1
            name = f"{text} ({number})"
        taken.add(name)
        said.append(name)
    return said
