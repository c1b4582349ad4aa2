"""Lines of an input: numbers, ends, digests, sizes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.batch import lines as module
from specdec.batch.lines import BatchError, digest_key, read_lines

KEY = digest_key({"model": "m"})


def lines_of(tmp_path: Path, data: bytes) -> list[tuple[int, bytes]]:
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    return [(line.number, line.data) for line in read_lines(path, KEY)]


def test_blank_lines_count_and_are_left_out(tmp_path: Path) -> None:
    actual = lines_of(tmp_path, b"\xef\xbb\xbfa\r\n\n \t\r\nb\n\nc")
    assert actual == [(1, b"a"), (4, b"b"), (6, b"c")]


def test_an_empty_file_has_none(tmp_path: Path) -> None:
    assert lines_of(tmp_path, b"") == []


def test_a_line_that_is_too_long_is_read_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 10)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"short\n" + b"x" * 3_000_000 + b"\nshort\n" + b"y" * 10 + b"\n" + b"x" * 11)
    actual = list(read_lines(path, KEY))
    assert [(item.number, item.data) for item in actual] == [
        (1, b"short"),
        (2, b""),
        (3, b"short"),
        (4, b"y" * 10),
        (5, b""),
    ]
    assert actual[1].n_bytes > 3_000_000 - 1
    assert actual[0].digest == actual[2].digest
    assert len({item.digest for item in actual}) == 4


@given(st.lists(st.binary(max_size=30).filter(lambda item: b"\n" not in item), max_size=20))
def test_any_bytes_are_lines(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("lines") / "in.jsonl"
    path.write_bytes(b"\n".join(contents))
    stripped = [content.rstrip(b" \t\r\n") for content in contents]
    if stripped and stripped[0].startswith(b"\xef\xbb\xbf"):
        stripped[0] = stripped[0][3:]
    actual = [(line.number, line.data) for line in read_lines(path, KEY)]
    assert actual == [(index + 1, item) for index, item in enumerate(stripped) if item]


def test_a_digest_is_of_the_line_and_of_the_options(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a\na \nb\n")
    first, second, third = (line.digest for line in read_lines(path, KEY))
    assert first == second != third
    other = next(read_lines(path, digest_key({"model": "n"})))
    assert other.digest != first


def test_what_can_be_read_only_once_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(BatchError, match="no regular file"):
            next(read_lines(path, KEY))
