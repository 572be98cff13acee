"""Test how descriptions of methods are read from docstrings of this project's forms."""

from __future__ import annotations

from labkit.cli.methods.method import parse

LONG = r"""Sends the greatest, \(k\) of them.

    \(\hat g = g\). Best under feedback.

    Args:
        ratio: of the elements, how many are sent.
        threshold: "exact": k elements. "sampled": about as many;
            zeros are not sent.

    Raises:
        InvalidInput: a ratio of zero.

    Source: A. F. Aji, K. Heafield, Sparse Communication, 2017, arXiv
    1704.05021. Difference from the paper: a sample of 128
    elements.
    """
SHORT = """The root ends with the sum: ⌈lg p⌉ rounds.

        round 1   0 ◄ 1

    Args: size: number of ranks, from 1; root: the rank in the place of 0 (the others
    follow: one by one).
    Source: Thakur et al. 2005, *Collectives in MPICH* (Pipe-
    Dream).
    """


def test_a_long_docstring() -> None:
    found = parse(LONG)
    names = ("ratio", "threshold")
    assert found.summary == "Sends the greatest, $k$ of them."
    assert found.argument("ratio", names) == "of the elements, how many are sent"
    said = '"exact": k elements. "sampled": about as many; zeros are not sent'
    assert found.argument("threshold", names) == said
    source = "A. F. Aji, K. Heafield, Sparse Communication, 2017, arXiv 1704.05021."
    assert (found.source, found.differs) == (source, "a sample of 128 elements.")
    assert found.source_function is None


def test_a_short_docstring() -> None:
    found = parse(SHORT)
    names = ("size", "root")
    assert found.argument("size", names) == "number of ranks, from 1"
    assert (
        found.argument("root", names)
        == "the rank in the place of 0 (the others follow: one by one)"
    )
    assert found.source == "Thakur et al. 2005, *Collectives in MPICH* (Pipe-Dream)."
    assert found.differs == ""


def test_a_docstring_that_names_another() -> None:
    found = parse(
        "Likewise.\n\n    Args, raises and source: as `tree`.\n    "
        "Difference from the paper: slow.\n"
    )
    assert (found.source_function, found.differs) == ("tree", "slow.")
    assert found.argument("size", ("size",)) == ""
    assert parse("Likewise.\n\n    Args: as for `Pipeline`, whose schedule is fixed.").source == ""


def test_a_differs_of_its_own_without_a_source() -> None:
    assert parse("One.\n\n    Difference from the paper: no rollback.\n").differs == "no rollback."


def test_no_docstring_says_nothing() -> None:
    assert parse(None).summary == ""
