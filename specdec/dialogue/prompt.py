"""Prompts of dialogues, and the format of the answers to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specdec.dialogue.formats import OutputFormat, ThinkingFormat, ToolFormat
from specdec.dialogue.messages import adapted
from specdec.dialogue.recognition import thinking_format, tool_format
from specdec.dialogue.schemas import ArgumentTypes
from specdec.dialogue.traits import PLAIN_TRAITS, TemplateTraits, traits_of
from specdec.sampling.reasoning_budget import ReasoningBudget
from specdec.text.chat_format import DEFAULT_OPTIONS, TemplateOptions
from specdec.text.contract import ChatTokenizer
from specdec.text.conversation import render_conversation

_TAIL_TOKENS = 48  # the generation prompt, and a tag that it opens
_SWITCHES = ("enable_thinking", "thinking")
_REASONING_NAMES = ("thinking", "reasoning", "thought")
Begin = Literal["header", "reasoning", "text", "call"]


@dataclass(frozen=True)
class DialoguePrompt:
    """Tokens of a prompt, and the format of the answer."""

    ids: list[int]
    form: OutputFormat


@dataclass(frozen=True)
class AnswerOptions:
    """Wishes about an answer.

    separates_reasoning: tell reasoning apart. max_calls: None is any number.
    is_constrained: the text follows a grammar from its begin, so that no reasoning comes before.
    is_call_forced: that grammar is one of a tool call in JSON.
    """

    separates_reasoning: bool = True
    max_calls: int | None = None
    is_constrained: bool = False
    is_call_forced: bool = False


DEFAULT_ANSWER = AnswerOptions()


class Dialogue:
    """Prompts and formats of one model."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = tokenizer.chat_format.template_for(has_tools=True)
        names = tokenizer.added_tokens
        self.tools: ToolFormat = tool_format(self._template, names)
        self.thinking: ThinkingFormat | None = thinking_format(self._template, names)

    @property
    def traits(self) -> TemplateTraits:
        if self._template is None:
            return PLAIN_TRAITS
        special_tokens = json.dumps(dict(self._tokenizer.template_tokens), sort_keys=True)
        return traits_of(self._template, special_tokens)

    def adapted(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """Return messages and tools as the template takes them."""
        messages = [self._with_reasoning(message) for message in messages]
        is_plain = all(
            message.get("content") is not None
            and message["role"] != "tool"
            and not message.get("tool_calls")
            for message in messages
        )
        if is_plain and not tools:
            return messages, tools
        return adapted(messages, tools, self.traits, self.tools)

    def _with_reasoning(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with its reasoning under the template's name."""
        template, reasoning = self._template or "", message.get("reasoning_content")
        if not reasoning or "reasoning_content" in template:
            return message
        names = [name for name in _REASONING_NAMES if f".{name}" in template]
        names += [name for name in _REASONING_NAMES if f"['{name}']" in template]
        return {**message, **dict.fromkeys(names, reasoning)}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: TemplateOptions = DEFAULT_OPTIONS,
    ) -> str:
        """Return the text of a prompt. Raises TokenizerError."""
        messages, tools = self.adapted(messages, tools)
        return render_conversation(self._tokenizer, messages, tools, options)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: TemplateOptions = DEFAULT_OPTIONS,
        answer: AnswerOptions = DEFAULT_ANSWER,
    ) -> DialoguePrompt:
        """Return a prompt. Raises TokenizerError.

        Thinking that is switched off, or has no place before a grammar's text, is closed in the
        prompt if the template leaves it open.
        """
        shown, shown_tools = self.adapted(messages, tools)
        ids = list(self._tokenizer.encode_chat(shown, shown_tools, options))
        begins_in = self._begin(ids, tools, messages[-1] if options.continues_last else None)
        switch = next((options.variables[s] for s in _SWITCHES if s in options.variables), None)
        if options.add_generation_prompt and (switch is False or answer.is_constrained):
            suffix = self._skipping(begins_in, is_told=switch is False)
            if suffix:
                ids += self._tokenizer.encode(suffix, add_special_tokens=False, is_start=False)
                begins_in = "text"
        return DialoguePrompt(ids, self._form(tools, begins_in, answer))

    def reasoning_budget(self, prompt: DialoguePrompt, max_tokens: int) -> ReasoningBudget | None:
        """Return a processor that ends the reasoning after so many tokens; None for a model whose
        reasoning has no known marks."""
        if self.thinking is None:
            return None
        marks = self.thinking.reasoning_marks
        return ReasoningBudget(
            max_tokens,
            marks,
            self._tokenizer.encode(marks.ending, add_special_tokens=False, is_start=False),
            len(prompt.ids),
            prompt.form.begins_in == "reasoning",
            self._written,
        )

    def _form(
        self, tools: Sequence[Mapping[str, Any]], begins_in: Begin, answer: AnswerOptions
    ) -> OutputFormat:
        thinking = self.thinking
        return OutputFormat(
            tools=self.tools if tools else None,
            thinking=thinking if answer.separates_reasoning else None,
            channels=thinking.channels if thinking else None,
            begins_in=begins_in,
            types=ArgumentTypes(tools),
            max_calls=answer.max_calls,
            is_call_forced=answer.is_call_forced,
        )

    def _begin(
        self, ids: Sequence[int], tools: Sequence[Any], continued: Mapping[str, Any] | None
    ) -> Begin:
        """Return where the prompt ends."""
        thinking, tail = self.thinking, self._tail(ids).rstrip()
        if thinking is not None and thinking.channels is not None:
            return "header" if tail.endswith(thinking.channels.start) else "text"
        opens = [mark.rstrip() for mark in thinking.opens] if thinking else []
        if any(tail.endswith(mark) for mark in opens):
            return "reasoning"
        if continued is not None and thinking is not None:
            content = str(continued.get("content") or "")
            opened = max(content.rfind(mark) for mark in thinking.opens)
            if opened > max(content.rfind(mark) for mark in thinking.closes):
                return "reasoning"
        if tools and any(tail.endswith(mark) for mark in self.tools.begins):
            return "call"
        return "text"

    def _tail(self, ids: Sequence[int]) -> str:
        """Return the text of the last tokens, with control tokens written out."""
        return self._written(ids[-_TAIL_TOKENS:])

    def _written(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with control tokens written out."""
        names = {token.token_id: name for name, token in self._tokenizer.added_tokens.items()}
        parts: list[str] = []
        run: list[int] = []
        for token_id in ids:
            if token_id in names:
                parts += [self._tokenizer.decode(run) if run else "", names[token_id]]
                run = []
            else:
                run.append(token_id)
        return "".join([*parts, self._tokenizer.decode(run) if run else ""])

    def _skipping(self, begins_in: Begin, *, is_told: bool) -> str:
        """Return what ends, or skips, the reasoning behind a prompt. is_told: whether the template
        has been told to switch thinking off."""
        thinking = self.thinking
        if thinking is None:
            return ""
        if begins_in == "header" and thinking.channels is not None:
            return thinking.channels.skipping
        if begins_in == "reasoning":
            return f"\n\n{thinking.closes[0]}\n\n"
        knows_switch = any(name in (self._template or "") for name in _SWITCHES)
        if is_told and not knows_switch and thinking.opens:
            return f"{thinking.opens[0]}\n\n{thinking.closes[0]}\n\n"
        return ""
