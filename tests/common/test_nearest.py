"""Test that an unknown name causes a suggestion of the most similar known name, everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import pytest

import labkit as lk
from labkit.cli.shared_options import experiment_of
from labkit.common.errors import InvalidInput
from labkit.common.nearest import (
    UnknownArgument,
    hint,
    listed,
    literal_strings,
    named_arguments,
    nearest,
    refuse_unknown,
)
from labkit.compression.compressor import parse
from labkit.exchange.exchange import Exchange
from labkit.simulate import simulate

NAMES = ["epochs", "learning_rate", "batch_size", "dataset", "dataset_options", "optimizer"]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("epoch", ["epochs"]),
        ("Epochs", ["epochs"]),
        ("batchsize", ["batch_size"]),
        ("lr", ["learning_rate"]),
        ("bs", ["batch_size"]),
        ("optimiser", ["optimizer"]),
        ("data", ["dataset"]),
        ("opt", ["optimizer", "dataset_options"]),
        ("colour", []),
        ("", []),
        ("_", []),
        (None, []),
        (3, []),
    ],
)
def test_the_nearest_has_the_letters_the_initials_or_a_part_of_the_name(
    name: object, near: Sequence[str]
) -> None:
    assert nearest(name, NAMES) == near


def test_several_near_names_are_offered_together() -> None:
    assert hint("opt", NAMES) == " (did you mean 'optimizer' or 'dataset_options'?)"
    assert hint("cross", [f"{letter}_categorical_crossentropy" for letter in "abcd"]) == (
        " (did you mean 'a_categorical_crossentropy', 'b_categorical_crossentropy' or "
        "'c_categorical_crossentropy'?)"
    )


def test_a_long_list_stands_only_where_no_name_is_near() -> None:
    many = [f"{letter}field" for letter in "abcdefghijklmnopqrstuvwxyz"]
    assert listed("afeld", many) == " (did you mean 'afield'?)"
    assert listed("qqq", many).endswith("allowed: " + ", ".join(many))
    assert listed("a", [], "there are") == "; there are: none"


def test_the_first_unknown_value_is_refused() -> None:
    refuse_unknown("place", ["core"], ("core", "node"))
    with pytest.raises(InvalidInput) as caught:
        refuse_unknown("place", ["core", "nod"], ("core", "node"))
    assert str(caught.value) == (
        "place='nod' is not known (did you mean 'node'?); allowed: core, node"
    )


def test_words_of_a_type_are_those_of_its_literals() -> None:
    assert literal_strings(Literal["ring", "tree"] | tuple[Literal["star"], ...] | None) == [
        *("ring", "tree", "star")
    ]
    assert literal_strings(int) == []


def test_a_function_refuses_an_argument_that_it_does_not_have() -> None:
    @named_arguments("sugar")
    def brew(leaves: int, minutes: float = 3, **more: int) -> float:
        return leaves * minutes + sum(more.values())

    assert brew(2, minutes=4, sugar=1) == 9
    with pytest.raises(UnknownArgument, match=r"no argument 'minute' \(did you mean 'minutes'\?\)"):
        brew(2, minute=4)
    with pytest.raises(TypeError, match="missing 1 required"):  # Python's own error message
        brew()  # type: ignore[call-arg]
    assert issubclass(UnknownArgument, TypeError)


def _of_file(text: str) -> Callable[[], object]:
    def read() -> object:
        path = Path("experiment.yaml")
        path.write_text(text)
        return experiment_of(path, {})

    return read


# A call with a misspelt name, and the name that its error message must suggest.
GIVEN: dict[str, tuple[Callable[[], object], str]] = {
    "field": (lambda: lk.Experiment(epoch=3), "epochs"),
    "field in capitals": (lambda: lk.Experiment(Epochs=3), "epochs"),
    "initials": (lambda: lk.Experiment(lr=0.1), "learning_rate"),
    "replaced field": (lambda: lk.Experiment().replace(batchsize=8), "batch_size"),
    "YAML": (_of_file("modle: mlp"), "model"),
    "value in YAML": (_of_file("strategy: {name: Pipeline, scedule: gpipe}"), "schedule"),
    "word": (lambda: lk.Experiment(clock="virtul"), "virtual"),
    "model": (lambda: lk.Experiment(model="mpl"), "mlp"),
    "option": (lambda: lk.Experiment(model_options={"width": [8]}), "widths"),
    "activation": (lambda: lk.Experiment(model_options={"activation": "rleu"}), "relu"),
    "data set": (lambda: lk.Experiment(dataset="mnits"), "mnist"),
    "optimizer": (lambda: lk.Experiment(optimizer="Adma"), "adam"),
    "data_partition": (lambda: lk.Experiment(data_partition="by_lable"), "by_label"),
    "slowdown": (lambda: lk.Experiment(stragglers={0: {"comput": 2}}), "compute"),
    "network": (lambda: lk.Experiment(network="1gbe"), "1GbE"),
    "field of a network": (lambda: lk.Network(latency=0, bandwith=1e9), "bandwidth"),
    "fault": (lambda: lk.Fault("kil", rank=0, step=0), "kill"),
    "fault alone": (lambda: lk.Fault("pausse"), "pause"),
    "strategy": (lambda: lk.Experiment(strategy="allreduce"), "AllReduce"),
    "field of a strategy": (lambda: lk.ParameterServer(server=2), "servers"),
    "algorithm": (lambda: lk.AllReduce("rng"), "ring"),
    "schedule": (lambda: lk.Pipeline(schedule="gpip"), "gpipe"),
    "partition": (lambda: lk.Pipeline(partition="parameter"), "parameters"),
    "topology": (lambda: lk.Gossip(topology="rnig"), "ring"),
    "outer optimizer": (lambda: lk.ParameterAveraging(outer_optimizer="nestrov"), "nesterov"),
    "compressor": (lambda: lk.AllReduce(compressor="topk"), "TopK"),
    "field of a compressor": (lambda: lk.TopK(ration=0.1), "ratio"),
    "compressor by mapping": (lambda: parse({"name": "TopK", "rato": 0.1}), "ratio"),
    "checkpoint": (lambda: lk.Checkpoint(evry=3), "every"),
    "exchange": (lambda: Exchange(None, schedule="overlp"), "overlap"),  # type: ignore[arg-type]
    "cluster": (lambda: lk.Cluster(worker=2), "workers"),  # type: ignore[call-arg]
    "further of a cluster": (lambda: lk.Cluster(2, map_bi="core"), "map_by"),
    "launcher": (lambda: lk.Cluster(2, launcher="slrum"), "slurm"),
    "run": (lambda: lk.run(lk.Experiment(), checkpont=3), "checkpoint"),  # type: ignore[call-arg]
    "simulated": (lambda: simulate("rin", 4, 1e6, lk.Network(latency=0, bandwidth=1)), "ring"),
}


@pytest.mark.parametrize("what", GIVEN)
def test_the_nearest_name_is_offered(what: str) -> None:
    give, near = GIVEN[what]
    with pytest.raises(InvalidInput, match=rf"\(did you mean '{near}'\?\)") as caught:
        give()
    assert len(str(caught.value)) < 400


def test_a_kind_of_fault_is_refused_before_its_missing_fields() -> None:
    with pytest.raises(InvalidInput, match="kind='explode' is impossible: input should be 'kill'"):
        lk.Fault("explode")
