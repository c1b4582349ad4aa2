"""The parser of a request's output."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.dialogue.deltas import Delta, TextDelta
from specdec.dialogue.tokens import DialogueParser
from specdec.serve.events import (
    OutputParser,
)
from specdec.serve.jobs import Job
from specdec.text.contract import ChatTokenizer


def output_parser(job: Job, tokenizer: ChatTokenizer) -> OutputParser:
    """Return a new parser for one sequence of a request. tokenizer: the model's."""
    form = job.form
    if form is None or (form.tools is None and form.thinking is None and form.channels is None):
        return PlainParser()
    return DialogueParser(form, tokenizer, tokenizer.added_tokens, job.prompts[0])


class PlainParser:
    """Parser of an output that is text only."""

    num_reasoning_tokens = 0

    def push(self, text: str, token_ids: Sequence[int]) -> Sequence[Delta]:
        return [TextDelta(text)] if text else []

    def finish(self, reason: str) -> Sequence[Delta]:
        return []
