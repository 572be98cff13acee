"""Test which error class an unwritable file causes, and how errors are shortened."""

from __future__ import annotations

import errno
import os

import pytest

from labkit.common.errors import InvalidInput, LabkitError, cannot_write, gist


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, LabkitError), (errno.EROFS, LabkitError), (errno.ENOTDIR, InvalidInput)],
)
def test_a_disk_is_nobodys_bad_input(number: int, kind: type[LabkitError]) -> None:
    error = cannot_write("report.html", OSError(number, os.strerror(number)))
    assert type(error) is kind
    assert str(error) == f"report.html cannot be written: {os.strerror(number)}"


# Error messages of Python, Keras and TensorFlow, and the single line made of each.
SAID = {
    "one line": "one line",
    "the cause stands here\nand a detail there": "the cause stands here and a detail there",
    "": "",
    "\n\nlate\n\n": "late",
    "Exception encountered when calling LSTM.call().\n\n"
    "\x1b[1mbatch size 12 must be the same\x1b[0m\n\n"
    "Arguments received by LSTM.call():\n  • mask=None": (
        "Exception encountered when calling LSTM.call(). batch size 12 must be the same "
        "Arguments received by LSTM.call(): • mask=None"
    ),
    "in user code:\n\n"
    '    File "/x/train.py", line 16, in h  *\n        return tf.matmul(x, y)\n\n'
    "    ValueError: Dimensions must be equal\n": (
        "in user code: ValueError: Dimensions must be equal"
    ),
    "Graph execution error:\n\n"
    "Detected at node PyFunc defined at (most recent call last):\n<stack traces unavailable>\n"
    "ValueError: the cause stands here\nand a detail there\n"
    "Traceback (most recent call last):\n\n"
    '  File "/x/script_ops.py", line 269, in __call__\n    ret = func(*args)\n'
    "          ^^^^^^^^^^^\n\n"
    "ValueError: the cause stands here\nand a detail there\n\n\n"
    "\t [[{{node PyFunc}}]] [Op:__inference_f_7]": (
        "ValueError: the cause stands here and a detail there"
    ),
    "{{function_node __wrapped__IteratorGetNext_output_types_1}} OSError: file a\nis broken\n"
    "Traceback (most recent call last):\n\n"
    '  File "/x/script_ops.py", line 269, in __call__\n    ret = func(*args)\n\n'
    "OSError: file a\nis broken\n\n\n\t [[{{node PyFunc}}]] [Op:IteratorGetNext] name: ": (
        "OSError: file a is broken"
    ),
    "2 root error(s) found.\n  (0) INVALID_ARGUMENT:  rows must be positive\n"
    "\t [[{{node Assert}}]]\n0 successful operations.": (
        "2 root error(s) found. (0) INVALID_ARGUMENT: rows must be positive "
        "0 successful operations."
    ),
    '  File "/x/train.py", line 1, in f\n': 'File "/x/train.py", line 1, in f',
}


@pytest.mark.parametrize("said", SAID)
def test_an_error_of_several_lines_is_told_from_its_first_word(said: str) -> None:
    assert gist(said) == SAID[said]


def test_a_very_long_error_keeps_its_begin_and_its_end() -> None:
    told = gist("the cause\n" + "detail " * 1000 + "\nthe end")
    assert told.startswith("the cause detail")
    assert told.endswith("the end")
    assert len(told) < 2000
