"""Compatible and incompatible vocabularies."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from specdec.text.vocabulary import Vocabulary, VocabularyMismatch, compare_vocabularies

SPECIAL = {"bos": 0, "eos": 1, "pad": None}


def vocabulary(*tokens: str | None, num_tokens: int = 0, added: Collection[int] = ()) -> Vocabulary:
    return Vocabulary(tokens, num_tokens or len(tokens), SPECIAL, frozenset(added))


BASE = vocabulary("<s>", "</s>", "a", "b", "c", added=(0, 1))


def test_equal_vocabularies_go_together_without_notes() -> None:
    result = compare_vocabularies(BASE, BASE)
    assert result.problem is None
    assert result.notes == ()
    assert result.n_equal == 5
    result.require_compatible()
    assert result.lines()[-1].startswith("ok")


def test_the_first_differing_token_is_named() -> None:
    draft = vocabulary("<s>", "</s>", "a", "X", "Y", added=(0, 1))
    result = compare_vocabularies(BASE, draft)
    with pytest.raises(VocabularyMismatch) as caught:
        result.require_compatible()
    message = str(caught.value)
    assert "token 3 is 'b' in the target and 'X' in the draft (2 ids differ)" in message
    assert "\n" not in message
    assert result.to_dict()["compatible"] is False
    assert result.n_equal == 3


def test_padding_rows_are_a_note() -> None:
    result = compare_vocabularies(replace(BASE, num_tokens=8), replace(BASE, num_tokens=16))
    assert result.problem is None
    assert "embedding rows: 8 in the target, 16 in the draft" in result.notes


def test_a_draft_whose_embedding_is_too_short_is_refused() -> None:
    result = compare_vocabularies(BASE, replace(BASE, tokens=BASE.tokens[:4], num_tokens=4))
    assert result.problem is not None
    assert "ids up to 4" in result.problem
    assert "ends at 3" in result.problem


def test_tokens_that_the_target_has_no_row_for_are_never_emitted() -> None:
    """A tokenizer may have added tokens without rows in any model."""
    longer = replace(BASE, num_tokens=len(BASE.tokens) - 1)
    assert compare_vocabularies(longer, longer).problem is None
    assert compare_vocabularies(longer, replace(longer, num_tokens=3)).problem is not None


@pytest.mark.parametrize(("extra_in", "word"), [("draft", "never proposed"), ("target", "no text")])
def test_tokens_in_one_model_only_are_a_note(extra_in: str, word: str) -> None:
    longer = vocabulary(*BASE.tokens, "<tool>", num_tokens=8, added=(0, 1, 5))
    shorter = replace(BASE, num_tokens=8)
    pair = (shorter, longer) if extra_in == "draft" else (longer, shorter)
    result = compare_vocabularies(*pair)
    assert result.problem is None
    assert any(word in note for note in result.notes)


def test_a_renamed_added_token_is_a_note_but_an_ordinary_one_is_not() -> None:
    renamed = vocabulary("<s>", "<eot>", "a", "b", "c", added=(0, 1))
    result = compare_vocabularies(BASE, renamed)
    assert result.problem is None
    assert any("'</s>'" in note and "'<eot>'" in note for note in result.notes)
    assert compare_vocabularies(BASE, replace(renamed, added=frozenset({0}))).problem is not None


def test_an_unused_id_differs_from_a_used_one() -> None:
    result = compare_vocabularies(BASE, vocabulary("<s>", "</s>", "a", None, "c", added=(0, 1)))
    assert result.problem is not None
    assert "unused in the draft" in result.problem


def test_different_special_tokens_are_a_note() -> None:
    result = compare_vocabularies(BASE, replace(BASE, special={"bos": 0, "eos": 4, "pad": None}))
    assert result.problem is None
    assert "eos token: id 1 in the target, 4 in the draft" in result.notes


def test_from_tokenizer_leaves_holes_open() -> None:
    class Tokenizer:
        bos_token_id, eos_token_id, pad_token_id = None, 3, None
        added_tokens_decoder = {3: "</s>"}

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 1, "</s>": 3}

    vocab = Vocabulary.from_tokenizer(Tokenizer(), num_tokens=64)
    assert vocab.tokens == ("a", "b", None, "</s>")
    assert vocab.special == {"bos": None, "eos": 3, "pad": None}
    assert 3 in vocab.added
    assert vocab.num_tokens == 64
