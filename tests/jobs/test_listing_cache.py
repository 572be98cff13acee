"""Test that a long list is read once; later listings trust only unchanged file times."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.common.files import cache_folder
from labkit.jobs import listing
from tests.acceptance import records


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(listing, "LEAST", 3)
    records.make(tmp_path / "runs", 5)
    return tmp_path / "runs"


def test_what_has_not_changed_is_not_read_again(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = listing.jobs_and_runs(many)
    with monkeypatch.context() as patch:
        patch.setattr(listing, "read_run", lambda folder: pytest.fail(f"{folder.path} is read"))
        assert listing.jobs_and_runs(many) == first
    text = (many / "00002/metrics.json").read_text()
    (many / "00002/metrics.json").write_text(text.replace('"test_accuracy"', '"other"'))
    (many / "00003/status.json").unlink()
    rows, skipped = listing.jobs_and_runs(many)
    changed = [new[0] for old, new in zip(first[0], rows, strict=False) if old != new]
    assert changed[0] == "00002"
    assert len(rows) == 4
    assert "00003 left out" in skipped[0]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"made_by": 1}', '{"rows": {"a": 1}}'])
def test_a_damaged_list_is_made_anew(many: Path, content: str) -> None:
    first = listing.jobs_and_runs(many)
    (file,) = cache_folder("listings").iterdir()
    whole = file.read_text()
    file.write_text(content)
    assert listing.jobs_and_runs(many) == first
    assert file.read_text() == whole


def test_a_run_that_goes_on_is_read_each_time(many: Path) -> None:
    file = many / "00001/status.json"
    file.write_text(file.read_text().replace("completed", "running"))
    rows = {row[0]: row for row in listing.jobs_and_runs(many)[0]}
    assert rows["00001"][1] == "running"
    assert "00001" not in next(cache_folder("listings").iterdir()).read_text()


def test_where_nothing_can_be_kept_all_is_read(
    many: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = listing.jobs_and_runs(many)
    (tmp_path / "file").touch()
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "file"))
    assert listing.jobs_and_runs(many) == first
