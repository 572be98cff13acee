"""Test that repeated calls use the same code objects, because TensorFlow stores call stacks."""

from __future__ import annotations

import pickle
from types import CodeType, FunctionType
from weakref import ref

import pytest

from labkit import Cluster
from labkit.cluster.code_objects import SOME, dumps, execute, intern


def code_of(line: str, file: str = "cell") -> CodeType:
    return compile(line, file, "exec")


def test_equal_code_from_the_same_lines_is_one_object() -> None:
    assert code_of("x = 1") is not code_of("x = 1")
    assert intern(code_of("x = 1")) is intern(code_of("x = 1"))


def test_code_that_no_call_has_brought_for_long_is_let_go() -> None:
    old = ref(intern(code_of("x = 'old'")))
    assert old() is not None
    base = code_of("x = 1")
    for line in range(SOME):
        intern(base.replace(co_firstlineno=line))
    assert old() is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (code_of("x = 1"), code_of("x = 1.0")),
        (code_of("x = 1"), code_of("x = True")),
        (code_of("x = 0.0"), code_of("x = -0.0")),
        (code_of("x = 1"), code_of("x  =  1")),
        (code_of("x = 1"), code_of("\nx = 1")),
        (code_of("x = 1"), code_of("x = 1", "other cell")),
    ],
)
def test_code_that_differs_in_a_constant_or_its_place_stays(one: CodeType, other: CodeType) -> None:
    assert intern(one) is not intern(other)


def test_a_line_is_executed_in_its_namespaces() -> None:
    globally, locally = {"f": len}, {"x": "abc"}
    execute("y = f(x)", globally, locally)
    assert locally == {"x": "abc", "y": 3}


def test_functions_that_travel_by_value_have_state_of_their_own() -> None:
    counts: list[int] = []

    def count(step: int = 2) -> int:
        counts.append(step)
        return sum(counts)

    packed = dumps(count)
    one, other = pickle.loads(packed), pickle.loads(packed)
    assert isinstance(one, FunctionType)
    assert (one(), one(), other(), count(5)) == (2, 4, 2, 5)


def traces(communicator: object) -> int:
    """Return how many call stacks TensorFlow stores that contain ipyparallel's frame."""
    import gc
    import sys

    import tensorflow as tf
    from ipyparallel.engine.kernel import IPythonParallelKernel

    tf.function(lambda x: tf.nn.relu(x) + 1.0).get_concrete_function(tf.TensorSpec([1]))
    gc.collect()
    return sys.getrefcount(IPythonParallelKernel.do_apply.__code__)


def test_a_call_again_leaves_no_stacks_behind(cluster: Cluster) -> None:
    first, *others = [cluster.call(traces, ranks=1)[0] for _ in range(3)]
    assert others == [first, first]
