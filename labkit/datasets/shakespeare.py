"""Reader of tinyshakespeare: character sequences, with the next character at each position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import Field

from labkit.datasets.dataset import Array, Arrays, DatasetSpec, Rows, Shapes
from labkit.datasets.files import DataFile

CHARACTERS = 65  # number of distinct characters in the text
LENGTH = 1_115_394  # characters


class TextOptions(Rows):
    """Options of the data set `shakespeare`."""

    # The upper limit ensures at least one sequence in the test text, which has 111,540 characters.
    sequence_length: int = Field(
        64,
        strict=True,
        ge=1,
        le=100_000,
        description="number of characters per sequence, 1 to 100000",
    )


def read_shakespeare(options: TextOptions, paths: Sequence[Path]) -> Arrays:
    """Return character codes (sequences, sequence_length), and the next characters' codes.

    The first nine tenths of the text are training data, and the rest is test data. Sequences do not
    overlap. The code of a character is its position in the sorted list of the text's distinct
    characters.
    Reference: A. Karpathy 2015.
    """
    text = np.frombuffer(paths[0].read_bytes(), np.uint8)
    _, codes = np.unique(text, return_inverse=True)
    cut = len(codes) * 9 // 10
    return Arrays(
        *_sequences(codes[:cut], options.sequence_length),
        *_sequences(codes[cut:], options.sequence_length),
    )


def sequences(length: int, characters: int = LENGTH * 9 // 10) -> int:
    """Return how many sequences of a given length a text contains; default: the training text."""
    return (characters - 1) // length  # the last sequence also needs a character that follows it


def _sequences(codes: Array, length: int) -> tuple[Array, Array]:
    count = sequences(length, len(codes))
    x = codes[: count * length].reshape(count, length)
    y = codes[1 : count * length + 1].reshape(count, length)
    return x, y


_TEXT = DataFile(
    "tinyshakespeare",
    "input.txt",
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
SHAKESPEARE = DatasetSpec(
    read_shakespeare,
    lambda options: Shapes((options.sequence_length,), CHARACTERS, "next_character"),
    lambda options: sequences(options.sequence_length),
    (_TEXT,),
    options=TextOptions,
)
