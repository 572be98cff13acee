"""Set the import path with which child processes of the tests can import the campaigns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.acceptance.repository import import_path


@pytest.fixture(scope="module", autouse=True)
def shared_import_path() -> Iterator[None]:
    """Set the import path of child processes, as `python -m tests.acceptance` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", import_path())
        yield
