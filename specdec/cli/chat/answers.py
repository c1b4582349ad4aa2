"""Chat: a conversation with a loaded model, and the answers to its messages."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from offload.errors import SpecdecError
from specdec.cli.chat.conversation import Conversation, Message
from specdec.cli.chat.settings import Settings
from specdec.cli.output import count_of, say, write_text
from specdec.cli.streaming import was_cut, write_stream

if TYPE_CHECKING:
    from specdec.api import LLM

_PATIENCE = 3  # Ctrl-Cs during one answer: the first stops it, this one does not wait for its end


class Chat:
    """A conversation with a loaded model."""

    def __init__(self, llm: LLM, conversation: Conversation, settings: Settings) -> None:
        self.llm, self.conversation, self.settings = llm, conversation, settings
        self.n_regenerated = 0
        self.has_failed = False
        """Whether a message had no answer."""

    def answer(self) -> None:
        """Answer the last question; one that cannot be answered is dropped, with the reason."""
        from specdec.engine.many_prompts import REQUEST_ERRORS

        try:
            with _one_interrupt():
                self._make_room()
                self._stream()
        except REQUEST_ERRORS as error:
            self.conversation.drop_question()
            self.report(error)
        except KeyboardInterrupt:  # before the answer began, or while a stopped one ended
            self.conversation.drop_question()

    def stats_lines(self) -> list[str]:
        """Return lines on the context in use, and on all answers so far."""
        n_turns, stats = len(self.conversation.turns), self.llm.stats
        n_tokens = self._count(self.conversation.messages) if self.conversation.messages else 0
        return [
            f"context {n_tokens} of {self.llm.max_context} tokens, {count_of(n_turns, 'turn')}",
            f"so far  {stats.generated_tokens} tokens in {stats.passes} passes, "
            f"{stats.acceptance_rate:.0%} of {stats.drafted_tokens} draft tokens accepted, "
            f"{stats.bytes_streamed / 1e9:.1f} GB streamed",
        ]

    def _count(self, messages: Sequence[Message]) -> int:
        from specdec.text.prompts import encode_prompt

        return len(encode_prompt(messages, self.llm.tokenizer))

    def _make_room(self) -> None:
        max_context = self.llm.max_context
        limit = self.settings.values["max_tokens"]
        n_dropped = self.conversation.fit(max_context, limit, self._count)
        if n_dropped:
            turns = "turn is" if n_dropped == 1 else f"{n_dropped} turns are"
            say(
                f"note: the context of {max_context} tokens is full: the oldest {turns} forgotten; "
                "a larger --ctx-size holds more"
            )

    def _stream(self) -> None:
        stream = self.llm.stream(self.conversation.messages, **self._keywords())
        try:
            result = write_stream(stream)
        except KeyboardInterrupt:
            stream.cancel()
            self._stop(stream.outputs[0].text)
            return
        self.conversation.answer(result.text)
        if was_cut(result):
            limit = self.settings.values["max_tokens"]
            say(
                f"note: the answer was cut after --max-tokens {limit} tokens; /set max-tokens N "
                "changes that"
            )

    def _stop(self, text: str) -> None:
        """End an answer that Ctrl-C stopped; what there is of it stays in the conversation."""
        write_text("\n")
        if text:
            self.conversation.answer(text)
            say("stopped; the answer so far stays in the conversation")
        else:
            self.conversation.drop_question()
            say("stopped before the answer began; the message is dropped")

    def _keywords(self) -> dict[str, Any]:
        """Return the sampling options; every regenerated answer has a seed of its own."""
        values = self.settings.values
        if values.get("seed") is None:
            return values
        return {**values, "seed": values["seed"] + self.n_regenerated}

    def report(self, error: SpecdecError) -> None:
        """Print an error that does not end the conversation."""
        self.has_failed = True
        say(f"error: {error}")


@contextmanager
def _one_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt for the first Ctrl-C only, so that the next does not disturb the end
    of an answer that stops; the third one is raised again."""
    previous, n_signals = signal.getsignal(signal.SIGINT), 0

    def on_signal(*_: object) -> None:
        nonlocal n_signals
        n_signals += 1
        if n_signals in (1, _PATIENCE):
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
