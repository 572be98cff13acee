"""Test that text for other programs preserves each value, or is refused in one line."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import nbformat
import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import example, given
from hypothesis import strategies as st

from labkit.cli.app import app
from labkit.common import names
from labkit.common.errors import InvalidInput
from labkit.jobs.containers import MPIJob
from labkit.report.jobs import command

# Texts with a special meaning in shells or YAML, and arbitrary texts; no argument can contain NUL.
ODD = [
    "a'; touch x; '",
    "a b",
    "a\nb",
    '"',
    "$(id)",
    "`id`",
    "-x",
    "a: b",
    "#",
    "\\",
    "é",
    "{",
    "%",
]
TEXT = st.sampled_from(ODD) | st.text(st.characters(exclude_characters="\0", codec="utf-8"))
NAMED = (("--image", names.IMAGE), ("--claim", names.SUBDOMAIN), ("--namespace", names.LABEL))


def labkit(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(result: Result) -> bool:
    """Return whether a command was refused with a one-line message."""
    assert "Traceback" not in result.output
    return result.exit_code == 2 and result.stderr.count("\n") == 1


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    path = tmp_path / "asks.ipynb"
    cell = nbformat.v4.new_code_cell('text: str = ""', metadata={"tags": ["parameters"]})
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    return path


@given(st.lists(TEXT.filter(lambda text: not text.startswith("-")), min_size=1, max_size=3))
@example(["a'; touch x; '"])
def test_a_shell_reads_hosts_of_tf_config_as_they_are(hosts: list[str]) -> None:
    result = labkit("tf-config", *hosts)
    if not refused(result):
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        assert len(lines) == 2 * len(hosts)
        _, words = zip(*map(shlex.split, lines[1::2]), strict=True)
        told = [json.loads(word.removeprefix("TF_CONFIG=")) for word in words]
        wanted = [f"{host}:2222" for host in hosts]
        assert all(each["cluster"] == {"worker": wanted} for each in told)


@pytest.mark.parametrize(("option", "kind"), NAMED)
@pytest.mark.parametrize("name", ["a-b1", "a.example/b:1.0", *ODD, "a" * 300, "A", "a--", "a\n"])
def test_a_name_in_kubernetes_is_written_as_it_is_or_refused(
    option: str, kind: names.Format, name: str, notebook: Path
) -> None:
    result = labkit("kubernetes", notebook, f"{option}={name}")
    assert refused(result) == (not kind.fits(name) or len(name) > kind.longest)
    if result.exit_code == 0:
        written = Path("job.yaml").read_text()
        assert name in json.dumps(list(yaml.safe_load_all(written)))


@given(value=TEXT)
def test_a_pods_shell_reads_parameters_as_they_are(value: str) -> None:
    path = Path("asks.ipynb")
    cell = nbformat.v4.new_code_cell('text: str = ""', metadata={"tags": ["parameters"]})
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    _, job = yaml.safe_load_all(MPIJob(path, {"text": value}, "labkit:1").text)
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    line = launcher["command"][-1].partition("\nexec ")[2]
    assert shlex.split(line) == ["labkit", "run", "notebook/asks.ipynb", "-p", "text", value]


@pytest.mark.parametrize("stem", ["a\nkind: Secret", "a b", "é"])
def test_a_notebook_that_no_configmap_holds_is_refused(stem: str, notebook: Path) -> None:
    path = notebook.with_name(f"{stem}.ipynb")
    path.write_text(notebook.read_text())
    assert refused(labkit("kubernetes", path))


def test_no_shell_takes_a_parameter_with_nul(notebook: Path) -> None:
    with pytest.raises(InvalidInput, match="NUL"):
        MPIJob(notebook, {"text": "a\0b"}, "labkit:1")


@pytest.mark.parametrize("folder", ["a b", "a'b", "$(id)"])
@pytest.mark.parametrize("asked", ["kubernetes", "container"])
def test_a_command_that_is_shown_can_be_pasted(asked: str, folder: str, notebook: Path) -> None:
    Path(folder).mkdir()
    output = f"{folder}/file"
    result = labkit(asked, *([notebook] if asked == "kubernetes" else []), "-o", output)
    shown = result.output.strip().rpartition("; ")[2]
    assert output in shlex.split(shown)


@given(value=TEXT | TEXT.map(lambda text: f"/srv/lab/{text}"))
@example("'/srv/lab/alice x'; touch y")
def test_a_reports_command_is_one_command_whatever_a_record_holds(value: str) -> None:
    job = Path("runs/asks/001")
    job.mkdir(parents=True, exist_ok=True)
    (job / "params.yaml").write_text(yaml.safe_dump({"text": value}), encoding="utf-8")
    words = shlex.split(command(job))
    assert words[:2] == ["labkit", "run"]
    assert words[3:5] == ["-p", "text"]
    assert len(words) == 6


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (names.HOST, "node-01.example"),
        (names.HOST, "10.0.0.1"),
        (names.HOST, "[fe80::1]"),
        (names.IMAGE, "registry.example:5000/team/labkit:1.0"),
        (names.IMAGE, "labkit@sha256:" + "0" * 64),
        (names.SUBDOMAIN, "runs.of.mine"),
    ],
)
def test_what_is_usual_is_a_name(kind: names.Format, name: str) -> None:
    assert kind.validate(name) == name


def test_a_refusal_is_one_line_that_says_what_is_allowed() -> None:
    with pytest.raises(InvalidInput) as error:
        names.HOST.validate("a\nb", "hosts")
    assert re.fullmatch(
        r"hosts: 'a\\nb' is not a valid name or address of a host; allowed: .*", str(error.value)
    )
