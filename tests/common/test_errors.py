"""Which error a file that cannot be written is."""

from __future__ import annotations

import errno
import os

import pytest

from labkit.common.errors import InvalidInput, LabkitError, cannot_write


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, LabkitError), (errno.EROFS, LabkitError), (errno.ENOTDIR, InvalidInput)],
)
def test_a_disk_is_nobodys_bad_input(number: int, kind: type[LabkitError]) -> None:
    error = cannot_write("report.html", OSError(number, os.strerror(number)))
    assert type(error) is kind
    assert str(error) == f"report.html cannot be written: {os.strerror(number)}"
