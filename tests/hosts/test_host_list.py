"""Test that hosts are parsed alike from every notation."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.common.errors import InvalidInput
from labkit.hosts.host_list import Host, hosts_of

BOTH = [Host("a", 2), Host("b", 2)]
FILE = """\
# of the lab
a slots=2

b:2  # the slow one
"""


def test_a_list_words_and_a_file_mean_the_same() -> None:
    Path("hosts").write_text(FILE)
    for given in (["a:2", "b:2"], "a:2,b:2", " a:2, b:2", Path("hosts"), "hosts"):
        assert hosts_of(given) == BOTH, given
    assert [str(host) for host in BOTH] == ["a:2", "b:2"]


def test_a_host_without_slots_has_one_and_one_that_is_named_twice_has_both() -> None:
    assert hosts_of(["node-1.example", "10.0.0.2"]) == [("node-1.example", 1), ("10.0.0.2", 1)]
    Path("nodes").write_text("a\na\nb\nb\n")  # the format of a PBS node file
    assert hosts_of("nodes") == BOTH


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], r"hosts=\[\] names no host; give at least one, such as a:2,b:2"),
        ("a:2,,b", "hosts: '' is not a host; allowed: a:2 or a"),
        ("-oProxyCommand=x", "is not a host"),
        (["a b"], "hosts: 'a b' is not a host"),
        (["a:0"], "'a:0': give a host 1 to 10,000 slots"),
        ([2], "hosts: 2 is not a host"),
        (Path("nowhere"), "the host file nowhere cannot be read: .*No such file"),
    ],
)
def test_what_names_no_host_is_refused(given: object, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        hosts_of(given)


def test_a_line_that_is_odd_is_named_by_its_number() -> None:
    Path("hosts").write_text("a slots=2\nb slots=two\n")
    with pytest.raises(
        InvalidInput, match="hosts, line 2: 'b slots=two' is not a host; allowed: a s"
    ):
        hosts_of("hosts")
    Path("hosts").write_text("# none\n")
    with pytest.raises(InvalidInput, match="names no host"):
        hosts_of("hosts")
