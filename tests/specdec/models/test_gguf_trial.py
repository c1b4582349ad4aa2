"""GGUF models that make llama.cpp abort, under all commands: one line, exit code 2.

Every command runs in a process of its own, which may end in any way.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from forked_commands import Ended, ForkedCommands
from gguf_broken import BROKEN, EACH_PLACE, ENDLESS, HARMLESS
from gguf_vocabularies import KINDS, TinyModel

pytest.importorskip("llama_cpp")

from backends.gguf.model import load_gguf_model
from backends.llama import trial
from offload.formats.gguf_header import GgufError
from offload.process.disk_cache import cache_folder

pytestmark = pytest.mark.gguf
PROMPT = "h\u00e9llo ~ the\n \u4e2d \x01 "
SMALL = ["-n", "2", "--ctx-size", "64", "--spec-type", "none"]
REST = sorted(set(BROKEN) - HARMLESS - set(EACH_PLACE))


@pytest.fixture(scope="module")
def commands() -> Iterator[ForkedCommands]:
    commands = ForkedCommands()
    yield commands
    commands.close()


def all_commands(path: Path, folder: Path) -> list[list[str]]:
    source = folder / "in.jsonl"
    source.write_text(json.dumps({"prompt": PROMPT}))
    return [
        ["run", "-m", str(path), "-p", PROMPT, *SMALL],
        ["check", "-m", str(path), "-md", str(path)],
        ["batch", "-m", str(path), str(source), "-o", str(folder / "out.jsonl"), *SMALL],
        ["serve", "-m", str(path), "--port", "0"],
    ]


def assert_one_line(ended: Ended) -> None:
    assert (ended.code, ended.out) == (2, ""), ended
    lines = [x for x in ended.err.splitlines() if not x.startswith("specdec: loading ")]
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("specdec: error: "), ended.err


def some_slow(fast: Sequence[str], slow: Sequence[str]) -> list[object]:
    return [*fast, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


@pytest.mark.slow_except(2)
@pytest.mark.parametrize("name", some_slow(EACH_PLACE, REST))
def test_a_single_defect(name: str, tmp_path: Path, commands: ForkedCommands) -> None:
    """One defect per abort in llama.cpp runs under all commands, the others under one."""
    path = BROKEN[name].write(tmp_path / "broken.gguf")
    tried = all_commands(path, tmp_path)
    for argv in tried if name in EACH_PLACE else tried[:1]:
        assert_one_line(commands.run(argv))


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("name", some_slow(KINDS, sorted(HARMLESS)))
def test_what_llama_cpp_bears(name: str, tmp_path: Path, commands: ForkedCommands) -> None:
    path = (BROKEN.get(name) or TinyModel(name)).write(tmp_path / "well.gguf")
    ended = commands.run(["run", "-m", str(path), "-p", PROMPT, *SMALL, "-q"])
    assert ended.code == 0, ended
    assert ended.err == ""


@pytest.mark.slow
def test_a_vocabulary_over_which_it_goes_on_for_ever(
    tmp_path: Path, commands: ForkedCommands
) -> None:
    path = ENDLESS.write(tmp_path / "endless.gguf")
    assert_one_line(commands.run(["run", "-m", str(path), "-p", PROMPT]))


def test_what_is_said_names_the_place_in_llama_cpp(tmp_path: Path) -> None:
    path = BROKEN["bpe that adds a start it has not"].write(tmp_path / "m.gguf")
    with pytest.raises(GgufError) as caught:
        trial.try_model(load_gguf_model(path))
    said = str(caught.value)
    assert "ends the process as its special tokens are added (llama-vocab.cpp:" in said
    assert "GGML_ASSERT" in said


def test_a_model_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    well = load_gguf_model(TinyModel("bpe").write(tmp_path / "a.gguf"))
    copy = load_gguf_model(TinyModel("bpe").write(tmp_path / "b.gguf"))
    bad = load_gguf_model(BROKEN["bpe without merges"].write(tmp_path / "bad.gguf"))
    actual = trial.try_model(well)
    with pytest.raises(trial.LlamaError, match=r"bad\.gguf.*cannot find tokenizer merges"):
        trial.try_model(bad)

    def nobody(*args: object, **options: object) -> None:
        raise AssertionError("it was asked again")

    monkeypatch.setattr(subprocess, "Popen", nobody)
    assert trial.try_model(well) == trial.try_model(copy) == actual
    with pytest.raises(trial.LlamaError, match=r"bad\.gguf.*cannot find tokenizer merges"):
        trial.try_model(bad)
    moved = load_gguf_model(BROKEN["bpe without merges"].write(tmp_path / "moved.gguf"))
    with pytest.raises(AssertionError, match="asked again"):  # the output names another file
        trial.try_model(moved)
    for rubbish in ("", "[]", '{"refusal": 1}', '{"refusal": ""}', '{"refusal": "x", "path": 1}'):
        for cached in cache_folder().glob("gguf-*.json"):
            cached.write_text(rubbish)
        with pytest.raises(AssertionError, match="asked again"):
            trial.try_model(well)


@pytest.mark.parametrize(
    ("code", "match"),
    [
        ("import os; os.kill(os.getpid(), 9)", "more than 20 s of a core, or more memory"),
        ("import os; os.kill(os.getpid(), 11)", "ends the process as it starts .it reads where"),
        ("raise MemoryError('nothing left')", "could not be tried: .*nothing left"),
    ],
)
def test_a_lost_process_is_reported(
    code: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trial, "command_of", lambda module: [sys.executable, "-c", code])
    path = TinyModel("bpe").write(tmp_path / "m.gguf")
    with pytest.raises((GgufError, trial.LlamaError), match=match):
        trial.try_model(load_gguf_model(path))


def test_what_ends_the_process_leaves_stdout_alone(tmp_path: Path) -> None:
    """ggml would start a debugger, which writes there."""
    path = BROKEN["spm without bytes"].write(tmp_path / "m.gguf")
    code = (
        "from specdec.text.gguf_tokenizer import GgufTokenizer as T\n"
        f"T({str(path)!r}).encode('\u4e2d')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == -6
    assert ended.stdout == ""
