"""Dropping pages that others read, or that a read of a few bytes brought along."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mapped_weights import needs_whole_pages
from page_cache import forget, n_cached

from offload.formats.part import read_part
from offload.storage.page_cache import drop_files, dropping_behind
from offload.units import MIB

CONTENT = os.urandom(4 * MIB + 123)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "weights"
    path.write_bytes(CONTENT)
    forget(path)
    return path


def test_what_is_read_in_the_block_is_dropped_before_its_end(file: Path) -> None:
    with dropping_behind([file]):
        file.read_bytes()
        while n_cached(file):
            pass
    assert "specdec-drop" not in {thread.name for thread in threading.enumerate()}


def test_it_is_dropped_where_the_reader_fails(file: Path) -> None:
    def read() -> None:
        file.read_bytes()
        raise ValueError("of the reader")

    with pytest.raises(ValueError, match="of the reader"), dropping_behind([file]):
        read()
    assert n_cached(file) == 0


def test_files_that_are_not_there_are_the_readers_to_miss(file: Path, tmp_path: Path) -> None:
    file.read_bytes()
    assert n_cached(file) > 0
    drop_files([tmp_path / "nothing", file])
    assert n_cached(file) == 0


@needs_whole_pages
@given(st.integers(0, 4 * MIB + 200), st.integers(0, 9000))
def test_a_part_is_that_of_the_file_and_leaves_nothing(
    file: Path, offset: int, n_bytes: int
) -> None:
    actual = read_part(file, offset, n_bytes)
    assert n_cached(file) == 0
    assert actual == CONTENT[offset : offset + n_bytes]
