"""OutputBuffer: the tokens, text and log-probabilities that a sequence has emitted, and its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.engine.sequences.outputs import CompletionOutput
from specdec.sampling.logprobs import TopLogprobs, logprobs_of_token
from specdec.sampling.sampler import Sampler
from specdec.sampling.token_limit import TokenLimit
from specdec.text.stream import TextStream


class OutputBuffer:
    """Output of one sequence.

    Args:
        sampler: has the stop tokens and the logprobs requested.
        limit: maximum new tokens.
        text: detokenises and finds stop strings; None where no text is wanted.

    Attributes:
        num_tokens: number of tokens emitted so far.
        finish_reason: why the sequence ended by itself: "stop" or "length".
    """

    def __init__(self, sampler: Sampler, limit: TokenLimit, text: TextStream | None) -> None:
        self._sampler, self._limit, self._text = sampler, limit, text
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._stop: str | None = None  # the stop string that ended it
        self._pieces: list[str] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []

    def take(self, new_ids: Sequence[int]) -> tuple[Sequence[int], str]:
        """Append new tokens up to the sequence's end; return them and their text."""
        stop_ids, text = self._sampler.stop_tokens, ""
        if self._text is not None:
            update = self._text.push(token for token in new_ids if token not in stop_ids)
            text = update.text
            if update.stop is not None:
                new_ids = new_ids[: update.n_tokens]
                self.finish_reason, self._stop = "stop", update.stop
        if self.finish_reason is None:
            if new_ids[-1] in stop_ids:
                self.finish_reason = "stop"
            elif self.num_tokens + len(new_ids) >= self._limit.n_tokens:
                self.finish_reason = "length"
        self.num_tokens += len(new_ids)
        self._pieces.append(text)
        return new_ids, text

    def flush(self) -> str:
        """Return the text that was withheld as a possible stop string, at the sequence's end."""
        if self._text is None:
            return ""
        self._pieces.append(self._text.flush().text)
        return self._pieces[-1]

    def fill(
        self,
        token_ids: Sequence[int],
        logprobs: Iterable[float],
        top_logprobs: Iterable[TopLogprobs],
    ) -> None:
        """Take all tokens at once, as a beam search found them."""
        self._logprobs, self._top_logprobs = list(logprobs), list(top_logprobs)
        if token_ids:
            self.take(token_ids)
            self.flush()

    def note_logits(self, rows: Sequence[NDArray[np.float32]], token_ids: Sequence[int]) -> None:
        """Note the target's logits [vocab] that each new token was chosen by."""
        params = self._sampler.params
        if not params.logprobs:
            return
        for row, token in zip(rows, token_ids, strict=True):
            logits = row[: self._sampler.n_tokens]
            logprob, top = logprobs_of_token(logits, token, params.n_top_logprobs)
            self._logprobs.append(logprob)
            self._top_logprobs.append(top)

    def completion(self, new_ids: Sequence[int]) -> CompletionOutput:
        """Return the output so far.

        new_ids: new tokens of the sequence, at least those that were taken.
        """
        params, num_tokens = self._sampler.params, self.num_tokens
        return CompletionOutput(
            text="".join(self._pieces),
            token_ids=tuple(new_ids[:num_tokens]),
            finish_reason=self.finish_reason or "cancelled",
            logprobs=tuple(self._logprobs[:num_tokens]) if params.logprobs else None,
            top_logprobs=tuple(self._top_logprobs[:num_tokens]) if params.n_top_logprobs else None,
            seed=None if params.is_greedy else self._sampler.seed,
            stop=self._stop,
            finish_note=self._limit.note if self.finish_reason == "length" else None,
        )
