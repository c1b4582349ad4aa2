"""The detokenizer's window stays small for any output, without losing text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.text.detokenizer import CONTEXT_TOKENS, MAX_PENDING_TOKENS, IncrementalDetokenizer

# The finished tokens of a window were its pending ones before; one more triggers a cut.
MAX_TOKENS = 2 * (MAX_PENDING_TOKENS + 1)
SPECIAL = -1


class BytesDecoder:
    """Tokens of any bytes, decoded as by byte-level tokenizers; count the decoded tokens."""

    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        self._vocabulary = vocabulary
        self.longest = self.n_decoded = 0

    @property
    def n_tokens(self) -> int:
        return len(self._vocabulary)

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        self.longest = max(self.longest, len(token_ids))
        self.n_decoded += len(token_ids)
        return self._join([self._vocabulary[i] for i in token_ids if i != SPECIAL])

    def _join(self, parts: Sequence[bytes]) -> str:
        return b"".join(parts).decode("utf-8", "replace")


class FallbackDecoder(BytesDecoder):
    """A sentencepiece decoder: pieces begin with a space, of which the text's first is dropped,
    and a run of byte tokens that is not UTF-8 from end to end is given up byte by byte."""

    def _join(self, parts: Sequence[bytes]) -> str:
        text, run = "", b""
        for part in [*parts, b" "]:
            if len(part) == 1 and part != b" ":
                run += part
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            run = b""
            text += part.decode()
        return text[:-1].removeprefix(" ")


def pieces(decoder: BytesDecoder, token_ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
    detokenizer = IncrementalDetokenizer(decoder, prompt)
    return "".join([*(detokenizer.push(t) for t in token_ids), detokenizer.flush()])


@st.composite
def runs(draw: st.DrawFn, ids: Sequence[int]) -> list[int]:
    """Short patterns of tokens, some of them repeated many times."""
    tokens: list[int] = []
    pattern = st.lists(st.sampled_from(ids), min_size=1, max_size=4)
    for part in draw(st.lists(pattern, max_size=6)):
        tokens += part * draw(st.sampled_from([1, 2, 7, 60]))
    return tokens


# Beginnings, middles and ends of characters of two to four bytes, and invalid UTF-8.
BYTES = st.sampled_from([b"\x80", b"\x9f", b"\xa0", b"\xac", b"\xc3", b"\xe2", b"\xed", b"\xf0"])
TOKENS = st.lists(BYTES | st.just(b"a"), min_size=1, max_size=4).map(b"".join)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(vocabulary=st.lists(TOKENS, min_size=1, max_size=5), data=st.data())
def test_any_bytes_and_special_tokens(vocabulary: list[bytes], data: st.DataObject) -> None:
    token_ids = data.draw(runs([*range(len(vocabulary)), SPECIAL]))
    decoder = BytesDecoder(vocabulary)
    assert pieces(decoder, token_ids) == BytesDecoder(vocabulary).decode(token_ids)
    assert decoder.longest <= MAX_TOKENS


WORDS = [" a", " b"]
FALLBACK = [*(word.encode() for word in WORDS), *(bytes([i]) for i in range(256))]


def byte_ids(data: bytes) -> list[int]:
    return [len(WORDS) + byte for byte in data]


# Within a run of bytes only the first character can be shown before the rest is known: bytes
# after a valid one must be valid here, since shown text is never taken back.
VALID = st.text(st.sampled_from("é€😀a"), min_size=1, max_size=40).map(lambda t: t.encode())
INVALID = st.lists(BYTES, max_size=80).map(lambda parts: b"\x80" + b"".join(parts))


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        (VALID | INVALID).map(lambda run: [0, *byte_ids(run), 1])
        | st.integers(1, 60).map(lambda n: [SPECIAL] * n)
        | st.just([0, SPECIAL, 1]),
        max_size=6,
    )
)
def test_byte_fallback_with_special_tokens(parts: list[list[int]]) -> None:
    token_ids = [token for part in parts for token in part]
    decoder = FallbackDecoder(FALLBACK)
    assert pieces(decoder, token_ids) == FallbackDecoder(FALLBACK).decode(token_ids)
    assert decoder.longest <= MAX_TOKENS


@pytest.mark.parametrize(
    "run",
    [
        [SPECIAL],
        byte_ids(b"\x80"),
        byte_ids(b"\xe2"),
        byte_ids(b"\xf0\x9f\x98"),
        byte_ids(b"\xc3a"),
    ],
    ids=["special", "stray", "beginning", "unfinished", "never a character"],
)
@pytest.mark.parametrize("decoder_type", [BytesDecoder, FallbackDecoder])
@pytest.mark.parametrize("prompt", [[], [0], [0, 1] * CONTEXT_TOKENS])
def test_the_work_grows_with_the_length_only(
    run: list[int], decoder_type: type[BytesDecoder], prompt: list[int]
) -> None:
    """Text that never ends in a whole character costs a bounded number of tokens per token."""
    token_ids = [1, *run * 1000, 0]
    decoder = decoder_type(FALLBACK)
    text = pieces(decoder, token_ids, prompt)
    whole = decoder_type(FALLBACK)
    assert whole.decode(prompt) + text == whole.decode([*prompt, *token_ids])
    assert decoder.longest <= MAX_TOKENS
    assert decoder.n_decoded <= 2 * MAX_TOKENS * len(token_ids)


def test_replacement_characters_do_not_wait_for_the_end() -> None:
    """Bytes that can no longer become a character are shown."""
    detokenizer = IncrementalDetokenizer(BytesDecoder(FALLBACK))
    shown = "".join(detokenizer.push(token) for token in byte_ids(b"\x80" * 200))
    assert 200 - 2 * MAX_PENDING_TOKENS <= len(shown) <= 200


def test_a_special_token_is_looked_at_once() -> None:
    decoder = BytesDecoder(FALLBACK)
    detokenizer = IncrementalDetokenizer(decoder, [0, 1])
    assert detokenizer.push(SPECIAL) == ""
    before = decoder.n_decoded
    assert [detokenizer.push(SPECIAL) for _ in range(50)] == [""] * 50
    assert decoder.n_decoded == before


def test_a_first_space_is_no_special_token() -> None:
    """Alone it has no text in a sentencepiece model, yet it shifts the following text."""
    decoder = FallbackDecoder([b" ", b" a"])
    assert pieces(decoder, [0, 0, 1]) == decoder.decode([0, 0, 1]) == "  a"


@pytest.mark.parametrize("n_before", range(10, 22))
def test_a_cut_does_not_join_a_beginning_with_another_characters_end(n_before: int) -> None:
    """The end of an emoji looks the same after the beginning of a sun, but is not its end."""
    token_ids = byte_ids(b"\xe2" * n_before + "😀".encode())
    assert pieces(BytesDecoder(FALLBACK), token_ids) == "\ufffd" * n_before + "😀"
