"""llama.cpp's tokenizer and transformers' give the same ids and the same text."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.pair import pair_path
from specdec.text.contract import TokenizerError
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.text.tokenizer import Tokenizer
from specdec.text.vocabulary import Vocabulary, compare_vocabularies

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
pytest.importorskip("transformers")
pytestmark = pytest.mark.gguf

from specdec.text.chat_format import ChatTemplateError  # noqa: E402
from specdec.text.chat_template import render_chat  # noqa: E402
from specdec.text.gguf_tokenizer import GgufTokenizer  # noqa: E402

N_LINES = 3_000
# Letters of Unicode 16 (2024), which llama.cpp's tables do not have yet: `'s` after them splits
# differently. More of them lie beyond U+FFFF.
NEWEST = {0x1C89, 0x1C8A, 0xA7CB, 0xA7CC, 0xA7CD, 0xA7DA, 0xA7DB, 0xA7DC}
EDGES = [
    "",
    " ",
    "\n",
    "\t \r\n  \n\n x",
    "   four   spaces   ",
    "a\u00a0b\u2003c\u3000d\u0085e\u200bf\ufeffg",
    "\x00\x01\x1c\x1f\x7f",
    "it's we'll I'D they'RE 'tis ''s",
    "1234567890 1,234.5e-10 0xFF ½ ² ٣ Ⅷ 一二三",
    "<|endoftext|> x <|endoftext|><|endoftext|>",
    "<|endoftext <||> [PAD4096]",
    "é e\u0301 ñ 中文字 русский עברית 한국어 ไทย",
    "😀👩‍👩‍👧🏽 🇩🇪 \U0001f9d1\u200d\U0001f4bb",
    "\U0010ffff\ue000\ufffd",
    "=" * 300 + " " * 300 + "\n" * 50,
]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GgufTokenizer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        path = pair_path("pair:target.gguf")
    with GgufTokenizer(path) as tokenizer:
        yield tokenizer


@pytest.fixture(scope="module")
def theirs() -> Tokenizer:
    return Tokenizer.from_pretrained(pair_path("pair:target"))


def lines_of_python() -> list[str]:
    """Lines of the standard library, the same ones on each run of the same Python."""
    lines: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        lines += path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return random.Random(0).sample(lines, N_LINES)


def assert_same(ours: GgufTokenizer, theirs: Tokenizer, text: str) -> None:
    expected = theirs.encode(text)
    assert ours.encode(text) == expected, repr(text)
    assert ours.decode(expected) == theirs.decode(expected), repr(text)


def test_lines_of_python(ours: GgufTokenizer, theirs: Tokenizer) -> None:
    for line in lines_of_python():
        assert_same(ours, theirs, line)


@pytest.mark.parametrize("text", EDGES)
def test_edges(ours: GgufTokenizer, theirs: Tokenizer, text: str) -> None:
    assert_same(ours, theirs, text)


@pytest.mark.slow
def test_every_character_of_the_basic_plane(ours: GgufTokenizer, theirs: Tokenizer) -> None:
    letters = [chr(i) for i in range(0x10000) if not 0xD800 <= i < 0xE000 and i not in NEWEST]
    for start in range(0, len(letters), 16):
        text = "".join(f"a {c}b{c}'s 1{c}2 {c}\n\t {c}{c}\n" for c in letters[start : start + 16])
        assert ours.encode(text) == theirs.encode(text), ascii(letters[start : start + 16])


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(
        st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]).filter(
            lambda c: ord(c) not in NEWEST
        )
    )
)
def test_any_text(ours: GgufTokenizer, theirs: Tokenizer, text: str) -> None:
    assert_same(ours, theirs, text)


@settings(max_examples=300, deadline=None)
@given(token_ids=st.lists(st.integers(0, 4095), max_size=12))
def test_any_tokens_give_the_same_text(
    ours: GgufTokenizer, theirs: Tokenizer, token_ids: list[int]
) -> None:
    assert ours.decode(token_ids) == theirs.decode(token_ids)


@settings(max_examples=100, deadline=None)
@given(token_ids=st.lists(st.one_of(st.integers(0, 260), st.integers(0, 4095)), max_size=12))
def test_pieces_of_a_stream_are_the_same(
    ours: GgufTokenizer, theirs: Tokenizer, token_ids: list[int]
) -> None:
    def pieces(tokenizer: GgufTokenizer | Tokenizer) -> list[str]:
        stream = IncrementalDetokenizer(tokenizer)
        return [*(stream.push(i) for i in token_ids), stream.flush()]

    assert pieces(ours) == pieces(theirs)


def test_members_agree(ours: GgufTokenizer, theirs: Tokenizer) -> None:
    assert ours.n_tokens == theirs.n_tokens
    assert ours.eos_token_ids == theirs.eos_token_ids
    assert ours.has_chat_template is theirs.has_chat_template is False
    assert ours.encode("x", add_special_tokens=False) == theirs.encode("x")
    talk = [{"role": "user", "content": "hi"}]
    assert ours.encode_chat(talk) == theirs.encode_chat(talk)
    assert ours.decode([5000, -1]) == ""


def test_vocabularies_are_equal(ours: GgufTokenizer, theirs: Tokenizer) -> None:
    expected = Vocabulary.from_tokenizer(theirs.hf_tokenizer, 4096)
    assert ours.vocabulary() == expected
    result = compare_vocabularies(ours.vocabulary(), expected)
    assert (result.problem, result.notes, result.n_equal) == (None, (), 4096)


def test_broken_files_and_texts_are_one_line(ours: GgufTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(TokenizerError, match="cannot load a tokenizer") as caught:
        GgufTokenizer(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(TokenizerError, match="lone surrogate at 1"):
        ours.encode("a\ud800")


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{{ m.role }}: {{ m.content | tojson }}\n{% generation %}x{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}assistant ({{ strftime_now('%%') }}):{% endif %}"
    "{% if messages[0].content == 'boom' %}{{ raise_exception('no booms') }}{% endif %}"
)


def test_a_chat_template_of_the_file_is_used(tmp_path: Path) -> None:
    import json
    import shutil

    from pair_gguf import save_gguf

    folder = shutil.copytree(pair_path("pair:draft"), tmp_path / "draft")
    settings_path = folder / "tokenizer_config.json"
    given = json.loads(settings_path.read_text()) | {"chat_template": TEMPLATE}
    settings_path.write_text(json.dumps(given))
    save_gguf(folder, tmp_path / "chat.gguf", "chat")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "é <hi>"}]
    with GgufTokenizer(tmp_path / "chat.gguf") as ours:
        theirs = Tokenizer.from_pretrained(folder)
        assert ours.has_chat_template
        assert ours.encode_chat(messages) == theirs.encode_chat(messages)
        assert ours.decode(ours.encode_chat(messages)) == 'user: "é <hi>"\nxassistant (%):'
        with pytest.raises(TokenizerError, match="chat template failed: no booms"):
            ours.encode_chat([{"role": "user", "content": "boom"}])


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__.__mro__ }}", "{% set x = messages.append(1) %}", "{% if %}", "{{ 1 / 0 }}"],
)
def test_templates_stay_in_the_sandbox(template: str) -> None:
    if "__class__" in template:
        template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ChatTemplateError):
        render_chat(template, [{"role": "user", "content": "hi"}], {})
