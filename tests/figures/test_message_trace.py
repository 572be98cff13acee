"""Test that the message trace draws exactly the messages of the schedule."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from labkit.common.errors import InvalidInput
from labkit.figures import message_trace
from labkit.network import Network
from labkit.schedules import ALLREDUCE, Round
from labkit.simulate import simulate


def arrows(state: Any) -> int:
    """Return the number of arrow heads in a frame."""
    curves = [trace for trace in state if trace.type == "scatter" and trace.marker.size is not None]
    return sum(np.count_nonzero(trace.marker.size) for trace in curves)


def cells(state: Any) -> list[str]:
    """Return the texts in the chunks, rank by rank."""
    words = next(trace for trace in state if trace.type == "scatter" and trace.xaxis == "x2")
    return list(words.text)


@pytest.mark.battery(10, 23)
@pytest.mark.parametrize("size", [2, 5, 12])
@pytest.mark.parametrize("name", ALLREDUCE)
def test_every_frame_has_an_arrow_a_message_and_the_last_one_all_sums(name: str, size: int) -> None:
    figure = message_trace(name, size)
    rounds = list(ALLREDUCE[name](size))
    assert [arrows(frame.data) for frame in figure.frames] == [0, *map(len, rounds)]
    assert all(text.startswith("Σ") for text in cells(figure.frames[-1].data))


def test_chunks_fill_as_in_the_lectures_ring() -> None:
    frames = message_trace("ring", 3).frames
    assert cells(frames[0].data) == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]
    rows = [cells(frame.data)[:3] for frame in frames]  # of rank 0
    assert rows[1] == ["a0", "b0+b2", "c0"]
    assert rows[2] == ["Σa", "b0+b2", "c0"]
    assert rows[4] == ["Σa", "Σb", "Σc"]


def test_the_figure_shows_the_first_round_until_it_is_played() -> None:
    figure = message_trace("master_worker", 4)
    assert arrows(figure.data[-6:]) == 3
    assert figure.layout.sliders[0].active == 1
    assert [button.label for button in figure.layout.updatemenus[0].buttons] == [
        "▶ play",
        "❚❚ pause",
    ]


def test_numbers_accumulate_where_numbers_are_given() -> None:
    figure = message_trace("ring", 2, values=[[1, 2], [30, 40]])
    assert cells(figure.frames[-1].data) == ["31", "42", "31", "42"]
    with pytest.raises(InvalidInput, match=r"give values of shape \(2, 2\)"):
        message_trace("ring", 2, values=[1, 2])


def test_on_a_network_the_rounds_have_the_simulators_times() -> None:
    figure = message_trace("ring", 4, "1GbE", nbytes=4e6)
    end = simulate("ring", 4, 4e6, "1GbE").seconds
    assert f"to {1e3 * end:.3g} ms on the simulated clock" in figure.frames[-1].data[-1].text[0]
    assert "simulation · network 1GbE" in figure.layout.title.text


def test_a_networks_hosts_lay_out_the_schedule() -> None:
    hosts = Network(latency=0, bandwidth=1e9, hosts=((0, 2), (1, 3)))
    figure = message_trace("hierarchical", 4, hosts)
    assert "2 to 0 adds" in figure.alt
    assert "3 to 1 adds" in figure.alt


def test_a_switch_that_adds_is_drawn_behind_the_ranks() -> None:
    figure = message_trace("in_network", 3)
    assert [arrows(frame.data) for frame in figure.frames] == [0, 3, 3]
    assert cells(figure.frames[0].data) == ["a0", "a1", "a2", ""]
    assert cells(figure.frames[1].data) == ["a0", "a1", "a2", "Σa"]
    assert "0 to S0 adds" in figure.alt


def test_the_words_say_rounds_messages_and_the_end() -> None:
    alt = message_trace("ring", 3).alt
    assert "Ring allreduce, 3 ranks: 4 rounds, 12 messages" in alt
    assert "round 1 of 4: 3 messages of n/3: 0 to 1 adds c, 1 to 2 adds a, 2 to 0 adds b" in alt
    assert "every rank holds the sum of every chunk" in alt
    assert "1 of 3 chunks on the ranks hold the full sum" in message_trace("reduce_tree", 3).alt


def test_a_table_says_the_same_to_a_keyboard() -> None:
    html = message_trace("tree", 2)._repr_html_()
    assert html.startswith("<details><summary>")
    assert "<tr><th>1</th><td>1 to 0 adds</td><td>Σa</td><td>a1</td></tr>" in html


def test_a_notebook_keeps_frames_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    message_trace("ring", 2)._ipython_display_()
    assert len(shown[0]["application/vnd.plotly.v1+json"]["frames"]) == 3
    assert "<table>" in shown[1]["text/html"]
    assert "http" not in json.dumps(shown)


def test_a_schedule_of_ones_own_is_drawn() -> None:
    def lonely(size: int) -> list[Round]:
        return [Round([0], [size - 1], reduce=True)]

    figure = message_trace(lonely, 3)
    assert figure.layout.title.text == "Lonely, 3 ranks"
    assert cells(figure.frames[-1].data) == ["a0", "a1", "a0+a2"]


@pytest.mark.parametrize("size", [1, 13])
def test_what_cannot_be_drawn_legibly_is_refused(size: int) -> None:
    with pytest.raises(InvalidInput, match=f"size={size}: a message trace draws 2 to 12 ranks"):
        message_trace("ring", size)


def test_the_largest_trace_stays_under_a_megabyte() -> None:
    assert len(message_trace("ring", 12).to_json()) < 1e6
