"""Conversations as prompts: own templates, others, the plain transcript; tools."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specdec.pair import pair_path
from specdec.text.chat_format import NAMED, PLAIN, ChatTemplateError, chat_format, plain_transcript
from specdec.text.contract import TokenizerError
from specdec.text.tokenizer import Tokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
    {"role": "user", "content": "and?"},
]
TRANSCRIPT = "Be brief.\nUser: hi\nAssistant: ho\nUser: and?\nAssistant:"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
OWN = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
)


def tokenizers(folder: Path, settings: dict[str, Any]) -> list[Any]:
    """The embedded draft's tokenizer in both formats, with more settings."""
    pytest.importorskip("llama_cpp")
    from pair_gguf import save_gguf

    from specdec.text.gguf_tokenizer import GgufTokenizer

    shutil.copytree(pair_path("pair:draft"), folder / "draft")
    path = folder / "draft" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    save_gguf(folder / "draft", folder / "draft.gguf", "draft")
    return [Tokenizer.from_pretrained(folder / "draft"), GgufTokenizer(folder / "draft.gguf")]


def test_the_plain_transcript() -> None:
    assert plain_transcript(TALK) == TRANSCRIPT
    with pytest.raises(ChatTemplateError, match="both of them texts"):
        plain_transcript([{"role": "user", "content": ["x"]}])


def test_a_model_without_a_template_is_given_a_transcript(tmp_path: Path) -> None:
    for tokenizer in tokenizers(tmp_path, {}):
        assert not tokenizer.has_chat_template
        assert tokenizer.chat_format is PLAIN
        assert tokenizer.encode_chat(TALK) == tokenizer.encode(TRANSCRIPT)
        with pytest.raises(TokenizerError, match="no chat template that describes tools"):
            tokenizer.encode_chat(TALK, [TOOL])


def test_tools_reach_a_template_that_knows_them(tmp_path: Path) -> None:
    strings = []
    for tokenizer in tokenizers(tmp_path, {"chat_template": OWN}):
        assert tokenizer.has_chat_template
        assert tokenizer.chat_format.knows_tools
        strings.append(tokenizer.decode(tokenizer.encode_chat(TALK[:1], [TOOL])))
        assert tokenizer.decode(tokenizer.encode_chat(TALK[:1])) == "[system] Be brief."
    assert strings[0] == strings[1] == json.dumps([TOOL]) + "[system] Be brief."


def test_another_template_takes_the_place_of_the_own(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    mine = chat_format(tmp_path / "mine.jinja")
    for tokenizer in tokenizers(tmp_path, {"chat_template": OWN}):
        tokenizer.chat_format = mine
        assert tokenizer.decode(tokenizer.encode_chat(TALK[1:2])) == "<hi>"
        tokenizer.chat_format = NAMED["chatml"]
        text = tokenizer.decode(tokenizer.encode_chat(TALK[1:2]))
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        tokenizer.chat_format = PLAIN
        assert tokenizer.encode_chat(TALK) == tokenizer.encode(TRANSCRIPT)


def test_of_several_templates_one_is_for_tools(tmp_path: Path) -> None:
    tokenizer = tokenizers(tmp_path, {})[0].hf_tokenizer
    tokenizer.chat_template = {"tool_use": "tools: {{ tools | length }}", "default": "none"}
    ours = Tokenizer(tokenizer)
    assert ours.decode(ours.encode_chat(TALK)) == "none"
    assert ours.decode(ours.encode_chat(TALK, [TOOL])) == "tools: 1"


def test_text_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    for tokenizer in tokenizers(tmp_path, {"chat_template": OWN}):
        for messages, tools in (([{"role": "user", "content": "\ud800"}], []), (TALK, ["\ud800"])):
            with pytest.raises(TokenizerError, match="half of a character|no character"):
                tokenizer.encode_chat(messages, tools)


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="name a file, or one of plain, chatml"):
        chat_format("chatlm")
    (tmp_path / "latin").write_bytes(b"\xff{{ messages }}")
    with pytest.raises(ChatTemplateError, match="not UTF-8 at byte 0"):
        chat_format(tmp_path / "latin")
    (tmp_path / "huge").write_bytes(b" " * (1 << 21))
    with pytest.raises(ChatTemplateError, match="more than"):
        chat_format(tmp_path / "huge")
    with pytest.raises(ChatTemplateError, match="name a file"):
        chat_format(tmp_path)
    (tmp_path / "wrong").write_text("{{ messages }}\n{% for x in %}")
    with pytest.raises(ChatTemplateError, match="wrong in line 2: Expected an expression"):
        chat_format(tmp_path / "wrong")
    (tmp_path / "deep").write_text("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}")
    with pytest.raises(ChatTemplateError, match="nested too deeply"):
        chat_format(tmp_path / "deep")


def test_reading_a_template_computes_none_of_it(tmp_path: Path) -> None:
    (tmp_path / "constant").write_text("{{ 'a' * 99999999999999 }}")
    assert chat_format(tmp_path / "constant").template is not None
