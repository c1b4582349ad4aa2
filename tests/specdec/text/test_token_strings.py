"""Bytes of tokens: joined they are the text, for every kind of tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.text.logprobs import chat_logprobs, completion_logprobs
from specdec.text.token_strings import TokenStrings

pytest.importorskip("transformers")

from tiny_tokenizers import CONTROLS, GGUF_KINDS, KINDS, tiny_tokenizer

PROMPT = "hello a"
any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=20)
tricky = st.text(st.sampled_from("a é€😀👩‍🚀ß \n中.�<>|"), max_size=20)
strings = st.one_of(any_text, tricky)
each_kind = pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.gguf) for kind in GGUF_KINDS)]
)


def reported(tokenizer: Any, ids: list[int], prompt: list[int] = ()) -> list[dict[str, Any]]:
    actual = chat_logprobs(TokenStrings(tokenizer, prompt), ids, [0.0] * len(ids), None)
    return list(actual["content"])


def streamed(tokenizer: Any, ids: list[int], prompt: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return "".join([*(detokenizer.push(i) for i in ids), detokenizer.flush()])


@each_kind
@settings(deadline=None, max_examples=60)
@given(text=strings, cut=st.integers(0, 40))
def test_joined_bytes_are_the_text(kind: str, text: str, cut: int) -> None:
    tokenizer = tiny_tokenizer(kind)
    ids = tokenizer.encode(text, parse_special=False)
    decoded = tokenizer.decode(ids)
    assert decoded == text or text[:1] == " "  # Metaspace adds no second space to a first one
    assert b"".join(bytes(item["bytes"]) for item in reported(tokenizer, ids)) == decoded.encode()
    # Also behind a prompt, wherever that ends.
    ids = tokenizer.encode(PROMPT + text, parse_special=False)
    before, behind = ids[:cut], ids[cut:]
    data = [b"".join(bytes(item["bytes"]) for item in reported(tokenizer, part, at)) for part, at in
            ((before, []), (behind, before))]  # fmt: skip
    assert b"".join(data) == (PROMPT + text).encode()


@each_kind
@settings(deadline=None, max_examples=60)
@given(text=strings)
def test_offsets_are_where_the_tokens_stand(kind: str, text: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    prompt = tokenizer.encode(PROMPT)
    ids = tokenizer.encode(PROMPT + text, parse_special=False)[len(prompt) :]
    whole = streamed(tokenizer, ids, prompt)
    actual = completion_logprobs(TokenStrings(tokenizer, prompt), ids, [0.0] * len(ids), None)
    data = b""
    for offset, token_id in zip(actual["text_offset"], ids, strict=True):
        assert offset == len(data.decode(errors="ignore"))
        data += tokenizer.token_bytes(token_id)
    for offset, token in zip(actual["text_offset"], actual["tokens"], strict=True):
        assert token.startswith("bytes:\\x") or whole[offset : offset + len(token)] == token


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text("abcé中.", min_size=1), min_size=1, max_size=5))
def test_decoders_that_join_words(words: list[str]) -> None:
    """BERT's decoder decides which token a space belongs to."""
    tokenizer = tiny_tokenizer("word-piece")
    prompt = tokenizer.encode("hello")
    ids = tokenizer.encode(" ".join(words), add_special_tokens=False)
    text = streamed(tokenizer, ids, prompt)
    assert (
        b"".join(bytes(item["bytes"]) for item in reported(tokenizer, ids, prompt)) == text.encode()
    )
    assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *ids])
    ids = tokenizer.encode(" ".join(words), add_special_tokens=False)
    data = b"".join(bytes(item["bytes"]) for item in reported(tokenizer, ids))
    assert data.decode() == tokenizer.decode(ids)


@each_kind
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_offsets_of_any_tokens_are_in_order_and_in_the_text(kind: str, data: Any) -> None:
    n_tokens = tiny_tokenizer(kind).n_tokens
    check_offsets(kind, data.draw(st.lists(st.integers(0, n_tokens - 1), max_size=12)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "ids",
    [
        [199, 133, 5, 133, 261],  # in SentencePiece's, U+0080, NUL, a byte that is no text, a space
        [245, 164, 157, 133, 245, 164, 261],  # an emoji and the half of one
    ],
)
def test_a_later_byte_does_not_change_the_offsets_of_earlier_ones(
    kind: str, ids: list[int]
) -> None:
    check_offsets(kind, ids)


def check_offsets(kind: str, ids: list[int]) -> None:
    tokenizer = tiny_tokenizer(kind)
    assert streamed(tokenizer, ids, []) == tokenizer.decode(ids)
    actual = completion_logprobs(TokenStrings(tokenizer), ids, [0.0] * len(ids), None)
    text, offsets = tokenizer.decode(ids), actual["text_offset"]
    assert offsets == sorted(offsets)
    assert all(offset <= len(text) for offset in offsets)
    for token, token_id, offset in zip(actual["tokens"], ids, offsets, strict=True):
        if token.encode() == tokenizer.token_bytes(token_id):
            assert text[offset : offset + len(token)] == token


@each_kind
def test_every_token_has_a_name_of_its_own(kind: str) -> None:
    """No entry of top_logprobs is lost, and each identifies its token."""
    tokenizer = tiny_tokenizer(kind)
    everything = range(tokenizer.n_tokens)
    top = {i: -float(i) for i in everything}
    strings = TokenStrings(tokenizer, tokenizer.encode(PROMPT))
    (actual,) = completion_logprobs(strings, [5], [0.0], [top])["top_logprobs"]
    assert sorted(actual.values()) == sorted(top.values())
    assert set(CONTROLS) <= set(actual)


def test_bytes_that_are_no_text_are_written_as_openai_does() -> None:
    for kind in ("byte-level", "sentencepiece"):
        tokenizer = tiny_tokenizer(kind)
        ids = tokenizer.encode("▟", add_special_tokens=False)[-3:]  # E2 96 9F
        actual = reported(tokenizer, ids, tokenizer.encode(PROMPT))
        assert [item["token"] for item in actual] == ["bytes:\\xe2", "bytes:\\x96", "bytes:\\x9f"]
        assert [item["bytes"] for item in actual] == [[0xE2], [0x96], [0x9F]]


def test_tokens_with_the_same_text() -> None:
    """SentencePiece has `a` and the byte 0x61: the chosen or likelier one has the text, the other
    its id."""
    tokenizer = tiny_tokenizer("sentencepiece")
    letter, byte = (tokenizer.hf_tokenizer.convert_tokens_to_ids(item) for item in ("a", "<0x61>"))
    strings = TokenStrings(tokenizer, tokenizer.encode(PROMPT))
    for first, second in ((letter, byte), (byte, letter)):
        for chosen in (first, second, 0):
            top = {first: -1.0, second: -2.0}
            (actual,) = completion_logprobs(strings, [chosen], [0.0], [top])["top_logprobs"]
            other = first if chosen == second else second
            assert actual == {"a": top[first + second - other], f"token_id:{other}": top[other]}


def test_control_tokens_have_a_name_and_no_bytes() -> None:
    for kind in KINDS:
        tokenizer = tiny_tokenizer(kind)
        (end,) = tokenizer.eos_token_ids
        assert reported(tokenizer, [end]) == [
            {"token": "</s>", "logprob": 0.0, "bytes": [], "top_logprobs": []}
        ]
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_name(10**6) == "token_id:1000000"


def test_an_impossible_token_is_a_number() -> None:
    """JSON has no infinity."""
    tokenizer = tiny_tokenizer("byte-level")
    never = float("-inf")
    actual = completion_logprobs(TokenStrings(tokenizer), [50], [never], [{50: never}])
    assert actual["token_logprobs"] == [-9999.0]
    assert list(actual["top_logprobs"][0].values()) == [-9999.0]
