"""The sequences that one prompt is continued with, and how each becomes text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.decoding.rounds.stats import GenerationStats
from specdec.sampling.logprobs import TopLogprobs
from specdec.sampling.params import SEED_LIMIT
from specdec.sampling.sampler import Sampler
from specdec.text.contract import TokenDecoder
from specdec.text.stream import TextStream


def sequence_seed(seed: int, index: int) -> int:
    """Seed of the index-th of several sequences: (seed + index) mod 2^64, as in vLLM.

    So each sequence is what a generation of its own with that seed gives. Neighbouring seeds are
    different keys of the noise generator, whose streams are independent.
    """
    return (seed + index) % SEED_LIMIT


@dataclass(frozen=True)
class CompletionOutput:
    """One finished sequence."""

    text: str
    token_ids: tuple[int, ...]
    """All new tokens, the one that ended the text included."""
    finish_reason: str
    """"stop" (end-of-sequence or stop string), "length" or "cancelled"."""
    logprobs: tuple[float, ...] | None = None
    """log p of each token under the model itself, before any processor; None unless asked for."""
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    """With `logprobs=k`: {token id: log p} of the k likeliest and the chosen token, likeliest
    first."""
    seed: int | None = None
    """Which a generation of its own gives this sequence with; None when greedy."""
    score: float | None = None
    """Of beam search: sum of processed log-probabilities / length^length_penalty."""
    finish_note: str | None = None
    """The figure of the context that cut the text off, and what to do; empty where none did."""

    @property
    def note(self) -> dict[str, str]:
        """The note as a JSON entry; no entry where there is none."""
        return {} if self.finish_note is None else {"finish_note": self.finish_note}


@dataclass(frozen=True)
class StreamChunk:
    """What one round added; of beam search, a whole sequence."""

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    """Which of several sequences it belongs to; they come in turns."""


@dataclass(frozen=True)
class GenerationResult:
    """A finished generation. The text and so on are those of the first (or best) sequence."""

    outputs: tuple[CompletionOutput, ...]
    """All sequences: in the order of their seeds, those of beam search best first."""
    stats: GenerationStats
    prompt_token_ids: Sequence[int] = ()

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> tuple[float, ...] | None:
        return self.outputs[0].logprobs

    @property
    def top_logprobs(self) -> tuple[TopLogprobs, ...] | None:
        return self.outputs[0].top_logprobs

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason


class GeneratedSequence:
    """One sequence in the making: tokens in, text out, up to its end.

    Args:
        sampler: its seed, its stop tokens (which have no text) and what the caller wants to know.
        limit: tokens at most.
        limit_note: of the output where it ends there.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        prompt_ids: Sequence[int],
        sampler: Sampler,
        limit: int,
        limit_note: str | None = None,
    ) -> None:
        self.sampler, self._limit_note = sampler, limit_note
        self._stream = TextStream(tokenizer, prompt_ids=prompt_ids, stop=sampler.params.stop)
        self._limit = limit
        self._pieces: list[str] = []
        self.token_ids: list[int] = []
        self.finish_reason = "cancelled"
        self.logprobs: Sequence[float] = ()
        self.top_logprobs: Sequence[TopLogprobs] = ()
        self.score: float | None = None

    @property
    def is_open(self) -> bool:
        return self.finish_reason == "cancelled"

    @property
    def n_left(self) -> int:
        """Tokens that may follow."""
        return self._limit - len(self.token_ids)

    def take(self, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Count a round's tokens up to the end of the sequence; the text and tokens it adds."""
        stop_tokens = self.sampler.stop_tokens
        update = self._stream.push(t for t in tokens if t not in stop_tokens)
        if update.stop is not None:
            tokens = tokens[: update.n_tokens]
            self.finish_reason = "stop"
        elif tokens[-1] in stop_tokens:
            self.finish_reason = "stop"
        elif len(tokens) >= self.n_left:
            self.finish_reason = "length"
        self.token_ids += tokens
        self._pieces.append(update.text)
        return update.text, tuple(tokens)

    def flush(self) -> str:
        """The text that was kept back, at the end of the sequence."""
        self._pieces.append(self._stream.flush().text)
        return self._pieces[-1]

    @property
    def output(self) -> CompletionOutput:
        """What there is so far."""
        params, n_tokens = self.sampler.params, len(self.token_ids)
        return CompletionOutput(
            text="".join(self._pieces),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            logprobs=tuple(self.logprobs[:n_tokens]) if params.logprobs else None,
            top_logprobs=tuple(self.top_logprobs[:n_tokens]) if params.n_top_logprobs else None,
            seed=None if params.is_greedy else self.sampler.seed,
            score=self.score,
            finish_note=self._limit_note if self.finish_reason == "length" else None,
        )
