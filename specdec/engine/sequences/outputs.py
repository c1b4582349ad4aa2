"""Results of a generation: chunks while it runs, outputs at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from specdec.metrics.stats import GenerationStats
from specdec.sampling.logprobs import PromptLogprobs, RankedLogprob, TopLogprobs
from specdec.sampling.params import SEED_LIMIT


def sequence_seed(seed: int, index: int) -> int:
    """Return the seed of the index-th of several sequences: (seed + index) mod 2^64, as in vLLM.

    So each sequence equals a generation of its own with that seed. Neighbouring seeds are
    different keys of the noise generator, whose streams are independent.
    """
    return (seed + index) % SEED_LIMIT


@dataclass(frozen=True)
class CompletionOutput:
    """One finished sequence."""

    text: str
    token_ids: tuple[int, ...]
    """All new tokens, including the one that ended the sequence."""
    finish_reason: str
    """"stop" (end-of-sequence or stop string), "length" or "cancelled"."""
    logprobs: tuple[float, ...] | None = None
    """log p of each token under the model itself, before any processor; None unless requested."""
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    """With `logprobs=k`: {token id: log p} of the k likeliest and the chosen token, likeliest
    first."""
    seed: int | None = None
    """Seed that reproduces this sequence in a generation of its own; None when greedy."""
    score: float | None = None
    """Beam search: sum of processed log-probabilities / length^length_penalty."""
    stop: str | None = None
    """Stop string that ended the sequence, if one did."""
    finish_note: str | None = None
    """Context length that cut the sequence off, and the remedy; None where it did not."""

    @property
    def note(self) -> dict[str, str]:
        """The note as a JSON entry, or no entry."""
        return {} if self.finish_note is None else {"finish_note": self.finish_note}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: lists for tuples; without what was not requested."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _plain(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class StreamChunk:
    """Text and tokens that one step added; for beam search, a whole sequence."""

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    """Index of the sequence it belongs to; chunks of several sequences interleave."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; logprobs only where they were requested."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _plain(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class PromptProgress:
    """Progress of a prompt, in tokens."""

    num_prompt_tokens: int
    num_cached: int
    """Found in the prefix cache."""
    num_processed: int
    """Computed so far, with the cached ones."""
    seconds: float
    """Since the prompt was first scheduled."""

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the rest takes if it goes on as so far; None before anything is computed."""
        num_computed = self.num_processed - self.num_cached
        if num_computed < 1:
            return None
        return self.seconds * (self.num_prompt_tokens - self.num_processed) / num_computed


@dataclass(frozen=True)
class GenerationResult:
    """A finished generation; `text` and the like are the first (or best) sequence's."""

    outputs: tuple[CompletionOutput, ...]
    """All sequences: in the order of their seeds; for beam search, best first."""
    stats: GenerationStats
    prompt_token_ids: Sequence[int] = ()
    prompt_logprobs: PromptLogprobs | None = None
    """With `prompt_logprobs=k`: {token id: (log p, rank)} of each of the prompt's tokens and the k
    likeliest in its place; None for the first one."""

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

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: the first sequence's text, all sequences, statistics."""
        prompt_logprobs = _plain(self.prompt_logprobs)
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "prompt_token_ids": list(self.prompt_token_ids),
            **({} if self.prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs}),
            "outputs": [output.to_dict() for output in self.outputs],
            "stats": self.stats.to_dict(),
        }


def _plain(value: Any) -> Any:
    if isinstance(value, RankedLogprob):
        return value._asdict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value
