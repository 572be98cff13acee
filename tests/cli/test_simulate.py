"""Test `labkit simulate` with networks by name and with networks from a file."""

import json

import pytest
from click.testing import CliRunner

from labkit.cli.app import app
from labkit.network import Network
from labkit.simulate import simulate
from labkit.simulate.published import VERDICTS


def run(*words):
    return CliRunner().invoke(app, ["simulate", "master_worker", "--bytes", "12", *words])


def test_a_network_by_name_is_simulated_beside_its_closed_form():
    done = run("--workers", "4", "--network", "wan")
    assert done.exit_code == 0
    assert "4 ranks, 12 bytes, wan, simulated" in done.output
    assert "closed form" in done.output


def test_own_networks_come_from_yaml_or_json(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "latency: 1e-3\nbandwidth: 4\nhosts: 2\nhost_bandwidth: 2\nstragglers: {1: 3.0}\n"
    )
    fields = {"latency": 0, "bandwidth": 1, "sharing": "fifo", "name": "graph"}
    fields["links"] = [[0, 1, 2.0], [1, 0, 1.0]]
    (tmp_path / "mine.json").write_text(json.dumps(fields))
    hosts = Network(latency=1e-3, bandwidth=4, hosts=2, host_bandwidth=2, stragglers={1: 3.0})
    for name, size, network in (("mine.yaml", 4, hosts), ("mine.json", 2, Network(**fields))):
        done = run("--workers", str(size), "--network", str(tmp_path / name))
        assert done.exit_code == 0, done.output
        seconds = simulate("master_worker", size, 12.0, network).seconds
        assert f"simulated: {1e3 * seconds:,.3f} ms" in done.output
        assert "closed form" not in done.output  # a closed form exists only for a single switch
    assert "graph, simulated" in done.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("latency: 1", "Network needs 'bandwidth': give bandwidth=…"),
        ("latency: -1\nbandwidth: 1", "latency=-1 is impossible: "),
        (
            "latency: 1\nbandwidth: 1\nspeed: 2",
            "Network has no 'speed' (did you mean 'seed'?); it has: latency",
        ),
        ("latency: 1\nbandwidth: 1\nsharing: luck", "sharing='luck' is impossible: "),
        (
            "latency: 1\nbandwidth: 1\nlinks: [[0, 1]]",
            "links must be a list of at least one (source, destination",
        ),
        ("[1, 2]", "expected `name: value`"),
        (": :", "is not YAML"),
    ],
)
def test_a_file_that_is_no_network_is_refused_in_words(tmp_path, text, words):
    (tmp_path / "wrong.yaml").write_text(text)
    done = run("--network", str(tmp_path / "wrong.yaml"))
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_a_file_that_is_not_there_is_named():
    done = run("--network", "nowhere.yaml")
    assert done.exit_code == 2
    assert "nowhere.yaml cannot be read: No such file" in done.stderr


def test_published_figures_stand_beside_ours(tmp_path):
    file = tmp_path / "rows.json"
    done = CliRunner().invoke(app, ["simulate", "--published", "--json", str(file)])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["verdict"] for row in rows} == set(VERDICTS)
    for row in rows:
        assert row["what"] in done.output
    for verdict, meaning in VERDICTS.items():
        assert f"\n{verdict}: {meaning}\n" in done.output
    assert "fitted on InceptionV3: " in done.output


@pytest.mark.parametrize("words", [[], ["ring", "--published"], ["ring", "--json", "rows"]])
def test_an_algorithm_or_published_figures(words):
    done = CliRunner().invoke(app, ["simulate", *words])
    assert done.exit_code != 0
    assert "give either an algorithm, or --published" in done.output
