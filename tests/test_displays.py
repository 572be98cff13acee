"""Test what objects display in a notebook: the right words, and no injected HTML."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_runs import FAILED_GATE, write_run

from labkit import AllReduce, Cluster, Experiment, TopK
from labkit.cluster.launch import card_of
from labkit.cluster.start import Start
from labkit.common.html import curve
from labkit.experiment.display import brief
from labkit.network import Network
from labkit.network.network import rate_text
from labkit.records import store
from labkit.schedules import ALLREDUCE, PIPELINE, get_collective

EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>"


class Tags(HTMLParser):
    """An HTML parser that collects tags and fails on unclosed tags and event handlers."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag != "polyline":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def text(shown: Any) -> str:
    """Return the words of an object's HTML, which may hold only permitted tags."""
    html = shown if isinstance(shown, str) else shown._repr_html_()
    assert not {"script", "img", "style", "iframe", "a"} & set(Tags(html).names)
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def one_line(shown: Any) -> str:
    said = repr(shown)
    assert "\n" not in said
    return said


def test_an_experiment_shows_what_is_its_own_and_folds_the_rest() -> None:
    experiment = Experiment(workers=2, strategy=AllReduce(compressor=TopK(ratio=0.1)))
    own, _, every = text(experiment).partition("all fields")
    assert "workers 2" in own
    assert "strategy AllReduce(compressor=TopK(ratio=0.1))" in own
    assert "epochs" not in own
    assert "epochs 1" in every
    assert one_line(experiment) == (
        "Experiment(strategy=AllReduce(compressor=TopK(ratio=0.1)), workers=2)"
    )
    assert "every field has its default" in text(Experiment())


def test_arrays_and_callables_of_the_users_own_are_named_not_printed() -> None:
    def net() -> None: ...

    data = (np.zeros((30, 4)), np.zeros(30))
    experiment = Experiment(model=net, dataset=data, validation=data)
    assert "dataset (30×4 float64, 30 float64)" in text(experiment)
    assert "model net" in text(experiment)
    assert "30×4" in one_line(experiment)
    assert len(brief({"widths": list(range(1000))})) == 200


def test_a_run_shows_its_verdict_its_figures_and_its_curve(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    shown = text(run)
    for part in ("state completed", "verdict passed", "samples_per_second", "test_accuracy"):
        assert part in shown, part
    assert "held-out loss after each of 3 epochs: 2.1 to 0.7" in shown
    assert 'role="img" aria-label="held-out loss' in run._repr_html_()
    one_line(run)
    failed = write_run(tmp_path, measured={"equivalence": FAILED_GATE})
    assert "samples_per_second" not in text(failed)


def test_a_network_shows_its_links_and_who_is_slow() -> None:
    shown = text(Network.named("1GbE"))
    for part in ("Network 1GbE", "latency 50 µs", "1 Gb/s (125 MB/s)", "1 MiB over one link 8.44"):
        assert part in shown, part
    slow = Network(latency=1e-3, bandwidth=1e6, hosts=2, host_bandwidth=1e9, stragglers={1: 2.0})
    shown = text(slow)
    for part in ("2 ranks each", "bandwidth in a host 8 Gb/s", "rank 1 2 × 2 × constant"):
        assert part in shown, part
    graph = Network(latency=1e-3, bandwidth=1e6, links={(0, 1): 1e6, (1, 0): 2e6})
    assert "1 to 0 16 Mb/s (2 MB/s)" in text(graph)
    for each in (slow, graph):
        one_line(each)


@pytest.mark.parametrize(
    ("bandwidth", "said"), [(12.5e9, "100 Gb/s (1.25e+04 MB/s)"), (125e3, "1 Mb/s (0.125 MB/s)")]
)
def test_bandwidths_are_said_in_bits_and_bytes(bandwidth: float, said: str) -> None:
    assert rate_text(bandwidth) == said


def test_a_schedule_shows_its_rounds() -> None:
    rounds = list(ALLREDUCE["ring"](2))
    assert one_line(rounds[0]) == "<Round of 2 messages>"
    assert text(rounds[0]) == (
        "Round of 2 messages message chunks receiver 0 → 1 1 adds 1 → 0 0 adds"
    )
    shown = text(get_collective("ring"))
    assert shown.startswith("Collective on 4 ranks: 6 rounds, 24 messages")
    assert "0 → 1 replaces" in shown


def test_a_round_of_many_messages_shows_the_first() -> None:
    (first, *_) = ALLREDUCE["all_to_all"](12)
    assert "and 68 more" in text(first)


def test_a_pipeline_shows_its_ticks() -> None:
    table = PIPELINE["gpipe"](2, 2)
    assert one_line(table) == f"<gpipe: 2 stages on 2 ranks, {len(table)} rows>"
    shown = text(table)
    assert "rank 0 F0 F1 · · B1 B0" in shown
    assert "rank 1 · F0 F1 B1 B0" in shown
    assert "first 64 of" in text(PIPELINE["gpipe"](4, 64))


def test_a_cluster_shows_who_holds_it(cluster: Cluster) -> None:
    cluster.call(lambda communicator: None)  # engines that a test has ended restart at the next use
    shown = text(cluster)
    for part in (
        f"Cluster {cluster.name}",
        "engines up",
        "ranks 4 with 1 threads each",
        "(this one)",
    ):
        assert part in shown, part
    assert "cores" in shown
    one_line(cluster)
    # The cluster's lease is still valid.
    assert len(cluster.call(lambda communicator: communicator.rank)) == 4


def test_names_that_come_from_anywhere_are_text(tmp_path: Path) -> None:
    run = write_run(tmp_path, name="x", model=EVIL)
    store.fail(run.path, EVIL)
    store.write_json(tmp_path / "cluster.json", {"state": "failed", "message": EVIL})
    shown = [
        run._repr_html_(),
        Experiment(name=EVIL)._repr_html_(),
        Network(latency=0, bandwidth=1, name=EVIL)._repr_html_(),
        curve([1, 2], EVIL),
        card_of(EVIL, tmp_path, Start(1), connected=False),
    ]
    for html in shown:
        assert "&lt;script&gt;" in html
        text(html)


def test_a_curve_stays_in_its_frame() -> None:
    svg = curve([3.0, 1.0, 2.0], "loss")
    points = re.findall(r"([\d.]+),([\d.]+)", svg)
    assert [(float(x), float(y)) for x, y in points] == [(2, 2), (120, 46), (238, 24)]
    assert curve([1.0], "loss") == ""
    assert "2.0,2.0 238.0,2.0" in curve([1.0, 1.0], "flat")
