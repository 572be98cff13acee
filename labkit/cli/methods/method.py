"""Families of methods, with texts and sources from the methods' docstrings."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pydantic import BaseModel

from labkit.common.validated import by_position
from labkit.compression import COMPRESSORS, FAMILIES, Compressor, samples
from labkit.deployment import METHODS
from labkit.exchange.autotune import SCHEDULES
from labkit.figures.taxonomy import MethodInCell
from labkit.jobs import cells
from labkit.schedules import ALLREDUCE, PIPELINE
from labkit.schedules.pipeline import PipelineSchedule
from labkit.strategies import AXES, STRATEGIES, Strategy

if TYPE_CHECKING:
    from labkit.schedules.pipeline import ScheduleTable
    from labkit.schedules.round import Round


SECTIONS = ("args", "raises", "returns", "attributes", "source")
# One heading in a docstring may name several sections. Examples of docstring headings are "Args:",
# "Args and source:", "Args, raises and source:" and "Source:".
_HEAD = re.compile(r"([A-Za-z]+(?:(?:, | and )[a-z]+)*):\s*(.*)")
_DIFFERS = re.compile(r"(?:^|(?<=\.)\s+)Difference from the papers?:\s+")
_ELSEWHERE = re.compile(r"as (?:for )?`(\w+)`")


@dataclass(frozen=True)
class Docstring:
    """The sections of a docstring; absent sections are "". Only the text in `args` keeps its line
    breaks."""

    summary: str
    args: str = ""
    source: str = ""
    differs: str = ""

    @property
    def source_function(self) -> str | None:
        """Name of the function in "Source: as `tree`", whose docstring states the source."""
        found = _ELSEWHERE.match(self.source)
        return found[1] if found else None

    def argument(self, name: str, names: Iterable[str]) -> str:
        """Return an argument's description in the section "Args"; `names` lists all arguments."""
        every = "|".join(map(re.escape, names))
        # In a docstring, an argument's entry begins a line or follows a semicolon. An example of
        # two entries is "x: first; y: second".
        starts = list(re.finditer(rf"(?:^|\n|;)\s*({every}):\s", self.args))
        ends = [*(start.start() for start in starts), len(self.args)][1:]
        parts = zip(starts, ends, strict=True)
        texts = {start[1]: self.args[start.end() : end] for start, end in parts}
        return _line(texts.get(name, "")).rstrip(".")


def parse(text: str | None) -> Docstring:
    """Parse a docstring, and convert TeX delimiters into the dollar signs of Markdown."""
    cleaned = inspect.cleandoc(text or "")
    summary, *_ = re.split(r"\n\s*\n", cleaned, maxsplit=1)
    sections = dict.fromkeys(SECTIONS, "")
    current: list[str] = []
    for line in cleaned.splitlines():
        if head := _heading(line):
            current, rest = head
        elif line.startswith("Difference from") and not current:
            current, rest = ["source"], line
        elif not line.strip():
            current, rest = [], ""
        else:
            rest = line
        for section in current:
            sections[section] += f"{rest}\n"
    # A zero byte, which occurs in no docstring, marks the place of the words "Difference from the
    # paper".
    source, _, differs = _DIFFERS.sub("\0", _line(sections["source"])).partition("\0")
    return Docstring(_line(summary), _dollars(sections["args"]), source, differs)


def _heading(line: str) -> tuple[list[str], str] | None:
    """Return the section names in a heading line, and its other text; None if no heading."""
    head = _HEAD.fullmatch(line)
    if head is None:
        return None
    sections = re.split(r", | and ", head[1].lower())
    return (sections, head[2]) if set(sections) <= set(SECTIONS) else None


def _line(text: str) -> str:
    # The code removes a line break after a hyphen, so that a hyphenated word stays together.
    joined = re.sub(r"(?<=\w)-\n\s*", "-", text)
    return _dollars(" ".join(joined.split()))


def _dollars(text: str) -> str:
    return re.sub(r"\\[()]", "$", text)


# A `Member` stands for a method: a class, a function or a text. A text stands for a method that is
# no Python object.
Member: TypeAlias = "type | Callable[..., Iterable[Round] | ScheduleTable] | str"

_ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a method; `default` is the default value's repr, or None if required."""

    name: str
    default: str | None
    help: str


class Paper(NamedTuple):
    """A citation, such as `Aji 2017` or `folklore`, and the paper's arXiv number or ""."""

    cited: str
    arxiv: str


@dataclass(frozen=True)
class Method:
    """A description of one method, such as a strategy or a compressor.

    Attributes:
        name: Name of the method, which is its key in the mapping of its family.
        expression: Python expression that selects the method, such as `lk.AllReduce`.
        summary: First paragraph of the docstring.
        parameters: The method's parameters, with defaults and descriptions.
        source: The publication: authors, title and year, with the arXiv number if one exists.
        differs: How the method differs from the method in the publication.
        papers: Papers that the class of the method cites, or else the paper in `source`.
        axes: The method's values on the axes of the taxonomy. The keys are the axis names in
            `labkit.strategies.AXES`.
    """

    name: str
    expression: str
    summary: str
    parameters: Sequence[Parameter]
    source: str
    differs: str
    papers: Sequence[Paper]
    axes: Mapping[str, Sequence[str]]

    @property
    def cited(self) -> str:
        """The citations as text, such as `Li 2014; Chen 2016` or `folklore`."""
        return "; ".join(paper.cited for paper in self.papers)


@dataclass(frozen=True)
class Family:
    """A family of methods: a dictionary (mapping) of methods, with texts about all of them.

    Attributes:
        title: Heading of the family's section.
        question: Sentence or question that describes the family, printed below the title.
        place: Qualified name of the family's mapping, such as `labkit.strategies.STRATEGIES`.
        template: Python expression that selects a method, with `{}` for the method's name.
        members: The family's mapping from a method's name to its class, function or docstring.
    """

    title: str
    question: str
    place: str
    template: str
    members: Mapping[str, Member]

    def methods(self) -> list[Method]:
        """Return all methods of the family, in the order of the family's mapping."""
        return [self._method(name, member) for name, member in self.members.items()]

    def _method(self, name: str, member: Member) -> Method:
        parameters = _parameters(member)
        known = ", ".join(f"{p.name}={p.default or '…'}" for p in parameters)
        expression = (
            self.template.format(name)
            if '"' in self.template
            else f"{self.template.format(name)}({known})"
        )
        own, *others = _documents(member)
        # If a method's docstring states no source, the docstring of its base class may state the
        # source.
        origin = next(
            (d for d in (own, *others) if d.source and not d.source_function), Docstring("")
        )
        differs = own.differs or origin.differs
        papers = _papers(getattr(member, "paper", ""), origin.source)
        places = dict(_places(member))
        return Method(
            name, expression, own.summary, parameters, origin.source, differs, papers, places
        )


def families() -> list[Family]:
    """Return the families of methods, in the order of the taxonomy."""
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
            "Models split across ranks: model parallel training",
            "Each rank trains a part of the model.",
            strategies,
            "lk.{}",
            {name: kind for name, kind in STRATEGIES.items() if name not in replicas},
        ),
        Family(
            "Pipeline schedules",
            "When does each stage run the forward and backward pass of each micro-batch?",
            "labkit.schedules.PIPELINE",
            'lk.Pipeline(schedule="{}")',
            PIPELINE,
        ),
        Family(
            "Allreduce algorithms",
            "Which messages sum the buffers of all ranks?",
            "labkit.schedules.ALLREDUCE",
            'lk.AllReduce(algorithm="{}")',
            ALLREDUCE,
        ),
        Family(
            "Schedules of the gradient exchange",
            "When are gradients exchanged within a training step?",
            "labkit.exchange.SCHEDULES",
            'lk.AllReduce(schedule="{}")',
            {name: schedule.explanation for name, schedule in SCHEDULES.items()},
        ),
        Family(
            "Gradient compression",
            "How are gradients encoded in fewer bytes: fewer bits, fewer elements or a lower rank?",
            "labkit.compression.COMPRESSORS",
            "lk.{}",
            COMPRESSORS,
        ),
        Family(
            "Compression of trained models",
            "How does a trained model become smaller?",
            "labkit.deployment.METHODS",
            "deployment.{}",
            METHODS,
        ),
    ]


def _documents(member: Member) -> Iterator[Docstring]:
    """Yield a method's docstring, and then those of its source function or base classes."""
    # Texts instead of docstrings describe the schedules of the gradient exchange.
    document = parse(member if isinstance(member, str) else member.__doc__)
    yield document
    if document.source_function:
        yield from _documents(getattr(sys.modules[member.__module__], document.source_function))
    elif inspect.isclass(member):
        for base in member.__bases__:
            if base not in (BaseModel, object):
                yield from _documents(base)


def _papers(named: str, source: str) -> list[Paper]:
    """Return the papers that describe a method."""
    if named:
        return [Paper(part.partition(",")[0], _number(part)) for part in named.split("; ")]
    # The code removes arXiv numbers, because their digits could look like a year.
    text = _ARXIV.sub("", source)
    author, year = re.search(r"[A-Z][^\W\d_]+", text), re.search(r"\b(19|20)\d\d\b", text)
    if author and year:
        return [Paper(f"{author[0]} {year[0]}", _number(source))]
    return [Paper("folklore", "")] if text.startswith("folklore") else []


def _number(text: str) -> str:
    match = _ARXIV.search(text)
    return match[1] if match else ""


def _places(member: Member) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each taxonomy axis that applies to a method, with the method's values on this axis."""
    if inspect.isclass(member) and issubclass(member, Strategy):
        yield from zip(AXES, map(dict.fromkeys, zip(*member.cells(), strict=True)), strict=True)
    elif inspect.isclass(member) and issubclass(member, Compressor):
        families = {sample.family for sample in samples() if type(sample) is member}
        yield "compression", [family for family in FAMILIES if family in families]
    elif isinstance(member, PipelineSchedule):
        yield "synchronization", (member.synchronization,)
        yield "scheduling", (member.scheduling,)


def _parameters(member: Member) -> list[Parameter]:
    defaults, documents = _defaults(member), list(_documents(member))
    texts = {
        name: next(filter(None, (d.argument(name, defaults) for d in documents)), "")
        for name in defaults
    }
    return [Parameter(name, default, texts[name]) for name, default in defaults.items()]


def _defaults(member: Member) -> dict[str, str | None]:
    if inspect.isclass(member) and issubclass(member, BaseModel):
        first = by_position(member)
        fields = sorted(member.model_fields.items(), key=lambda field: field[0] != first)
        values = {n: f.get_default(call_default_factory=True) for n, f in fields}
        return {n: None if f.is_required() else repr(values[n]) for n, f in fields}
    parameters = () if isinstance(member, str) else inspect.signature(member).parameters.values()
    return {p.name: None if p.default is p.empty else repr(p.default) for p in parameters}


def sources(notebooks: Path) -> dict[Path, str]:
    """Return the code of each notebook in a folder; raise InvalidInput if one is unreadable."""
    code = {}
    for path in sorted(notebooks.glob("*.ipynb")):
        code[path] = "\n".join(cell.source for cell in cells.read(path) if cell.kind == "code")
    return code


def trying(family: Family, method: Method, code: Mapping[Path, str]) -> list[Path]:
    """Return the notebooks that use a method; those that name it most often come first.

    A notebook uses a method if its code contains the method's name. Code that names the mapping of
    the method's family also uses the method.
    """
    name = re.compile(rf'"{method.name}"' if '"' in family.template else rf"\b{method.name}\b")
    named = {path: len(name.findall(text)) for path, text in code.items()}
    paths = [path for path, text in code.items() if family.place in text or named[path]]
    return sorted(paths, key=lambda path: -named[path])


@dataclass(frozen=True)
class Placed:
    """A strategy: its class, its entry in the list of methods, and notebooks that use it."""

    method: Method
    notebooks: list[Path]
    kind: type[Strategy]

    def standings(self) -> Iterator[MethodInCell]:
        """Yield an entry for each cell of the taxonomy that the strategy's fields allow."""
        names = tuple(path.stem for path in self.notebooks)
        for cell in self.kind.cells():
            yield MethodInCell(self.method.name, self.method.cited, names, cell)


def placed(code: Mapping[Path, str]) -> list[Placed]:
    """Return all strategies, in the order of the families of methods.

    Args:
        code: Source code of the notebooks, with their paths as keys.
    """
    return [
        Placed(method, trying(family, method, code), kind)
        for family in families()
        for method in family.methods()
        if (kind := _strategy(family, method)) is not None
    ]


def members(axis: str, place: str) -> list[str]:
    """Return the names of all methods that have the value `place` on an axis."""
    every = [method for family in families() for method in family.methods()]
    return [each.name for each in every if place in each.axes.get(axis, ())]


def axes() -> list[tuple[str, list[tuple[str, str, list[str]]]]]:
    """Return all axes with their values; a value has a name, a description and methods."""
    return [
        (
            axis,
            [(place, description, members(axis, place)) for place, description in places.items()],
        )
        for axis, places in AXES.items()
    ]


def _strategy(family: Family, method: Method) -> type[Strategy] | None:
    member = family.members[method.name]
    return member if inspect.isclass(member) and issubclass(member, Strategy) else None
