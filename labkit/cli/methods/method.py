"""Methods in families, as the field divides them, read from docstrings and notebooks."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pydantic import BaseModel

from labkit.cli.methods.docstring import Docstring, parse
from labkit.common.validated import by_position
from labkit.compression import COMPRESSORS, FAMILIES, Compressor, samples
from labkit.deployment import METHODS
from labkit.exchange.schedules import SCHEDULES
from labkit.schedules import ALLREDUCE, PIPELINE
from labkit.schedules.pipeline import Pipeline
from labkit.strategies import AXES, STRATEGIES, Strategy

if TYPE_CHECKING:
    from labkit.schedules.pipeline import Table
    from labkit.schedules.round import Round

# A class, a function, or, for what is no object of its own, its docstring.
Member: TypeAlias = "type | Callable[..., Iterable[Round] | Table] | str"

_ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a method: its default as Python writes it; None: it must be given."""

    name: str
    default: str | None
    help: str


class Paper(NamedTuple):
    """`Aji 2017` or `folklore`, and its number on arXiv, or nothing."""

    cited: str
    arxiv: str


@dataclass(frozen=True)
class Method:
    """One method: what an experiment calls it, and what its docstring says.

    `said` is Python that chooses it; `source` names authors and year, with the arXiv number where
    there is one; `differs` says what is not as in that source; `papers` are those that a class
    names, or that of the source; `axes` are where a strategy stands in the field's taxonomy, by the
    names of `labkit.strategies.AXES`.
    """

    name: str
    said: str
    summary: str
    parameters: Sequence[Parameter]
    source: str
    differs: str
    papers: Sequence[Paper]
    axes: Mapping[str, Sequence[str]]

    @property
    def cited(self) -> str:
        """`Li 2014; Chen 2016`, or `folklore`."""
        return "; ".join(paper.cited for paper in self.papers)


@dataclass(frozen=True)
class Family:
    """Methods of one mapping, `place`; `say` is Python that chooses one, with `{}` for its name."""

    title: str
    question: str
    place: str
    say: str
    members: Mapping[str, Member]

    def methods(self) -> list[Method]:
        """All members, in the mapping's order."""
        return [self._method(name, member) for name, member in self.members.items()]

    def _method(self, name: str, member: Member) -> Method:
        parameters = _parameters(member)
        known = ", ".join(f"{p.name}={p.default or '…'}" for p in parameters)
        said = self.say.format(name) if '"' in self.say else f"{self.say.format(name)}({known})"
        own, *others = _documents(member)
        # A base holds the source of what several have in common.
        origin = next((d for d in (own, *others) if d.source and not d.elsewhere), Docstring(""))
        differs = own.differs or origin.differs
        papers = _papers(getattr(member, "paper", ""), origin.source)
        places = dict(_places(member))
        return Method(name, said, own.summary, parameters, origin.source, differs, papers, places)


def families() -> list[Family]:
    """The families of methods, in the order of the field's taxonomy."""
    strategies = "labkit.strategies.STRATEGIES"
    replicas = {name: kind for name, kind in STRATEGIES.items() if kind.parallelism[0] == "data"}
    return [
        Family(
            "Replicas: data parallel training",
            "Each rank trains the whole model on its part of the batch.",
            strategies,
            "lk.{}",
            replicas,
        ),
        Family(
            "Models cut across ranks: model parallel training",
            "Each rank trains a part of the model.",
            strategies,
            "lk.{}",
            {name: kind for name, kind in STRATEGIES.items() if name not in replicas},
        ),
        Family(
            "Pipeline schedules",
            "Which stage does what with which micro-batch, when?",
            "labkit.schedules.PIPELINE",
            'lk.Pipeline(schedule="{}")',
            PIPELINE,
        ),
        Family(
            "Allreduce algorithms",
            "On which ways do the ranks' buffers add up?",
            "labkit.schedules.ALLREDUCE",
            'lk.AllReduce(algorithm="{}")',
            ALLREDUCE,
        ),
        Family(
            "Schedules of the exchange",
            "When do gradients travel?",
            "labkit.exchange.SCHEDULES",
            'lk.AllReduce(schedule="{}")',
            {name: schedule.explained for name, schedule in SCHEDULES.items()},
        ),
        Family(
            "Gradient compression",
            "In how few bytes is a gradient said: fewer bits, fewer elements, fewer dimensions?",
            "labkit.compression.COMPRESSORS",
            "lk.{}",
            COMPRESSORS,
        ),
        Family(
            "Compression of trained models",
            "What may a trained model lose?",
            "labkit.deployment.METHODS",
            "deployment.{}",
            METHODS,
        ),
    ]


def _documents(member: Member) -> Iterator[Docstring]:
    """A method's docstring, then those that hold where it says nothing: what it names, its base."""
    # A schedule of the exchange is no object: its text is all that there is.
    found = parse(member if isinstance(member, str) else member.__doc__)
    yield found
    if found.elsewhere:
        yield from _documents(getattr(sys.modules[member.__module__], found.elsewhere))
    elif inspect.isclass(member):
        for base in member.__bases__:
            if base not in (BaseModel, object):
                yield from _documents(base)


def _papers(named: str, source: str) -> list[Paper]:
    """Those that a class names, `Li 2014, OSDI; Chen 2016, arXiv 1604.00981`; else the source's."""
    if named:
        return [Paper(part.partition(",")[0], _number(part)) for part in named.split("; ")]
    text = _ARXIV.sub("", source)  # the number begins like a year
    author, year = re.search(r"[A-Z][^\W\d_]+", text), re.search(r"\b(19|20)\d\d\b", text)
    if author and year:
        return [Paper(f"{author[0]} {year[0]}", _number(source))]
    return [Paper("folklore", "")] if text.startswith("folklore") else []


def _number(text: str) -> str:
    found = _ARXIV.search(text)
    return found[1] if found else ""


def _places(member: Member) -> Iterator[tuple[str, Sequence[str]]]:
    """On each axis those that are known of a method."""
    if inspect.isclass(member) and issubclass(member, Strategy):
        yield from zip(AXES, map(dict.fromkeys, zip(*member.cells(), strict=True)), strict=True)
    elif inspect.isclass(member) and issubclass(member, Compressor):
        families = {sample.family for sample in samples() if type(sample) is member}
        yield "compression", [family for family in FAMILIES if family in families]
    elif isinstance(member, Pipeline):
        yield "synchronization", (member.synchronization,)
        yield "scheduling", (member.scheduling,)


def _parameters(member: Member) -> list[Parameter]:
    defaults, documents = _defaults(member), list(_documents(member))
    said = {
        name: next(filter(None, (d.argument(name, defaults) for d in documents)), "")
        for name in defaults
    }
    return [Parameter(name, default, said[name]) for name, default in defaults.items()]


def _defaults(member: Member) -> dict[str, str | None]:
    if inspect.isclass(member) and issubclass(member, BaseModel):
        first = by_position(member)
        # The most telling field stands first: it may be given by position.
        fields = sorted(member.model_fields.items(), key=lambda field: field[0] != first)
        given = {n: f.get_default(call_default_factory=True) for n, f in fields}
        return {n: None if f.is_required() else repr(given[n]) for n, f in fields}
    parameters = () if isinstance(member, str) else inspect.signature(member).parameters.values()
    return {p.name: None if p.default is p.empty else repr(p.default) for p in parameters}
