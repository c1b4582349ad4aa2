"""Prompts that are cut off, and engines that share a folder with prefixes."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from agent_session import (
    always_pay,
    cost_by_tokens,
    cut_off,
    files_of,
    load,
    prompt,
    wait_for_files,
)
from tiny_pair import save_model

import specdec
from specdec.cli.app import main
from specdec.engine.prompt_cache import PromptCacheError
from specdec.metrics.recorder import StatsRecorder

OPTIONS = {"ctx_size": 512, "num_draft_tokens": 4}
LONG = prompt(300, 7)
ASKED: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "logprobs": True}
CHUNK = 60


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), seed=0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    always_pay(monkeypatch)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def expected(target: Path) -> Any:
    with specdec.load(target, spec_type="none", **OPTIONS) as llm:
        return llm.generate(LONG, cache_prompt=False, **ASKED)


@pytest.mark.parametrize("how", ["is cancelled", "fails"])
def test_a_prompt_that_is_cut_off_keeps_its_passes(
    target: Path, folder: Path, expected: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(target, folder, **OPTIONS) as llm:
        cut_off(llm, monkeypatch, LONG, CHUNK, 3, how)
        result = llm.generate(LONG, **ASKED)
        assert result.stats.reused_prompt_tokens >= 3 * CHUNK
        assert result.logprobs == expected.logprobs
    with load(target, folder / "other", **OPTIONS) as llm:
        cut_off(llm, monkeypatch, LONG, CHUNK, 0, how)  # nothing is left, and nothing breaks
        cut_off(llm, monkeypatch, LONG, CHUNK, 3, how)
    with load(target, folder / "other", **OPTIONS) as llm:
        result = llm.generate(LONG, **ASKED)
        assert llm.stats.loaded_prefix_tokens >= 3 * CHUNK
        assert result.logprobs == expected.logprobs


def test_any_prompt_goes_on_from_a_file(target: Path, folder: Path) -> None:
    """The whole of it, a part of it, and another end; its answer is part of it."""
    with load(target, folder, **OPTIONS) as llm:
        answer = llm.generate(LONG, **ASKED).token_ids
    cases = {
        299: LONG,
        200: [*LONG[:200], 9, 8],
        305: [*LONG, *answer[:-1], 3, 4],
        0: [1, 2, *LONG],
    }
    for num_reused, ids in cases.items():
        with load(target, folder, **OPTIONS) as llm:
            result = llm.generate(ids, **ASKED)
            assert result.stats.reused_prompt_tokens == num_reused
            plain = llm.generate(ids, speculative=False, cache_prompt=False, **ASKED)
            assert result.logprobs == plain.logprobs
            assert result.token_ids == plain.token_ids


def test_reading_has_to_be_quicker_than_computing(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        always_pay(patch)
        with load(target, tmp_path, **OPTIONS) as llm:
            llm.generate(LONG, **ASKED)
    assert len(files_of(tmp_path)) == 1
    for seconds, is_loaded in ((1e-9, False), (1.0, True)):
        with load(target, tmp_path, **OPTIONS) as llm:
            llm.session.models.prefix_cache.seconds = lambda n, each=seconds: n * each
            llm.generate(LONG, **ASKED)
            assert (llm.stats.loaded_prefixes == 1) == is_loaded


def test_memory_is_preferred_where_it_has_as_much(target: Path, folder: Path) -> None:
    with load(target, folder, **OPTIONS) as llm:
        for _ in range(2):
            llm.generate(LONG, **ASKED)
            wait_for_files(llm)
        assert llm.stats.loaded_prefixes == 0
        assert llm.stats.saved_prefixes == 1
        llm.generate(LONG, cache_prompt=False, **ASKED)
        llm.session.forget_prompt()
        assert llm.generate(LONG, cache_prompt=False, **ASKED).stats.reused_prompt_tokens == 0
        assert llm.stats.loaded_prefixes == 0


def test_a_draft_has_its_own_files(target: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    draft = save_model(tmp_path / "draft", seed=1, num_hidden_layers=1)
    for num_saved in (2, 0):
        with load(target, folder, draft_model=draft, **OPTIONS) as llm:
            before = len(files_of(folder)) if folder.exists() else 0
            result = llm.generate(LONG, **ASKED)
            wait_for_files(llm)
            assert len(files_of(folder)) - before == num_saved
    assert result.stats.reused_prompt_tokens == len(LONG) - 1
    with load(target, folder, **OPTIONS) as llm:  # without it, or with another one
        assert llm.generate(LONG, **ASKED).stats.reused_prompt_tokens == len(LONG) - 1


WRITER = """
import sys
sys.path.insert(0, {helpers!r})
from agent_session import AgentSession, load, prompt
import backends.contract.prefix_files as files
files.PrefixFiles.read_seconds = lambda self, n_bytes: 0.0
with load({target!r}, {folder!r}, ctx_size=512, num_draft_tokens=4) as llm:
    for number in range(8):
        ids = prompt(100 + 10 * number, 7)[: 60 + 20 * (number % 4)] + [number, {number}]
        result = llm.generate(ids, max_tokens=4, ignore_eos=True)
        plain = llm.generate(
            ids, max_tokens=4, ignore_eos=True, cache_prompt=False, speculative=False
        )
        assert result.token_ids == plain.token_ids
        llm.session.forget_prompt()
    print(llm.stats.loaded_prefixes)
"""


def test_two_processes_with_one_folder(target: Path, folder: Path) -> None:
    """Each writes, reads and replaces the other's files, which are limited in size meanwhile."""
    helpers = str(Path(__file__).parents[2] / "helpers")
    scripts = [
        WRITER.format(helpers=helpers, target=str(target), folder=str(folder), number=number)
        for number in (3, 4)
    ]

    def run(script: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, scripts))
    for result in results:
        assert result.returncode == 0, result.stderr
        assert int(result.stdout) > 0
        assert "ignored" not in result.stderr
    assert all(not path.name.startswith(".") for path in folder.iterdir())


def test_the_folder_keeps_to_its_size(target: Path, folder: Path) -> None:
    with load(target, folder, prompt_cache_size="200KB", **OPTIONS) as llm:
        for step in range(3, 9):
            llm.generate(prompt(200, step), **ASKED)
            wait_for_files(llm)
            sizes = [path.stat().st_size for path in folder.iterdir()]
            assert sum(sizes) <= 200_000
        assert llm.stats.saved_prefixes == 6
        assert 0 < len(sizes) < 6


def test_a_folder_that_is_a_file(target: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PromptCacheError, match="file is not a folder: name another one"):
        specdec.load(target, prompt_cache_dir=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_goes_away(
    target: Path, folder: Path, expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with load(target, folder, **OPTIONS) as llm:
        folder.rmdir()
        for _ in range(2):
            assert llm.generate(LONG, **ASKED).logprobs == expected.logprobs
            wait_for_files(llm)
            llm.session.forget_prompt()
    notes = [record.message for record in caplog.records]
    assert len(notes) == len(set(notes)) == 2  # one of reading, one of writing


@pytest.mark.gguf
def test_a_sliding_window_on_llama_cpp_is_computed(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("llama_cpp")
    from gguf_models import save_tiny_gguf

    model = save_tiny_gguf("gemma2", tmp_path / "m.gguf")
    with load(model, folder, **OPTIONS) as llm:
        llm.generate(LONG, **ASKED)
        wait_for_files(llm)
        assert llm.stats.saved_prefixes == 0
    assert "is not used for the target: llama.cpp saves only the last window" in caplog.text


def test_on_the_command_line(
    target: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["run", "-m", str(target), "-c", "128", "-n", "4", "--json"]
    argv += ["--prompt-cache-dir", str(folder), "-p", "def f(x):"]
    reused = []
    for _ in range(2):
        assert main(argv) == 0
        stats = json.loads(capsys.readouterr().out)["stats"]
        reused.append((stats["reused_prompt_tokens"], stats["prompt_tokens"]))
    assert reused[0][0] == 0
    assert reused[1][0] == reused[1][1] - 1
    assert folder.stat().st_mode & 0o077 == 0


def test_short_requests_wait_rather_than_evict(target: Path) -> None:
    """The long prefix leaves capacity for two of them."""
    with specdec.load(target, parallel=8, kv_tokens=512, **OPTIONS) as llm:
        cost_by_tokens(llm)
        llm.generate(LONG, **ASKED)
        results = llm.generate([prompt(20, step) for step in range(3, 19)], max_tokens=4)
        again = llm.generate(LONG, **ASKED)
        assert again.stats.reused_prompt_tokens == len(LONG) - 1
        assert len(results) == 16


def test_a_request_that_has_waited_for_as_long_evicts(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No longer than the prefix would take to compute: the others may go on for hours."""
    with specdec.load(target, parallel=8, kv_tokens=512, **OPTIONS) as llm:
        cost_by_tokens(llm)
        llm.generate(LONG, **ASKED)
        monkeypatch.setattr(StatsRecorder, "waited_seconds", 1e3)
        llm.generate([prompt(20, step) for step in range(3, 19)], max_tokens=4)
        assert llm.generate(LONG, **ASKED).stats.reused_prompt_tokens < 10
