"""Valid prompts, and a one-line error for everything else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tiny_pair import save_model
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece

import specdec
from offload.errors import SpecdecError
from specdec.api import LLM, PromptError
from specdec.checks import ConfigError


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = save_model(tmp_path_factory.mktemp("m"), seed=0, max_position_embeddings=128)
    with specdec.load(directory, ctx_size=64, spec_type="none") as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "is empty"),
        ("", "is empty"),
        ([[]], "is empty"),
        ([[[]]], r"\[\] for a token id"),
        ([1.7], r"1\.7 for a token id"),
        ([5, "a"], "'a' for a token id"),
        ([True], "True for a token id"),
        ([5, {"role": "user"}], "for a token id"),
        (b"ab", "of type bytes"),
        ({"role": "user", "content": "x"}, "of type dict"),
        (None, "of type NoneType"),
        (5, "of type int"),
        ("ab\ud800", r"'\\ud800' at position 2"),
        ([{"role": "user", "content": "\ud800"}], r"'\\ud800' at position 0"),
        ([-1], "token id -1 is outside the vocabulary of 259 tokens"),
        ([259], "token id 259 is outside"),
    ],
)
def test_what_is_no_prompt_is_one_line(llm: LLM, prompt: Any, problem: str) -> None:
    with pytest.raises(PromptError, match=problem) as caught:
        llm.generate(prompt)
    assert "\n" not in str(caught.value)


WORDS = {"<pad>": 0, "<s>": 1, "</s>": 2, "word": 3}
CHOOSY = {
    "no tokens of the prompt 'other'": BPE(WORDS, [], unk_token=None),
    "cannot read the text 'other': WordLevel": WordLevel(WORDS),
    "cannot read the text 'other': WordPiece": WordPiece(WORDS),
    "cannot read the text 'other': Encountered an unknown": Unigram([(w, -1.0) for w in WORDS]),
}
"""The error for text outside the vocabulary of a tokenizer without an unknown token."""


@pytest.mark.parametrize("problem", CHOOSY)
def test_a_text_that_the_tokenizer_cannot_spell(tmp_path: Any, problem: str) -> None:
    save_model(tmp_path, seed=0)
    tokenizer = Tokenizer(CHOOSY[problem])
    tokenizer.add_special_tokens(["word"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with specdec.load(tmp_path, ctx_size=64, spec_type="none") as llm:
        known = llm.generate("word", max_tokens=1, logprobs=True)
        assert len(known.token_ids) == 1
        assert all(isinstance(llm.tokenizer.token_bytes(i), bytes) for i in range(3))
        with pytest.raises(SpecdecError, match=f"{problem}.* original model"):
            llm.generate("other")


def test_integers_of_any_kind_are_token_ids(llm: LLM) -> None:
    expected = llm.generate([5, 6, 7], max_tokens=4).token_ids
    for prompt in ((5, 6, 7), np.array([5, 6, 7]), iter([5, 6, 7])):
        assert llm.generate(prompt, max_tokens=4).token_ids == expected


def test_an_unknown_token_is_reported_before_a_pass(tmp_path: Any) -> None:
    save_model(tmp_path, seed=0, vocab_size=200)
    with specdec.load(tmp_path, spec_type="none") as llm:
        last = llm.generate([199], max_tokens=1)
        assert len(last.token_ids) == 1
        for prompt in ([5, 200], "a b"):
            with pytest.raises(PromptError, match="the model has 200 tokens"):
                llm.generate(prompt)


def test_a_prompt_too_long_names_the_binding_limit(llm: LLM) -> None:
    with pytest.raises(PromptError, match=r"context of 64 \(ctx_size; the model has 128\)"):
        llm.generate("x" * 100)


def test_more_context_than_the_model_has_is_the_models_limit(tmp_path: Any) -> None:
    save_model(tmp_path, seed=0, max_position_embeddings=128)
    with (
        specdec.load(tmp_path, ctx_size=4096, spec_type="none") as llm,
        pytest.raises(PromptError, match=r"128 \(the model.s maximum\): shorten it$"),
    ):
        llm.generate("x" * 200)


@pytest.mark.parametrize("length", [1, 3])
def test_a_max_length_that_the_prompt_reaches_is_refused_as_by_transformers(
    llm: LLM, length: int
) -> None:
    with pytest.raises(ConfigError, match=f"max_length is {length}, but the prompt alone has 3"):
        llm.generate([5, 6, 7], max_length=length)
    assert len(llm.generate([5, 6, 7], max_length=4).token_ids) == 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"bad_words_ids": [[300]]}, "bad_words_ids holds token id 300.*259 tokens"),
        ({"bad_words_ids": [[5, 259]]}, "bad_words_ids holds token id 259"),
        ({"sequence_bias": [((400,), 1.0)]}, "sequence_bias holds token id 400"),
        ({"eta_cutoff": 1.0}, "eta_cutoff is 1.0, must be .* below 1.0"),
        ({"epsilon_cutoff": 1.0}, "epsilon_cutoff is 1.0, must be .* below 1.0"),
    ],
)
def test_options_that_transformers_would_refuse(
    llm: LLM, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        llm.generate([5, 6, 7], temperature=1.0, **options)


def test_the_last_id_may_be_banned(llm: LLM) -> None:
    options = {"bad_words_ids": [[258]], "sequence_bias": [((258,), 1.0)], "max_tokens": 2}
    assert len(llm.generate([5, 6, 7], **options).token_ids) == 2
