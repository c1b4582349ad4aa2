"""Text never arrives in half characters, and stop strings are found wherever tokens end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.text.contract import TokenizerError
from specdec.text.detokenizer import UNFINISHED, IncrementalDetokenizer
from specdec.text.stream import StopStrings, TextStream
from specdec.text.tokenizer import Tokenizer

tokenizers = pytest.importorskip("tokenizers")

CORPUS = ["def main(): return value", "hello world, hello you", "for x in range(10): print(x)"]


class Plain:
    """A tokenizers.Tokenizer with the members of TokenDecoder."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.n_tokens = tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)


def byte_level():
    """GPT-2's tokenizer: every byte has a token, text is recovered exactly."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback():
    """Llama's tokenizer: ▁ for spaces, bytes for unknown text, the first space dropped."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)]]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,", "▁a", "▁he", "llo", "lo", "▁w", "or"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "a"), ("▁", "w"), ("o", "r"), ("l", "o")]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = Plain(byte_level()), Plain(byte_fallback())
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["gpt2", "llama"])
strings = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=30)
tricky = st.text(st.sampled_from("a é€😀👩‍🚀ß \n中."), max_size=30)


def pieces_of(tokenizer, token_ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
    return [*(detokenizer.push(t) for t in token_ids), detokenizer.flush()]


@BOTH
@settings(deadline=None)
@given(text=st.one_of(strings, tricky))
def test_chunks_make_up_the_text(tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids) == text


@BOTH
@settings(deadline=None)
@given(text=tricky)
def test_no_piece_ends_in_half_a_character(tokenizer, text: str) -> None:
    shown = ""
    for piece in pieces_of(tokenizer, tokenizer.encode(text)):
        shown += piece
        assert UNFINISHED not in piece
        assert text.startswith(shown)


@BOTH
@settings(deadline=None)
@given(text=tricky, cut=st.integers(0, 40))
def test_text_after_a_prompt_keeps_its_leading_space(tokenizer, text: str, cut: int) -> None:
    whole = tokenizer.encode("a he " + text)
    cut = min(cut, len(whole))
    before = tokenizer.decode(whole[:cut])
    if UNFINISHED in before:
        return  # the prompt ends inside a character
    assert before + "".join(pieces_of(tokenizer, whole[cut:], whole[:cut])) == "a he " + text


@settings(deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.n_tokens - 1), max_size=40))
def test_any_tokens_give_the_text_of_all_of_them(token_ids: list[int]) -> None:
    """Bytes that are no UTF-8 are included, as an untrained model writes them."""
    assert "".join(pieces_of(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.decode(token_ids)


def test_special_tokens_do_not_swallow_the_next_space() -> None:
    encode = BYTE_FALLBACK.encode
    eos = BYTE_FALLBACK.tokenizer.token_to_id("</s>")
    token_ids = [*encode("he a"), eos, *encode("a")]
    assert "".join(pieces_of(BYTE_FALLBACK, token_ids)) == BYTE_FALLBACK.decode(token_ids)
    assert "".join(pieces_of(BYTE_FALLBACK, [eos, eos])) == ""


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    token_ids = BYTE_LEVEL.encode("a€")
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    assert [detokenizer.push(t) for t in token_ids[:-1]] == ["a", "", ""]
    assert detokenizer.flush() == UNFINISHED
    assert detokenizer.flush() == ""


def test_a_long_run_of_emoji_is_decoded_in_small_windows() -> None:
    """Byte-fallback decoders give up a whole run of bytes that begins inside a character."""
    text = "a" + "😀" * 30
    token_ids = BYTE_FALLBACK.encode(text)
    assert "".join(pieces_of(BYTE_FALLBACK, token_ids)) == text
    for cut in (1, 2, 2 + 4 * 10, 2 + 4 * 29):
        prompt, rest = token_ids[:cut], token_ids[cut:]
        expected = text[len(BYTE_FALLBACK.decode(prompt)) :]
        if UNFINISHED not in BYTE_FALLBACK.decode(prompt):
            assert "".join(pieces_of(BYTE_FALLBACK, rest, prompt)) == expected


def characterwise(stops: Sequence[str], text: str) -> tuple[str, str | None]:
    """By definition: read character by character, stop at the first complete stop string."""
    for end in range(1, len(text) + 1):
        actual = [s for s in stops if text[:end].endswith(s)]
        if actual:
            longest = max(actual, key=len)
            return text[: end - len(longest)], longest
    return text, None


short = st.text(st.sampled_from("ab"), min_size=1, max_size=4)


@settings(deadline=None)
@given(st.lists(short, max_size=3), st.lists(st.text(st.sampled_from("ab"), max_size=5)))
def test_stop_strings_do_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    finder = StopStrings(stops)
    shown, actual = "", None
    for piece in pieces:
        match = finder.push(piece)
        shown += match.text
        actual = match.stop
    shown += finder.flush()
    assert (shown, actual) == characterwise(stops, "".join(pieces))


@pytest.mark.parametrize("stop", ["STOP", "\n\n", "</s>", "é€😀"])
def test_stop_string_at_every_split(stop: str) -> None:
    text = f"before {stop} after {stop}"
    for cut in range(len(text) + 1):
        for second in range(cut, len(text) + 1):
            finder = StopStrings([stop])
            matches = [finder.push(p) for p in (text[:cut], text[cut:second], text[second:])]
            assert "".join(m.text for m in matches) + finder.flush() == "before "
            assert matches[-1].stop == stop


def test_held_back_text_comes_out_when_it_was_no_stop() -> None:
    finder = StopStrings(["abc"])
    assert finder.push("xab").text == "x"
    assert finder.push("d").text == "abd"
    assert finder.push("ab").text == ""
    assert finder.flush() == "ab"


@pytest.mark.parametrize("stop", ["value", "n v", " 10)", "é€", "€"])
@pytest.mark.parametrize("step_size", [1, 2, 3, 7, 100])
def test_stream_says_which_token_completed_the_stop(stop: str, step_size: int) -> None:
    text = f"def main(): return é€ {stop} and more text"
    token_ids = BYTE_LEVEL.encode(text)
    expected_text, _ = characterwise([stop], text)
    n_needed = next(
        n for n in range(len(token_ids) + 1) if stop in BYTE_LEVEL.decode(token_ids[:n])
    )
    stream = TextStream(BYTE_LEVEL, stop=[stop])
    shown, n_tokens = "", 0
    for start in range(0, len(token_ids), step_size):
        update = stream.push(token_ids[start : start + step_size])
        shown += update.text
        n_tokens += update.n_tokens
        if update.stop:
            break
    assert stream.flush().text == ""
    assert (shown, n_tokens, update.stop) == (expected_text, n_needed, stop)


def test_stream_without_a_stop_gives_everything() -> None:
    text = "hello wörld 😀 STO"
    stream = TextStream(BYTE_LEVEL, stop=["STOP"])
    update = stream.push(BYTE_LEVEL.encode(text))
    assert update.n_tokens == len(BYTE_LEVEL.encode(text))
    assert update.text == "hello wörld 😀 "
    assert update.text + stream.flush().text == text


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("tokenizer")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<eos>")
    fast.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
        "{% if messages[0].content == 'boom' %}{{ raise_exception('no booms') }}{% endif %}"
    )
    fast.save_pretrained(path)
    return path


def test_tokenizer_of_a_checkpoint(saved: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(saved)
    token_ids = tokenizer.encode("hello wörld")
    assert tokenizer.decode([*token_ids, *tokenizer.eos_token_ids]) == "hello wörld"
    assert tokenizer.n_tokens == len(tokenizer.hf_tokenizer)
    assert max(token_ids) < tokenizer.n_tokens
    chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(chat) == "user: hi\nassistant:"
    with pytest.raises(TokenizerError, match="no booms"):
        tokenizer.encode_chat([{"role": "user", "content": "boom"}])


def test_tokenizer_errors_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(TokenizerError, match="cannot load a tokenizer") as caught:
        Tokenizer.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)
