"""Prompts: where the answer begins, thinking that is switched off, and reasoning sent back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("jinja2")

from dialogue_sample import TOOLS

from specdec.dialogue.prompt import AnswerOptions, Dialogue
from specdec.text.chat_format import PLAIN, ChatFormat, TemplateOptions
from specdec.text.control_tokens import AddedToken
from specdec.text.conversation import encode_conversation

USER = [{"role": "user", "content": "Hi"}]
BODY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ALWAYS = BODY + "<assistant><think>\n"
SWITCHED = (
    BODY + "<assistant>{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
NEVER = BODY + "<assistant>{# the model writes <think> itself #}"
HARMONY = BODY + "<|start|>assistant{# <|channel|>analysis<|message|> <|call|> #}"
RECIPIENTS = "{{ tools }}{# >>>all recipient #}" + BODY + ">>>"


class Letters:
    """A chat tokenizer whose tokens are characters."""

    n_tokens = 0x110000
    added_tokens: dict[str, AddedToken] = {}
    template_tokens: dict[str, Any] = {}

    def __init__(self, template: str | None) -> None:
        self.chat_format = PLAIN if template is None else ChatFormat(template)

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def encode_chat(self, messages: Any, tools: Any = (), options: Any = None) -> list[int]:
        return encode_conversation(self, messages, tools, options)  # type: ignore[arg-type]


def encoded(
    template: str | None, messages: Any = USER, tools: Any = (), **options: Any
) -> tuple[str, Any]:
    """Return (text of the prompt, format of the answer)."""
    tokenizer = Letters(template)
    dialogue = Dialogue(tokenizer)  # type: ignore[arg-type]
    answer = options.pop("answer", AnswerOptions())
    prompt = dialogue.encode(messages, tools, TemplateOptions(**options), answer)
    return tokenizer.decode(prompt.ids), prompt.form


@pytest.mark.parametrize(
    ("template", "begins_in"),
    [(ALWAYS, "reasoning"), (SWITCHED, "text"), (NEVER, "text"), (HARMONY, "header")],
)
def test_where_an_answer_begins(template: str, begins_in: str) -> None:
    text, form = encoded(template)
    assert form.begins_in == begins_in
    assert form.thinking is not None
    assert not text.endswith("</think>\n\n")
    assert (form.channels is not None) == (template is HARMONY)


def test_a_section_of_calls_that_the_prompt_has_begun() -> None:
    assert encoded(RECIPIENTS, tools=TOOLS)[1].begins_in == "call"
    assert encoded(RECIPIENTS)[1].begins_in == "text"


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
@pytest.mark.parametrize(
    ("template", "end"),
    [
        (ALWAYS, "<think>\n\n</think>\n\n"),
        (SWITCHED, None),
        (NEVER, "<assistant><think>\n\n</think>\n\n"),
        (HARMONY, "<|start|>assistant<|channel|>final<|message|>"),
    ],
)
def test_thinking_is_switched_off_whatever_the_template_knows(
    template: str, end: str | None, name: str
) -> None:
    text, form = encoded(template, variables={name: False, "enable_thinking": False})
    assert text.endswith(end or "<assistant><think>\n\n</think>\n\n")
    assert form.begins_in == "text"


def test_an_answer_of_a_grammar_has_no_reasoning_before_it() -> None:
    options = AnswerOptions(is_constrained=True, is_call_forced=True)
    text, form = encoded(ALWAYS, tools=TOOLS, answer=options)
    assert text.endswith("<think>\n\n</think>\n\n")
    assert (form.begins_in, form.is_call_forced) == ("text", True)
    assert encoded(NEVER, answer=options)[0].endswith("<assistant>")


def test_an_answer_that_continues_reasoning() -> None:
    for content, begins_in in (("<think>So", "reasoning"), ("<think>So</think>No", "text")):
        messages = [*USER, {"role": "assistant", "content": content}]
        _, form = encoded(BODY + "{# <think> #}", messages, continues_last=True)
        assert form.begins_in == begins_in


def test_reasoning_may_stay_in_the_text() -> None:
    form = encoded(ALWAYS, answer=AnswerOptions(separates_reasoning=False))[1]
    assert form.thinking is None


def test_reasoning_goes_back_under_the_templates_name() -> None:
    messages = [*USER, {"role": "assistant", "content": "a", "reasoning_content": "because"}, *USER]
    for name in ("thinking", "reasoning", "reasoning_content"):
        template = BODY + f"{{% for m in messages %}}[{{{{ m.{name} }}}}]{{% endfor %}}"
        assert "[because]" in encoded(template, messages)[0]


def test_a_plain_transcript_tells_of_tools() -> None:
    text, form = encoded(None, tools=TOOLS)
    assert "get_weather" in text
    assert form.tools.name == "hermes"
    assert text.endswith("User: Hi\nAssistant:")
