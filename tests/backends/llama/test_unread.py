"""A model that is paged after loading is mapped without being read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from gguf_streaming import exercise, in_memory, same, streamed
from page_cache import forget, n_cached

from backends.ggml.library import LOG, LlamaError, LlamaModel
from backends.gguf.model import GgufModel, load_gguf_model
from backends.llama import unread
from backends.llama.unread import map_unread
from offload.paging.address_space import find_mapping

pytestmark = pytest.mark.gguf

Models = Callable[..., GgufModel]


@pytest.mark.parametrize("n_splits", [1, 3])
def test_nothing_is_read_and_the_files_are_mapped(models: Models, n_splits: int) -> None:
    model = models("llama", n_layers=5, n_splits=n_splits)
    for path in model.index.paths:
        forget(path)
    loaded = map_unread(model)
    try:
        assert [n_cached(path) for path in model.index.paths] == [0] * n_splits
        for path in model.index.paths:
            (mapped,) = find_mapping(path)
            assert mapped.n_bytes > path.stat().st_size / 2
        assert "specdec-header" not in Path("/proc/self/maps").read_text()
    finally:
        loaded.close()
    whole = LlamaModel(model.path, "mmap")
    try:
        assert n_cached(model.path) > 0  # as llama.cpp does
    finally:
        whole.close()


def test_where_llama_cpp_logs_other_words_the_files_are_read(
    models: Models, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unread, "_OPENED", "words of another version")
    model = models("llama")
    with in_memory(model) as expected:
        requested = exercise(expected)
    forget(model.path)
    with streamed(model) as actual:
        assert n_cached(model.path) == 0, "it was dropped when its layers were out of memory"
        assert same(exercise(actual), requested)
    assert f"llama.cpp reads all of {model.path} once as it maps it: this llama.cpp" in caplog.text


def test_a_model_that_llama_cpp_refuses_is_named_as_the_user_did(
    models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "unknown.gguf"
    path.write_bytes(models("llama").path.read_bytes().replace(b"llama", b"glama"))
    with pytest.raises(LlamaError, match=f"cannot load {path}"):
        map_unread(load_gguf_model(path))
    assert not caplog.records


def test_another_threads_log_is_not_heard() -> None:
    heard: list[str] = []
    with LOG.heard_by(heard.append):
        thread = threading.Thread(target=LOG.write, args=(2, b"of another model\n"))
        thread.start()
        thread.join()
        LOG.write(2, b"of this one\n")
    LOG.write(2, b"later\n")
    assert heard == ["of this one"]


def test_no_descriptor_is_left_open(models: Models) -> None:
    model = models("llama", n_splits=3)
    before = os.listdir("/proc/self/fd")
    map_unread(model).close()
    assert os.listdir("/proc/self/fd") == before
