"""The contract of a notebook's parameters cell, checked before a kernel starts."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
import typing
import unicodedata
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pydantic import ConfigDict, PydanticUserError, TypeAdapter

from labkit.common.errors import InvalidInput, LabkitError, short
from labkit.common.nearest import listed
from labkit.common.safe_json import NotPlain
from labkit.jobs import annotation_types, cells
from labkit.jobs.inference import UNTYPED, infer
from labkit.jobs.python_source import python_source
from labkit.records.safe_yaml import read_plain

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON


class Unknown:
    """The default of a parameter whose value only the kernel can compute."""


UNKNOWN = Unknown()
_LOGS = re.compile(r"\b(lk|labkit)\.log\(|\bimport log\b|\bglue\(")
# JSON has no infinite number: records hold "Infinity".
_CONFIG = ConfigDict(ser_json_inf_nan="strings")
_NOT_FINITE = re.compile(r"[-+]?(inf|infinity|nan)", re.IGNORECASE)
_CELL_MAGIC = re.compile(r"\s*%%(\w+).*\n?")
_TRANSPARENT = ("capture", "prun", "time")  # cell magics whose rest is Python
Values: TypeAlias = "Mapping[str, JSON]"


@dataclass(frozen=True)
class Parameter:
    """One assignment of a parameters cell: `workers: int = 2  # ranks`.

    `own` says that its notebook logs its runs itself: then `model` may be anything.
    """

    name: str
    annotation: str
    default: JSON | Unknown
    help: str
    declaration: str
    own: bool = False

    @property
    def type(self) -> TypeAdapter[JSON]:
        """What checks and converts values; a type that cannot be read raises InvalidInput."""
        try:
            return TypeAdapter(annotation_types.read(self.annotation or "Any"), config=_CONFIG)
        except (PydanticUserError, TypeError, ValueError) as error:  # NoType is a ValueError
            raise InvalidInput(
                f"the parameters cell declares `{self.declaration}`, but {self.annotation} is not "
                f"a type made of {', '.join(sorted(annotation_types.NAMED))}"
            ) from error

    def convert(self, value: JSON) -> JSON:
        """The value as the declared type; text is read by that type: "true" for bool is True.

        Raises:
            InvalidInput: the value is not of the type.
        """
        # A value of a record that is read again has texts of what JSON has not: "Infinity".
        both = [(value, True), (value, False)]
        readings = _readings(value) if isinstance(value, str) else both
        kind = self.type
        if self.annotation == UNTYPED and isinstance(readings[0][0], str):
            raise InvalidInput(
                f"labkit cannot tell the type of {self.name} from `{self.declaration}`, so that "
                f"{value!r} may be a text or another value: annotate it, as in "
                f"`{self.name}: str = …`"
            )
        if (
            self.annotation in ("Any", UNTYPED)
            and isinstance(value, str)
            and _NOT_FINITE.fullmatch(value)
        ):
            raise InvalidInput(
                f"{self.name} = {value!r} may be a number or a text: annotate `{self.declaration}`,"
                f" as in `{self.name}: float | None = …`"
            )
        for reading, strict in readings:
            try:
                # As JSON: a list may stand for a tuple, but True is no int and 2.0 neither.
                checked = _validate(kind, reading, strict)
                converted: JSON = json.loads(kind.dump_json(checked))
                # What the record holds must mean the same: "Infinity" is a text to `float | str`.
                same = self.source(converted) == python_source(checked)
                if same and (strict or isinstance(value, str) or _equal(converted, value)):
                    return converted
            except ValueError:  # pydantic's errors are some
                continue
        # The declaration lists the choices: once is enough.
        named = "a choice" if "Literal" in self.annotation else self.annotation
        raise InvalidInput(
            f"{self.name} = {short(value)} is not {named}: "
            f"the notebook declares `{self.declaration}`"
        )

    def source(self, value: JSON) -> str:
        """Python that makes a converted value: `(28, 28)` of a tuple, which JSON has as a list."""
        return python_source(_validate(self.type, value, strict=False))


def _equal(value: JSON, other: JSON) -> bool:
    """Whether two values are the same in JSON, where True is not 1, nor 1.0."""
    return json.dumps(value) == json.dumps(other)


def _validate(kind: TypeAdapter[JSON], value: object, strict: bool) -> JSON:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):  # of Python, not of JSON: a date, a path, an infinite number
        return kind.validate_python(value, strict=True)
    return kind.validate_json(text, strict=strict)


Known: TypeAlias = Mapping[str, Parameter]  # what a notebook declares, by name


def declared(notebook: Path) -> dict[str, Parameter]:
    """The parameters of a notebook, in order: the assignments in its cell tagged `parameters`.

    Raises:
        InvalidInput: there is no such notebook, or its cell is not Python.
    """
    found = cells.read(notebook)
    tagged = [cell for cell in found if "parameters" in cell.tags]
    # papermill puts the given values behind the first, whatever it is: a later one would undo them.
    if len(tagged) > 1 or any(cell.kind != "code" for cell in tagged):
        kinds_found = " and ".join(f"a {cell.kind} cell" for cell in tagged[:3])
        raise InvalidInput(
            f"{notebook.name} has the tag `parameters` on {kinds_found}; keep it on one code cell"
        )
    code = "\n".join(cell.source for cell in found if cell.kind == "code")
    own = _LOGS.search(code) is not None and "Experiment" not in code
    try:
        known = parse(tagged[0].source) if tagged else {}
        return {name: replace(each, own=own) for name, each in known.items()}
    except (SyntaxError, ValueError, tokenize.TokenError, RecursionError, MemoryError) as error:
        reason = str(error) or type(error).__name__  # the last two: brackets in brackets
        raise InvalidInput(f"the parameters cell of {notebook} is not Python: {reason}") from error


def parse(source: str) -> dict[str, Parameter]:
    """Read annotated, commented assignments; other statements are left to the kernel."""
    source = _plain_python(source)
    # Python's parser drops comments; its tokens have them, by line.
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found: dict[str, Parameter] = {}
    for node in ast.parse(source).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if not (isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name)):
            continue
        if value is None:  # `workers: int` alone gives the notebook no value to start from
            continue
        annotation = _annotation(node) if isinstance(node, ast.AnnAssign) else "Final"
        if annotation.split(".")[-1] == "Final":  # of what the default is
            annotation = infer(value, {name: each.annotation for name, each in found.items()})
        help = comments.get(node.end_lineno or 0, "")
        text = " ".join((ast.get_source_segment(source, node) or "").split())
        text = re.sub(r"\[ (.*?),? \]", r"[\1]", text)  # of several lines, as one
        declaration = f"{text}  # {help}" if help else text
        default = _default(value)
        found[target.id] = Parameter(target.id, annotation, default, help, declaration)
    return found


def _annotation(node: ast.AnnAssign) -> str:
    if isinstance(node.annotation, ast.Constant):  # `workers: "int" = 2`
        return str(node.annotation.value)
    return ast.unparse(node.annotation)


def _plain_python(source: str) -> str:
    """A cell as Python: magics and shell lines as the calls that IPython makes of them."""
    while match := _CELL_MAGIC.match(source):
        # The other cell magics have a language, or a place, of their own.
        source = source[match.end() :] if match[1] in _TRANSPARENT else ""
    try:
        ast.parse(source)
    except SyntaxError:
        from IPython.core.inputtransformer2 import TransformerManager

        return str(TransformerManager().transform_cell(source))
    return source


def _default(node: ast.expr) -> JSON | Unknown:
    """The value of a literal that JSON has, too."""
    try:
        value: JSON = ast.literal_eval(node)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, MemoryError, RecursionError):  # `{[]: 1}`, `-"a"`, too deep
        return UNKNOWN
    return value


def check(notebook: Path, given: Values, known: Known | None = None) -> dict[str, JSON]:
    """The given parameters, converted to what the notebook declares, or one sentence why not.

    A parameter with the name of an Experiment's field must be possible for that field (unless it is
    a choice whose default is not); a list of values, for each of its items. So the rules stand in
    one place, the Experiment. `known` is what the notebook declares, where that has been read.

    Raises:
        InvalidInput: an unknown name, a wrong type, an impossible value.
    """
    if known is None:
        known, given = declared(notebook), given or _injected_values(notebook)
    # Python reads names so, and a keyboard may write an ö as two letters.
    given = {unicodedata.normalize("NFKC", name): value for name, value in given.items()}
    check_names(notebook, given, known)
    values = {name: known[name].convert(value) for name, value in given.items()}
    # With the defaults: a given number of workers may not fit the batch that the notebook has.
    defaults = {name: parameter.default for name, parameter in known.items()}
    whole = known_values(defaults) | values
    own = {name for name, parameter in known.items() if parameter.own or _lists_its_own(parameter)}
    check_fields({name: value for name, value in whole.items() if name not in own})
    return values


def _injected_values(notebook: Path) -> dict[str, JSON]:
    """The values of an earlier run, which stand in a notebook that papermill has written.

    It replaces them where it is given new ones, and leaves them where not.
    """
    cell = next((each for each in cells.read(notebook) if "injected-parameters" in each.tags), None)
    if cell is None:
        return {}
    recorded = cells.papermill_parameters(notebook)
    written = {name: each.default for name, each in parse(cell.source).items()}
    return known_values({n: recorded.get(n, v) if v is UNKNOWN else v for n, v in written.items()})


def _lists_its_own(parameter: Parameter) -> bool:
    """Whether its choices are the notebook's: `strategy: Literal["ring", "servers"] = "ring"`."""
    from labkit.experiment import Experiment

    if "Literal" not in parameter.annotation or parameter.name not in Experiment.model_fields:
        return False
    try:
        Experiment(**known_values({parameter.name: parameter.default}))
    except InvalidInput:
        return True
    return False


def known_values(values: Mapping[str, JSON | Unknown]) -> dict[str, JSON]:
    """Those values that are known before a kernel runs."""
    return {name: value for name, value in values.items() if not isinstance(value, Unknown)}


def largest(value: JSON | Unknown) -> int:
    """The largest number that a parameter asks for, of ranks or threads; 1 where none is known."""
    numbers = value if isinstance(value, list) else [value]
    return max((number for number in numbers if type(number) is int), default=1)


def check_names(notebook: Path, names: Iterable[str], known: Known) -> None:
    """Refuse a name that the notebook does not declare, with the nearest that it does."""
    for name in names:
        if name not in known:
            raise InvalidInput(
                f"{notebook.name} has no parameter {short(name)}{listed(name, known)}"
            )


def check_fields(values: Values) -> None:
    """Check those values whose names are fields of Experiment, each item of a list with the rest.

    A data set that is not there yet is fetched: better now than by ranks that wait for it.
    """
    from labkit import datasets

    for dataset in check_possible(values).get("dataset", []):
        try:
            datasets.ensure(str(dataset))
        except LabkitError as error:
            raise InvalidInput(f"dataset={dataset!r}: {error}") from error


def check_possible(values: Values) -> dict[str, list[JSON]]:
    """Check as `check_fields` does, without a look at the data; the items of each field."""
    from labkit.experiment import Experiment

    fields = {
        name: value if isinstance(value, list) and not _takes_lists(name) else [value]
        for name, value in values.items()
        if name in Experiment.model_fields
    }
    # Not every combination: an item is held against the first of all others, or a sweep of four
    # lists of ten would build ten thousand experiments before anything starts.
    first = {name: items[0] for name, items in fields.items() if items}
    for name, items in fields.items():
        for item in items:
            Experiment(**first | {name: item})
    return fields


def _takes_lists(field: str) -> bool:
    """Whether a list is one value of this field (`capacities`), not several of them (`workers`)."""
    from labkit.experiment import Experiment

    annotation = Experiment.model_fields[field].annotation
    annotation_types = typing.get_args(annotation) or (annotation,)
    items = [
        typing.get_args(kind)[0] for kind in annotation_types if typing.get_origin(kind) is tuple
    ]
    # tuple[Any, ...] stands for arrays, which no parameters cell holds.
    return any(item is not typing.Any for item in items)


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
        InvalidInput: it cannot be read.
    """
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InvalidInput(f"{path} cannot be read: {reason}") from error


def read_yaml(text: str, origin: str) -> dict[str, JSON]:
    """A mapping from YAML; `origin` names the text in an error.

    Raises:
        InvalidInput: the text is not YAML, or not a mapping of names to values.
    """
    try:
        record = read_plain(text)
    except NotPlain as error:
        raise InvalidInput(f"{origin} {error}") from error
    if record is None:
        return {}
    if not isinstance(record, dict) or not all(isinstance(name, str) for name in record):
        raise InvalidInput(f"{origin} gives {text.strip()[:60]!r}; expected `name: value`")
    return record


def value_of(text: JSON) -> JSON:
    """What a text of the command line means where no notebook declares its type."""
    return _readings(text)[0][0] if isinstance(text, str) else text


def _readings(text: str) -> list[tuple[JSON, bool]]:
    """What a text may mean, the likeliest first, and whether it must fit the type exactly."""
    readings: list[tuple[JSON, bool]] = [(text, False)]
    if text.startswith("("):  # a tuple as Python writes it
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            readings.append((ast.literal_eval(text), True))
            return readings
    for place, source in enumerate((text, f"[{text}]")):  # 1,2,4 is a list where one is declared
        try:
            value = read_plain(source)
        except NotPlain:  # a text like "a: b: c" can only be text
            continue
        if not isinstance(value, str):  # a text means itself, quotes and all
            readings.insert(2 * place, (value, True))
    # An empty text means itself where the type has texts, as papermill takes it.
    return readings if text else sorted(readings, key=lambda reading: reading[0] is None)
