"""Acceptance statistics of a pair are available when the pair is loaded again."""

from __future__ import annotations

from pathlib import Path

import pytest
from paused_generation import PROMPT

import specdec
from offload.process import disk_cache
from specdec.planning import saved_statistics


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(saved_statistics, "load_cached", disk_cache.load_cached)
    monkeypatch.setattr(saved_statistics, "cache_folder", lambda: tmp_path)
    return tmp_path


def test_it_is_written_once_when_the_model_is_closed(small_target: Path, folder: Path) -> None:
    with specdec.load(small_target, ctx_size=128) as llm:
        token_ids = llm.generate(PROMPT, max_tokens=24).token_ids
        known = llm.session.models.pair_statistics.state_dict()
        assert not list(folder.iterdir())
    (file,) = folder.iterdir()
    file_of_the_first = file.read_bytes()
    with specdec.load(small_target, ctx_size=128) as llm:
        actual = llm.session.models.pair_statistics.state_dict()
        assert actual["acceptance"].keys() == known["acceptance"].keys()
        assert llm.generate(PROMPT, max_tokens=24).token_ids == token_ids
    assert file.read_bytes() != file_of_the_first
    file.unlink()
    llm.close()
    assert not list(folder.iterdir())


def test_a_resident_model_has_one_file_whatever_the_budget(
    small_target: Path, folder: Path
) -> None:
    for memory_budget in ("600MiB", "2GiB"):
        with specdec.load(small_target, ctx_size=128, memory_budget=memory_budget) as llm:
            llm.generate(PROMPT, max_tokens=8)
    assert len(list(folder.iterdir())) == 1


def test_a_load_that_taught_nothing_writes_nothing(small_target: Path, folder: Path) -> None:
    specdec.load(small_target, ctx_size=128).close()
    assert not list(folder.iterdir())


def test_another_model_is_another_pair(small_target: Path, tmp_path_factory, folder: Path) -> None:
    from tiny_pair import save_model

    for target in (small_target, save_model(tmp_path_factory.mktemp("other"), seed=1)):
        with specdec.load(target, ctx_size=128) as llm:
            llm.generate(PROMPT, max_tokens=8)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b'{"version": 1}', b"\xff" * 99])
def test_a_broken_file_is_ignored(small_target: Path, folder: Path, content: bytes) -> None:
    with specdec.load(small_target, ctx_size=128) as llm:
        token_ids = llm.generate(PROMPT, max_tokens=24).token_ids
    (file,) = folder.iterdir()
    file.write_bytes(content)
    with specdec.load(small_target, ctx_size=128) as llm:
        assert llm.generate(PROMPT, max_tokens=24).token_ids == token_ids
    assert file.read_bytes() != content


def test_a_folder_that_cannot_be_written_to_is_said(
    small_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(saved_statistics, "cache_folder", lambda: tmp_path / "file")
    with specdec.load(small_target, ctx_size=128) as llm:
        llm.generate(PROMPT, max_tokens=8)
    expected = f"how often drafts of these models are accepted is not cached: {tmp_path / 'file'}: "
    assert [line for line in caplog.messages if line.startswith(expected)]
