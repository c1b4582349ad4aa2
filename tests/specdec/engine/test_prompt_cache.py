"""KV caches that outlive the process: the next one continues as the same one would have."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from command_line import expect_error
from gguf_models import save_tiny_gguf
from tiny_pair import save_model

import specdec
from backends.contract.source import BackendOptions
from offload.errors import SpecdecError
from offload.formats.mapped import TensorShape, read_mapped, write_mapped
from specdec.api import LLM, GenerationResult
from specdec.cli.app import main
from specdec.engine.prompt_cache import PromptCache, PromptCacheError, check_file
from specdec.models.opened import OpenedModel, open_model

PROMPT = list(range(10, 40))
OPTIONS = {"ctx_size": 128, "num_draft_tokens": 4, "draft_depth": 3}
AS_TARGET = BackendOptions(is_exact=True)
ASKED = {"max_tokens": 6, "ignore_eos": True, "logprobs": True}


class Pair(NamedTuple):
    target: Path
    draft: Path
    rest: tuple[Path, Path]  # models of the same shape with different weights


@pytest.fixture(scope="module", params=["torch", pytest.param("gguf", marks=pytest.mark.gguf)])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folders = [tmp_path_factory.mktemp("model") for _ in range(4)]
    if request.param == "torch":
        paths = [save_model(folder, seed=seed) for seed, folder in enumerate(folders)]
    else:
        pytest.importorskip("llama_cpp")
        paths = [
            save_tiny_gguf("llama", folder / "m.gguf", seed=seed)
            for seed, folder in enumerate(folders)
        ]
    return Pair(paths[0], paths[1], (paths[2], paths[3]))


@pytest.fixture(scope="module")
def llm(pair: Pair) -> Iterator[LLM]:
    """One model for all tests: they start from empty caches, or do not depend on them."""
    with specdec.load(pair.target, pair.draft, **OPTIONS) as loaded:
        yield loaded


class Opened(NamedTuple):
    target: OpenedModel
    draft: OpenedModel
    rest: tuple[OpenedModel, OpenedModel]


@pytest.fixture(scope="module")
def opened(pair: Pair) -> Opened:
    def pair_of(target: Path, draft: Path) -> tuple[OpenedModel, OpenedModel]:
        return open_model(target, AS_TARGET), open_model(draft, BackendOptions())

    return Opened(*pair_of(pair.target, pair.draft), pair_of(*pair.rest))


@pytest.fixture(scope="module")
def file(llm: LLM, opened: Opened, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The saved file of a generation that ended; not to be changed."""
    path = tmp_path_factory.mktemp("cache") / "prompt.safetensors"
    llm.generate(PROMPT, cache_prompt=False, **ASKED)
    PromptCache(path, opened.target, opened.draft).save(*cached(llm))
    return path


def cached(llm: LLM) -> tuple[Any, Any]:
    return llm.session.prefix_cache, llm.session.draft_prefix_cache


@pytest.fixture
def copy(file: Path, tmp_path: Path) -> Path:
    path = tmp_path / "copy"
    path.write_bytes(file.read_bytes())
    return path


def check_same(result: GenerationResult, other: GenerationResult) -> None:
    assert result.token_ids == other.token_ids
    assert result.logprobs == other.logprobs  # equal logits, bit for bit
    for name in ("reused_prompt_tokens", "drafted_tokens", "accepted_tokens", "passes"):
        assert getattr(result.stats, name) == getattr(other.stats, name)


@pytest.mark.slow
def test_the_next_process_goes_on(pair: Pair, llm: LLM, copy: Path) -> None:
    llm.generate(PROMPT, cache_prompt=False, **ASKED)
    expected = llm.generate([*PROMPT, 7], **ASKED)
    with specdec.load(pair.target, pair.draft, prompt_cache_file=copy, **OPTIONS) as other:
        newest = other.session.prefix_cache.newest
        assert newest.n_committed == len(PROMPT) + ASKED["max_tokens"] - 1
        check_same(other.generate([*PROMPT, 7], **ASKED), expected)
    with specdec.load(pair.target, prompt_cache_file=copy, **OPTIONS) as other:
        committed = list(other.session.prefix_cache.newest.committed_ids)
        assert committed == [*PROMPT, 7, *expected.token_ids[:-1]]


@pytest.mark.slow_except(2)
@pytest.mark.parametrize(
    "prompt", [PROMPT, PROMPT[:-5], [*PROMPT[:12], 7, 8, 9], [50, 51]], ids=lambda p: str(len(p))
)
def test_any_prompt_goes_on(llm: LLM, opened: Opened, file: Path, prompt: list[int]) -> None:
    llm.generate(PROMPT, cache_prompt=False, **ASKED)
    expected = llm.generate(prompt, **ASKED)
    llm.session.forget_prompt()
    PromptCache(file, opened.target, opened.draft).restore(*cached(llm))
    assert all(sequences.newest.n_committed > len(PROMPT) // 2 for sequences in cached(llm))
    check_same(llm.generate(prompt, **ASKED), expected)


def test_a_file_that_is_up_to_date_is_left_alone(llm: LLM, opened: Opened, copy: Path) -> None:
    llm.session.forget_prompt()
    prompt_cache, before = PromptCache(copy, opened.target, opened.draft), copy.stat().st_ino
    prompt_cache.restore(*cached(llm))
    prompt_cache.save(*cached(llm))
    assert copy.stat().st_ino == before
    llm.generate([5, 6], **ASKED)
    prompt_cache.save(*cached(llm))
    saved = copy.stat().st_ino
    assert saved != before
    prompt_cache.save(*cached(llm))
    assert copy.stat().st_ino == saved


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("kind", ["drafted ahead", "beams"])
def test_a_running_sequence_continues(pair: Pair, tmp_path: Path, kind: str) -> None:
    """Saving drops live nodes without disturbing its drafter or its beams."""
    path = tmp_path / "prompt.safetensors"
    asked: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    if kind == "beams":
        asked["num_beams"] = 3
    with specdec.load(
        pair.target, pair.target, prompt_cache_file=path, num_beams=3, draft_ahead="on", **OPTIONS
    ) as llm:
        expected = llm.generate(PROMPT, cache_prompt=False, **asked).token_ids
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(lambda: llm.generate(PROMPT, cache_prompt=False, **asked))
            while wait([running], timeout=0.001).not_done:
                llm.save_prompt_cache()
        assert running.result().token_ids == expected
    assert path.exists()


def test_an_error_in_the_block_saves_nothing(pair: Pair, copy: Path) -> None:
    before = copy.stat().st_ino
    llm = specdec.load(pair.target, prompt_cache_file=copy, **OPTIONS)
    llm.generate([5, 6], **ASKED)
    with pytest.raises(KeyboardInterrupt), llm:
        raise KeyboardInterrupt
    assert copy.stat().st_ino == before
    with pytest.raises(SpecdecError, match="closed"):
        llm.generate([5, 6])


def test_another_target_is_refused(opened: Opened, file: Path) -> None:
    with pytest.raises(PromptCacheError, match="another target model"):
        PromptCache(file, opened.rest[0], None)


def test_another_draft_starts_afresh(llm: LLM, opened: Opened, file: Path) -> None:
    llm.session.forget_prompt()
    PromptCache(file, opened.target, opened.rest[1]).restore(*cached(llm))
    assert llm.session.prefix_cache.newest.n_committed == 35
    assert llm.session.draft_prefix_cache.newest is None
    result = llm.generate(PROMPT, **ASKED)
    assert result.stats.reused_prompt_tokens == len(PROMPT) - 1


def test_a_context_that_is_too_short(
    llm: LLM, opened: Opened, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.session.forget_prompt()
    monkeypatch.setattr(llm.target, "max_context", 32)
    with pytest.raises(PromptCacheError, match=r"35 tokens do not fit .* of 32 \(raise --ctx-size"):
        PromptCache(file, opened.target, None).restore(llm.session.prefix_cache, None)


Forge = Callable[[dict[str, TensorShape], dict[str, bytes]], None]


def without_tokens(shapes: dict[str, TensorShape], data: dict[str, bytes]) -> None:
    del shapes["target.token_ids"]


def foreign_tokens(shapes: dict[str, TensorShape], data: dict[str, bytes]) -> None:
    data["target.token_ids"] = np.full(35, 10**6, "<i4").tobytes()


def negative_tokens(shapes: dict[str, TensorShape], data: dict[str, bytes]) -> None:
    data["target.token_ids"] = np.full(35, -1, "<i4").tobytes()


def fewer_tokens(shapes: dict[str, TensorShape], data: dict[str, bytes]) -> None:
    shapes["target.token_ids"] = TensorShape("target.token_ids", "I32", (30,))
    data["target.token_ids"] = data["target.token_ids"][:120]


def kv_of_bytes(shapes: dict[str, TensorShape], data: dict[str, bytes]) -> None:
    name = max(name for name in shapes if name.startswith("target.") and "token" not in name)
    shapes[name] = TensorShape(name, "U8", (len(data[name]) - 4,))
    data[name] = data[name][:-4]


def no_kv(shapes: dict[str, TensorShape], data: dict[str, bytes]) -> None:
    for name in [n for n in shapes if n.startswith("target.") and "token" not in n]:
        del shapes[name]


def one_more(shapes: dict[str, TensorShape], data: dict[str, bytes]) -> None:
    shapes["target.more"] = TensorShape("target.more", "U8", (3,))
    data["target.more"] = b"abc"


@pytest.mark.parametrize(
    "forge",
    [
        without_tokens,
        foreign_tokens,
        negative_tokens,
        fewer_tokens,
        kv_of_bytes,
        no_kv,
        one_more,
    ],
)
def test_forged_files_are_refused(
    llm: LLM, opened: Opened, file: Path, tmp_path: Path, forge: Forge
) -> None:
    """The checksum is correct, and the fingerprint is the right model's."""
    llm.session.forget_prompt()
    rewrite(file, tmp_path / "forged", forge)
    prompt_cache = PromptCache(tmp_path / "forged", opened.target, opened.draft)
    with pytest.raises(PromptCacheError, match="forged cannot be used: .*: remove it"):
        prompt_cache.restore(*cached(llm))
    assert llm.session.prefix_cache.newest is None


def test_a_file_that_is_cut_while_models_load(llm: LLM, opened: Opened, copy: Path) -> None:
    llm.session.forget_prompt()
    prompt_cache = PromptCache(copy, opened.target, opened.draft)
    os.truncate(copy, 0)
    with pytest.raises(PromptCacheError, match="was changed since it was read: remove it"):
        prompt_cache.restore(*cached(llm))
    assert llm.session.prefix_cache.newest is None


def rewrite(file: Path, forged: Path, forge: Forge) -> None:
    original = read_mapped(file)
    shapes = {r.name: TensorShape(r.name, r.dtype, r.shape) for r in original.records.values()}
    data = {name: bytes(buffer) for name, buffer in original.buffers.items()}
    forge(shapes, data)

    def fill(buffers: Mapping[str, memoryview]) -> None:
        for name, buffer in buffers.items():
            buffer[:] = data[name]

    write_mapped(forged, list(shapes.values()), dict(original.metadata), fill)


def test_heads_of_another_shape(tmp_path: Path) -> None:
    """The count of numbers equals the model's: detected at the latest against the model's shape."""
    path, forged = tmp_path / "file", tmp_path / "forged"
    target = save_model(tmp_path / "target", seed=0)

    def forge(shapes: dict[str, TensorShape], data: dict[str, bytes]) -> None:
        for name, shape in shapes.items():
            if "layers" in name:
                heads, n_tokens, dim = shape.shape
                shapes[name] = TensorShape(name, shape.dtype, (heads * 2, n_tokens, dim // 2))

    with specdec.load(target, prompt_cache_file=path, **OPTIONS) as llm:
        llm.generate(PROMPT, **ASKED)
        llm.save_prompt_cache()
        rewrite(path, forged, forge)
        llm.session.forget_prompt()
        PromptCache(forged, open_model(target, AS_TARGET), None).restore(
            llm.session.prefix_cache, None
        )
        with pytest.raises(SpecdecError, match="remove the prompt cache file"):
            llm.generate(PROMPT, **ASKED)
        llm.session.forget_prompt()


@pytest.mark.slow
@pytest.mark.gguf
def test_a_sliding_window_on_llama_cpp(tmp_path: Path) -> None:
    """llama.cpp's saved window is useless to another prompt; for a draft it is left out."""
    pytest.importorskip("llama_cpp")
    sliding = save_tiny_gguf("gemma2", tmp_path / "model.gguf")
    path = tmp_path / "file"
    with pytest.raises(PromptCacheError, match="sliding window.*without a prompt cache file"):
        specdec.load(sliding, prompt_cache_file=path, **OPTIONS)
    target = save_tiny_gguf("llama", tmp_path / "target.gguf")
    for n_reused in (0, len(PROMPT) - 1):
        with specdec.load(target, sliding, prompt_cache_file=path, **OPTIONS) as llm:
            result = llm.generate(PROMPT, **ASKED)
            assert result.stats.reused_prompt_tokens == n_reused


@pytest.mark.slow
def test_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "prompt"
    target = save_model(tmp_path / "target", seed=0)
    argv = ["run", "-m", str(target), "-c", "128", "-n", "4"]
    argv += ["--prompt-cache-file", str(path), "-p", "def f(x):"]
    reused = []
    for _ in range(2):
        assert main([*argv, "--json"]) == 0
        stats = json.loads(capsys.readouterr().out)["stats"]
        reused.append((stats["reused_prompt_tokens"], stats["prompt_tokens"]))
    assert reused[0][0] == 0
    assert reused[1][0] == reused[1][1] - 1
    path.write_text("notes of mine")
    expect_error(capsys, argv, "prompt cannot be used", "remove it, or name another one")
    assert path.read_text() == "notes of mine"
    argv[argv.index(str(path))] = str(tmp_path / "nowhere" / "prompt")
    expect_error(capsys, argv, "folder that is not there")


def test_devices_and_fifos_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/null")
    for path in ("/dev/null", tmp_path / "fifo", tmp_path / "link"):
        with pytest.raises(PromptCacheError, match=r"is not a regular file: name another file$"):
            check_file(path)


def test_saving_needs_a_file(llm: LLM) -> None:
    with pytest.raises(SpecdecError, match="no prompt_cache_file"):
        llm.save_prompt_cache()
