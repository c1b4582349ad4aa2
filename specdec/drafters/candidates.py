"""Rank candidates by the draft's logits: tokens that the target may choose, and how likely.

The target takes argmax(log p / T + g), with Gumbel noise g that is fixed by (seed, position)
(specdec/sampling/gumbel.py). A draft that ranks its candidates with the *same* noise predicts that
choice better than by its probabilities alone (Gumbel coupling: Daliri, Musco, Suresh 2024,
"Coupling without communication and drafter-invariant speculative decoding", section 3). Greedy
decoding is the same with T = 0:

    probability(token) = softmax((logits + T · g) / s)

where s models the error of the draft's logits relative to the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.grammar.state import GrammarState
from specdec.sampling.gumbel import gumbel_noise
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler

SHARPNESS = 0.5
"""Constant s above. The target takes the likeliest token (noise included), so the probability that
it chooses a candidate is sharper than the draft's own."""
MAX_NOISE_POSITIONS = 32
"""Positions whose noise is cached, [n_tokens] each: a tree needs it again at every level."""
_NOISE_POSITIONS_OF_MORE = 8
"""Cached positions for each further sequence of a pass: they share its tokens, so their trees have
fewer levels. Noise that was dropped is drawn again, and is the same."""
_HEAD_TOKENS = 512
"""Number of likeliest tokens that a filter examines; a larger nucleus is not filtered."""
_STRIPE = 64
"""Tokens per stripe in the search for the likeliest: one maximum is taken over each."""
_MIN_SAVING = 4
"""Minimum ratio of all tokens to those of the chosen stripes: these are copied."""

Row = NDArray[np.float32]  # [n_tokens]
_Tokens = NDArray[np.int64] | slice
"""Tokens of the columns of scores."""
Candidates = list[tuple[int, float]]
"""Pairs (token, log of the probability that the target chooses it), likeliest first."""


class NoiseRows:
    """LRU cache of noise rows, one per position, shared by all sequences that are drafted for.

    Args:
        limit: maximum rows, for which the memory plan reserves memory.
    """

    def __init__(self, limit: int = MAX_NOISE_POSITIONS) -> None:
        self._limit = limit
        self._rows: dict[tuple[float, ...], Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, key: tuple[float, ...], make: Callable[[], Row]) -> Row:
        row = self._rows.pop(key, None)
        if row is None:
            row = make()
        self._rows[key] = row  # to the end: the least recently used comes first
        if len(self._rows) > self._limit:
            del self._rows[next(iter(self._rows))]
        return row


def noise_positions(num_seqs: int) -> int:
    """Return the rows of noise that are cached for `num_seqs` sequences."""
    return MAX_NOISE_POSITIONS + _NOISE_POSITIONS_OF_MORE * (num_seqs - 1)


class TargetNoise:
    """Noise T · g that the target adds to its logits at a position, float32 [n_tokens].

    rows: cache that is shared with other sequences; a private one when None.
    """

    def __init__(
        self, seed: int, temperature: float, n_tokens: int, rows: NoiseRows | None = None
    ) -> None:
        self._seed, self._temperature, self._n_tokens = seed, temperature, n_tokens
        self._rows = NoiseRows() if rows is None else rows

    def at(self, position: int) -> Row:
        key = (self._seed, self._temperature, self._n_tokens, position)
        return self._rows.of(key, lambda: self._draw(position))

    def _draw(self, position: int) -> Row:
        noise = gumbel_noise(self._seed, position, self._n_tokens)
        return np.asarray(self._temperature * noise, dtype=np.float32)


class CandidateRanker:
    """Ranks the tokens that may follow a node.

    Args:
        n_tokens: size of the target's vocabulary; ids beyond it are no candidates.
        sharpness: s of the formula above; 1 without noise gives the draft's own probabilities.
        noise: the target's noise, where it samples.
        params: parameters whose top-k, top-p and min-p rule candidates out.
        grammar: the sequence's grammar, in a state of the ranker's own.
    """

    def __init__(
        self,
        n_tokens: int,
        *,
        sharpness: float = 1.0,
        noise: TargetNoise | None = None,
        params: SamplingParams | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        self.n_tokens = n_tokens
        self.grammar = grammar
        self._sharpness = sharpness
        self._noise = noise
        self._params = params if params is not None and _has_filters(params) else None

    @classmethod
    def for_target(
        cls, sampler: Sampler, n_tokens: int, rows: NoiseRows | None = None
    ) -> CandidateRanker:
        """Return the ranker for a target that chooses with `sampler`; rows: see TargetNoise."""
        grammar = None if sampler.grammar is None else sampler.grammar.fork()
        if sampler.is_greedy:
            return cls(n_tokens, sharpness=SHARPNESS, grammar=grammar)
        params = sampler.params
        noise = TargetNoise(sampler.seed, params.temperature, n_tokens, rows)
        return cls(n_tokens, sharpness=SHARPNESS, noise=noise, params=params, grammar=grammar)

    def rank(
        self,
        logits: NDArray[np.float32],
        positions: Sequence[int],
        width: int,
        prefixes: Sequence[Sequence[int]] = (),
    ) -> list[Candidates]:
        """Return at most `width` candidates for each row of logits [n, vocab].

        positions [n]: the candidates' positions in the sequence.
        prefixes [n]: all tokens before them, where there is a grammar.
        """
        scores = logits[:, : self.n_tokens].astype(np.float32)  # a copy, changed in place
        return self._ranked(scores, positions, width, prefixes, slice(None))

    def rank_among(
        self,
        token_ids: NDArray[np.int64],
        logits: NDArray[np.float32],
        position: int,
        width: int,
        prefix: Sequence[int] = (),
    ) -> Candidates:
        """Return at most `width` candidates of the tokens [k] with these logits [k]; see `rank`."""
        is_known = token_ids < self.n_tokens
        known = token_ids[is_known]
        if not len(known):
            return []
        scores = logits[is_known].astype(np.float32)[None]
        (ranked,) = self._ranked(scores, [position], width, [prefix], known)
        return [(int(known[i]), log_prob) for i, log_prob in ranked]

    def _mask(
        self, scores: NDArray[np.float32], prefixes: Sequence[Sequence[int]], tokens: _Tokens
    ) -> None:
        """Set the scores of tokens that the grammar rules out to -inf."""
        if self.grammar is not None:
            for row, prefix in zip(scores, prefixes, strict=True):
                row[~self.grammar.allowed(prefix, self.n_tokens)[tokens]] = -np.inf

    def _ranked(
        self,
        scores: NDArray[np.float32],
        positions: Sequence[int],
        width: int,
        prefixes: Sequence[Sequence[int]],
        tokens: _Tokens,
    ) -> list[Candidates]:
        """Return candidates by column; tokens: the columns' tokens."""
        with np.errstate(divide="ignore", invalid="ignore"):  # rows may be all -inf
            self._mask(scores, prefixes, tokens)
            return self._best(scores, positions, width, tokens)

    def _best(
        self,
        scores: NDArray[np.float32],
        positions: Sequence[int],
        width: int,
        tokens: _Tokens,
    ) -> list[Candidates]:
        if self._noise is not None:
            self._perturb(scores, positions, tokens)
        scores /= np.float32(self._sharpness)
        width = min(width, scores.shape[1])
        top = likeliest(scores, width)
        values = np.take_along_axis(scores, top, axis=1)
        peaks = values.max(axis=1, keepdims=True)
        np.exp(np.subtract(scores, peaks, out=scores), out=scores)
        log_sums = np.log(scores.sum(axis=1, dtype=np.float64, keepdims=True))
        log_q = values.astype(np.float64) - peaks - log_sums
        order = np.argsort(-log_q, axis=1, kind="stable")
        token_ids = np.take_along_axis(top, order, axis=1).tolist()
        log_probs = np.take_along_axis(log_q, order, axis=1).tolist()
        return [
            [(token, log_prob) for token, log_prob in zip(*row, strict=True) if log_prob > -np.inf]
            for row in zip(token_ids, log_probs, strict=True)
        ]

    def _perturb(
        self, scores: NDArray[np.float32], positions: Sequence[int], tokens: _Tokens
    ) -> None:
        """Add the noise of each row's position; set tokens that filters rule out to -inf."""
        assert self._noise is not None
        for row, position in zip(scores, positions, strict=True):
            if self._params is not None:
                row[row < lowest_kept(row, self._params)] = -np.inf
            row += self._noise.at(position)[tokens]


def likeliest(scores: Row, width: int) -> NDArray[np.int64]:
    """Return the ids of the `width` largest scores per row [n, n_tokens], unordered: [n, width].

    The `width` largest tokens lie in the `width` stripes with the largest maxima. Taking maxima of
    whole arrays is several times faster than partitioning a large vocabulary.
    """
    num_rows, n_tokens = scores.shape
    n_stripes = n_tokens // _STRIPE
    if _MIN_SAVING * _STRIPE * width > n_tokens:
        return _largest(scores, width)
    n_striped = n_stripes * _STRIPE  # stripe i holds the tokens i, i + n_stripes, ...
    maxima = scores[:, :n_striped].reshape(num_rows, _STRIPE, n_stripes).max(axis=1)
    members = _largest(maxima, width)[:, :, None] + n_stripes * np.arange(_STRIPE)
    tail = np.broadcast_to(np.arange(n_striped, n_tokens), (num_rows, n_tokens - n_striped))
    token_ids = np.concatenate([members.reshape(num_rows, -1), tail], axis=1)
    best = _largest(np.take_along_axis(scores, token_ids, axis=1), width)
    return np.take_along_axis(token_ids, best, axis=1)


def _largest(scores: Row, width: int) -> NDArray[np.int64]:
    return np.argpartition(scores, -width, axis=1)[:, -width:]


def lowest_kept(row: Row, params: SamplingParams) -> float:
    """Return the logit below which top-k, top-p or min-p rules a token out; -inf without filters.

    All three keep the likeliest tokens, so together they are one threshold.
    """
    temperature, floor, n_head = params.temperature, -np.inf, min(_HEAD_TOKENS, len(row))
    peak = float(row.max())
    if params.min_p > 0.0:
        floor = peak + temperature * float(np.log(params.min_p))
    if params.top_k == 0 and params.top_p >= 1.0:
        return floor
    head = np.sort(np.partition(row, len(row) - n_head)[len(row) - n_head :])[::-1]
    nucleus = row
    if 0 < params.top_k <= n_head:
        nucleus = head = head[: params.top_k]
        floor = max(floor, float(head[-1]))
    if params.top_p < 1.0:
        mass = np.cumsum(np.exp((head - peak) / temperature, dtype=np.float64))
        total = np.exp((nucleus - peak) / temperature, dtype=np.float64).sum()
        n_below = int(np.searchsorted(mass, params.top_p * total))
        if n_below < len(head):
            floor = max(floor, float(head[n_below]))
    return floor


def _has_filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
