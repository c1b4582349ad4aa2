"""Text that makes llama.cpp's tokenizers abort: tokenized, or refused in one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_vocabularies import TOKENIZER, TinyModel
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("llama_cpp")

from serving import COMPLETIONS, Server

from backends.gguf.model import load_gguf_model
from backends.llama.trial import TextLimits, try_model
from backends.llama.trial_worker import MAX_CHARACTERS
from specdec.text import llama_tokenize
from specdec.text.gguf_tokenizer import GgufTokenizer
from specdec.text.llama_tokenize import check_lines
from specdec.text.tokenizer import TokenizerError

pytestmark = pytest.mark.gguf
RECURSIVE = "deepseek-v3"
"""A pre-tokenizer of std::regex: 28,000 letters in a line use up a stack of 8 MiB."""
LINES = TextLimits(MAX_CHARACTERS)
PROMPTS = st.text(st.sampled_from("ab1! \n\t\u00e9\u4e2d\U0001f600\0")) | st.text()


def model(folder: Path, pre: str = RECURSIVE) -> Path:
    return TinyModel("bpe", {f"{TOKENIZER}pre": ("str", pre)}).write(folder / f"{pre}.gguf")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("recursive"))


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Iterator[GgufTokenizer]:
    with GgufTokenizer(path, LINES) as tokenizer:
        yield tokenizer


def test_which_pre_tokenizers_bear_a_long_line(path: Path, tmp_path: Path) -> None:
    assert try_model(load_gguf_model(path)).text_limits == LINES
    assert try_model(load_gguf_model(model(tmp_path, "llama-bpe"))).text_limits == TextLimits(None)


def test_without_a_large_stack_a_line_ends_the_process(path: Path) -> None:
    """Otherwise this protection is unnecessary."""
    code = (
        "from specdec.text.gguf_tokenizer import GgufTokenizer as T\n"
        f"T({str(path)!r}).encode('a' * {MAX_CHARACTERS})\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (-11, "")


@pytest.mark.parametrize("letter", ["a", "!", " ", "\u4e2d"])
def test_the_longest_line_is_tokenized(tokenizer: GgufTokenizer, letter: str) -> None:
    ids = tokenizer.encode(letter * MAX_CHARACTERS)
    assert tokenizer.decode(ids) == letter * MAX_CHARACTERS
    with pytest.raises(TokenizerError, match=f"a line of {MAX_CHARACTERS + 1} characters"):
        tokenizer.encode(letter * (MAX_CHARACTERS + 1))


def test_many_lines_are_no_long_one(tokenizer: GgufTokenizer) -> None:
    text = "word and\n" * (MAX_CHARACTERS // 4)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(PROMPTS)
def test_a_line_ends_where_a_word_begins_behind_its_break(text: str) -> None:
    lines = [""]
    for before, letter in zip(" " + text, text, strict=False):
        if before == "\n" and not letter.isspace():
            lines.append("")
        lines[-1] += letter
    longest = max(map(len, lines))
    check_lines(text, TextLimits(longest))
    if len(lines) > 1 or longest:
        with pytest.raises(TokenizerError, match=r"a line of \d+ characters"):
            check_lines(text, TextLimits(longest - 2))


@given(PROMPTS)
def test_a_large_stack_and_another_length_change_no_token(
    tokenizer: GgufTokenizer, text: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        expected = tokenizer.encode(text)
        patch.setattr(llama_tokenize, "_SHORT_BYTES", 0)
        assert tokenizer.encode(text) == expected


@given(st.text(min_size=1))
def test_what_a_grammar_forces_is_cut_between_characters(text: str) -> None:
    data = text.encode(errors="replace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_tokenize, "MAX_CHARACTERS", 5)
        pieces = list(llama_tokenize._pieces(data))
    assert b"".join(pieces) == data
    assert "".join(piece.decode() for piece in pieces) == data.decode()
    assert all(len(piece) <= 5 for piece in pieces)


def test_a_long_text_that_a_grammar_forces(path: Path) -> None:
    """llguidance tokenizes it, in a thread of its own choice."""
    pytest.importorskip("llguidance")
    code = f"""
from llguidance import LLMatcher
from backends.llama.trial import TextLimits
from specdec.text.gguf_tokenizer import GgufTokenizer
with GgufTokenizer({str(path)!r}, TextLimits({MAX_CHARACTERS})) as tokenizer:
    words = tokenizer.grammar_tokenizer(tokenizer.eos_token_ids)
    grammar = LLMatcher.grammar_from_lark('start: "' + "b" * 40_000 + '"')
    forced = LLMatcher(words, grammar, log_level=0).compute_ff_tokens()
    assert tokenizer.decode(forced) == "b" * 40_000, len(forced)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


def test_what_is_too_long_for_any_context_is_refused(
    tokenizer: GgufTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_tokenize, "MAX_TEXT_BYTES", 8)
    assert tokenizer.encode("8 bytes.")
    with pytest.raises(TokenizerError, match="has 9 B, and 8 B are accepted"):
        tokenizer.encode("9 bytes..")


def test_a_server_outlives_sequences(path: Path) -> None:
    options = ("--spec-type", "none", "-c", "512", "--max-queue", "3")
    limit = {"max_tokens": 2, "temperature": 0}
    with Server(path, *options, "--max-body", "4MiB") as server:
        server.ready()
        long = "a" * (MAX_CHARACTERS + 1)
        for prompt, reason in (
            (long, f"a line of {MAX_CHARACTERS + 1} characters"),
            (long[1:], "leaves no room in the context"),
            (" " * 100_000, "leaves no room in the context"),
            ("<|endoftext|>" * 2000, "leaves no room in the context"),
            ("\ud800", "no character"),
        ):
            status, answer = server.post(COMPLETIONS, {"prompt": prompt, **limit})
            assert (status, reason in answer["error"]["message"]) == (400, True), answer
        for prompt in ("\0\x01\x7f", "\U0010ffff\ufffe", "e\u0301" * 50, "<|endoftext|>x"):
            status, answer = server.post(COMPLETIONS, {"prompt": prompt, **limit})
            assert status == 200, answer
        assert server.end() == 0
        assert server.process.stdout is not None
        assert server.process.stdout.read() == ""
