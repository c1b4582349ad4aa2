"""Marks that are tokens: recognised by id, and counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from dialogue_parsing import Parts
from dialogue_sample import TOOLS

from specdec.dialogue.formats import OutputFormat
from specdec.dialogue.schemas import ArgumentTypes
from specdec.dialogue.thinking_formats import THINKING_FORMATS
from specdec.dialogue.tokens import DialogueParser
from specdec.dialogue.tool_formats import TOOL_FORMATS
from specdec.text.control_tokens import AddedToken

_FIRST = 0x110000


class Letters:
    """A tokenizer whose tokens are characters, and added tokens behind them."""

    def __init__(self, control: Sequence[str] = (), plain: Sequence[str] = ()) -> None:
        self.names = [*control, *plain]
        self.n_tokens = _FIRST + len(self.names)
        self.added = {
            name: AddedToken(_FIRST + i, is_control=name in control)
            for i, name in enumerate(self.names)
        }

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            name = next((name for name in self.names if text.startswith(name)), None)
            ids.append(ord(text[0]) if name is None else self.added[name].token_id)
            text = text[len(name or "x") :]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._text, token_ids))

    def _text(self, token_id: int) -> str:
        if token_id < _FIRST:
            return chr(token_id)
        name = self.names[token_id - _FIRST]
        return "" if self.added[name].is_control else name


def parsed(
    tokenizer: Letters, form: OutputFormat, ids: Sequence[int], size: int, lag: int = 0
) -> tuple[Parts, int]:
    """Parse steps of `size` tokens, whose text comes `lag` characters late."""
    parser, parts = DialogueParser(form, tokenizer, tokenizer.added), Parts()
    n_shown = 0
    for i in range(0, len(ids), size):
        text = tokenizer.decode(ids[: i + size])
        end = max(len(text) - lag, n_shown) if i + size < len(ids) else len(text)
        parts.add(parser.push(text[n_shown:end], ids[i : i + size]))
        n_shown = end
    parts.add(parser.finish("stop"))
    return parts, parser.num_reasoning_tokens


def output_format(tools: str, thinking: str | None, begins_in: str = "text") -> OutputFormat:
    thought = next((form for form in THINKING_FORMATS if form.name == thinking), None)
    return OutputFormat(
        tools=next(form for form in TOOL_FORMATS if form.name == tools),
        thinking=thought,
        channels=thought.channels if thought else None,
        begins_in=begins_in,  # type: ignore[arg-type]
        types=ArgumentTypes(TOOLS),
    )


HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>")


@pytest.mark.parametrize("lag", [0, 3])
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_control_tokens_have_no_text_and_mark_all_the_same(size: int, lag: int) -> None:
    tokenizer = Letters(HARMONY)
    text = (
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f <|constrain|>json<|message|>{"a": "b"}<|call|>'
    )
    form = output_format("harmony", "harmony", "header")
    parts, n_reasoning = parsed(tokenizer, form, tokenizer.encode(text), size, lag)
    assert parts.calls == [["f", '{"a": "b"}']]
    assert (parts.reasoning, parts.content) == ("Hm", "")
    assert n_reasoning == len(tokenizer.encode("<|channel|>analysis<|message|>Hm<|end|>"))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_mark_that_is_a_token_is_text_where_it_is_spelled(size: int) -> None:
    """Both of a token with a text and of a control token."""
    form = output_format("mistral", "mistral")
    tokenizer = Letters(["[TOOL_CALLS]", "[ARGS]"], ["[THINK]", "[/THINK]"])
    ids = tokenizer.encode("[THINK]ab[/THINK]Write ")
    ids += [ord(letter) for letter in "[THINK] or [TOOL_CALLS] "]
    ids += tokenizer.encode('[TOOL_CALLS]f[ARGS]{"a": "[THINK]"}')
    parts, n_reasoning = parsed(tokenizer, form, ids, size)
    assert parts.reasoning == "ab"
    assert parts.content == "Write [THINK] or [TOOL_CALLS]"
    assert parts.calls == [["f", '{"a": "[THINK]"}']]
    assert n_reasoning == 4


def test_a_token_with_a_quote_in_arguments_stays_json() -> None:
    tokenizer = Letters(plain=["<|tool_call>", "<tool_call|>", '<|"|>'])
    form = output_format("gemma4", None)
    text = '<|tool_call>call:f{a:<|"|>x"y<|"|>}<tool_call|>'
    for size in (1, 2, 1000):
        parts, _ = parsed(tokenizer, form, tokenizer.encode(text), size)
        assert parts.calls == [["f", '{"a": "x\\"y"}']]


def test_reasoning_that_the_prompt_opened_is_counted_from_the_begin() -> None:
    tokenizer = Letters(plain=["</think>"])
    form = output_format("hermes", "think", "reasoning")
    for text, expected in (("abc</think>\n\nYes", 4), ("abc", 3), ("</think>x", 1)):
        for size in (1, 1000):
            _, n_reasoning = parsed(tokenizer, form, tokenizer.encode(text), size)
            assert n_reasoning == expected


def test_text_that_a_stop_string_cut_off_has_no_marks_behind_it() -> None:
    tokenizer = Letters(["<|tool_call_start|>", "<|tool_call_end|>"])
    parser = DialogueParser(output_format("lfm2", None), tokenizer, tokenizer.added)
    parts = Parts()
    parts.add(parser.push("ab", tokenizer.encode("abSTOP<|tool_call_start|>[f()]")))
    parts.add(parser.finish("stop"))
    assert (parts.content, parts.calls, parts.cuts) == ("ab", [], [])
