"""Result files: read, told apart, written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.process.results import ResultsError, read_results, write_json


@pytest.mark.parametrize("text", ["", "{}", "[1]", "notes", '{"peers": 3}', '{"setting": {}}\n3\n'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match="holds no results") as caught:
        read_results(path)
    assert "\n" not in str(caught.value)


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    device = tmp_path / "null"
    device.symlink_to("/dev/null")
    write_json({"a": 1}, device)
    assert device.resolve() == Path("/dev/null")
    assert device.is_char_device()
    with pytest.raises(ResultsError, match="cannot write /dev/full: No space left"):
        write_json({"a": 1}, Path("/dev/full"))
    assert Path("/dev/full").is_char_device()


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_json({"a": 1}, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "file").read_text()) == {"a": 1}


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    path.write_text("before")

    def fill(self: Path, data: bytes) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    with pytest.raises(ResultsError, match="name a file on a disk with free space"):
        write_json({"a": 1}, path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
