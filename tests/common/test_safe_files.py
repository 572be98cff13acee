"""Test that only regular files of others are read, and that nothing outside the root changes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from special_files import KINDS, Kind, contents, put

from labkit.common import files as safe_files
from labkit.common.files import UnsafeFile

READ, APPEND = os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND
TRUNCATE = os.O_RDWR | os.O_CREAT | os.O_TRUNC


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("flags", [READ, APPEND, TRUNCATE], ids=["read", "append", "truncate"])
def test_what_is_no_plain_file_is_refused(root: Path, kind: Kind, flags: int) -> None:
    (root / "file").write_bytes(b"precious")
    put(kind, root / "file")
    before = contents(root.parent)
    with pytest.raises(UnsafeFile, match=r"root/file is a .*, not a file"):
        safe_files.open_file(root / "file", flags)
    assert contents(root.parent) == before


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("depth", ["", "a", "a/.hidden/c"])
def test_a_folder_to_be_continued_holds_only_files_and_folders(
    root: Path, kind: Kind, depth: str
) -> None:
    place = root / depth / "odd"
    place.mkdir(parents=True)
    safe_files.check_folder(root)
    put(kind, place)
    with pytest.raises(UnsafeFile, match=r"/odd is a .*, not a file or folder"):
        safe_files.check_folder(root)


def test_no_link_is_followed_between_root_and_file(root: Path) -> None:
    outside = root.parent / "outside"
    (outside / "inner").mkdir(parents=True)
    (outside / "inner" / "file").write_bytes(b"precious")
    (root / "link").symlink_to(outside)
    for act in (
        lambda path: safe_files.read_file(path, root=root),
        lambda path: safe_files.open_file(path, TRUNCATE, root=root),
        lambda path: safe_files.replace_file(path, b"", root=root),
        lambda path: safe_files.check_folder(path.parent, root=root),
        lambda path: safe_files.make_folder(path.parent / "new" / "newer", root),
    ):
        with pytest.raises(UnsafeFile, match="root/link is a symbolic link"):
            act(root / "link" / "inner" / "file")
    with pytest.raises(UnsafeFile, match="leads out of its folder"):
        safe_files.read_file(root / ".." / "outside" / "inner" / "file", root=root)
    with pytest.raises(UnsafeFile, match="leads out of its folder"):
        safe_files.make_folder(root / ".." / "outside" / "new", root)
    assert (outside / "inner" / "file").read_bytes() == b"precious"
    assert [path.name for path in outside.rglob("*")] == ["inner", "file"]


def test_folders_are_made_where_they_are_missing(root: Path) -> None:
    for _ in range(2):
        safe_files.make_folder(root / "new" / "a" / "b", root / "new")
    assert (root / "new" / "a" / "b").is_dir()
    (root / "file").touch()
    with pytest.raises(UnsafeFile, match="root/file is a file, not a folder"):
        safe_files.make_folder(root / "file", root)


def test_the_root_itself_may_be_a_link(root: Path) -> None:
    named = root.parent / "named"
    named.symlink_to(root)
    (root / "inner").mkdir()
    safe_files.replace_file(named / "inner" / "file", b"content", root=named)
    assert safe_files.read_file(named / "inner" / "file", root=named) == b"content"
    safe_files.check_folder(named)
    assert (root / "inner" / "file").read_bytes() == b"content"


def test_a_file_of_two_names_is_read_and_not_written(root: Path) -> None:
    victim = root.parent / "victim"
    victim.write_bytes(b"precious")
    os.link(victim, root / "log")
    assert safe_files.read_file(root / "log") == b"precious"
    for flags in (APPEND, TRUNCATE):
        with pytest.raises(UnsafeFile, match="has 2 hard links"):
            safe_files.open_file(root / "log", flags)
    safe_files.replace_file(root / "log", b"new")
    assert victim.read_bytes() == b"precious"


def test_a_link_that_is_replaced_leaves_its_target(root: Path) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"precious")
    (root / "file").symlink_to(outside / "file")
    safe_files.replace_file(root / "file", b"new")
    assert (outside / "file").read_bytes() == b"precious"


def test_reading_has_a_limit(root: Path) -> None:
    (root / "file").write_bytes(b"12345")
    assert safe_files.read_file(root / "file", limit=5) == b"12345"
    assert safe_files.read_file(root / "file", limit=4, last=2) == b"45"
    with pytest.raises(UnsafeFile, match="has 5 bytes; labkit reads at most 4"):
        safe_files.read_file(root / "file", limit=4)


def test_folders_in_folders_without_end_are_refused(root: Path) -> None:
    (root / "/".join("d" * (safe_files.LEVELS + 1))).mkdir(parents=True)
    with pytest.raises(UnsafeFile, match="more than 64 levels"):
        safe_files.check_folder(root)


def test_what_goes_while_a_folder_is_checked_is_no_error(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "folder" / "inner").mkdir(parents=True)
    (root / "folder" / "file").touch()
    walk = os.fwalk

    def remove_then_yield(*given: Any, **more: Any) -> Iterator[Any]:
        for place, inside, files, descriptor in walk(*given, **more):
            if files:
                (root / "folder" / "file").unlink()
                (root / "folder" / "inner").rmdir()
            yield place, inside, files, descriptor

    monkeypatch.setattr(os, "fwalk", remove_then_yield)
    safe_files.check_folder(root)
    assert not (root / "folder" / "file").exists()
