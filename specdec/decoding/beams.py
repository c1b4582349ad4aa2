"""Beam search on a backend: the beams are live nodes of one tree, and one pass scores them all.

    committed   prompt and what all running beams have in common
    live        one branch for each beam, from where they part

After every step the branches that no running beam continues are dropped, and the beginning that all
share is committed. So the KV cache holds one row for each token of the tree, not one cache for each
beam, and nothing is computed twice. A beam's last token is pending: its KV comes with the next
pass. Beams do not draft: a pass scores num_beams rows already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from backends.contract.backend import PREFIX
from backends.contract.sequence import Text
from specdec.checks import ConfigError, FieldName
from specdec.config import SpecConfig
from specdec.decoding.beam_search import BeamRules, BeamSearch, by_score
from specdec.sampling.gumbel import gumbel_at
from specdec.sampling.logprobs import TopLogprobs, logprobs_of_token
from specdec.sampling.sampler import Sampler
from specdec.text.stream import TextStream


class BeamMemoryFull(ConfigError):
    """The beams have nothing in common for longer than memory was set aside for."""

    def __init__(self, num_beams: int, n_wanted: int, n_room: int) -> None:
        super().__init__(
            f"{num_beams} beams need {n_wanted} live tokens since the last one that they have in "
            f"common, and there is room for {n_room}: load with a longer ",
            FieldName("beam_span"),
            " or ",
            FieldName("ctx_size"),
            ", or ask for fewer beams or tokens",
        )


@dataclass(frozen=True)
class Hypothesis:
    """A sequence of new tokens."""

    token_ids: tuple[int, ...] = ()
    above: int = PREFIX
    """The node that the last token, which is pending, follows."""
    has_ended: bool = False
    text: TextStream | None = None
    """Looks for stop strings, if there are any."""
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()


class BeamDecoder:
    """Runs one beam search.

    Args:
        target: the search's KV in the model; its committed prefix is replaced by the prompt.
        sampler: processors, stop tokens and the options of the search.
        prompt_ids: at least one token.
        max_new_tokens: of a sequence.
        text: looks for stop strings in the text after the prompt; None where there are none.
    """

    def __init__(
        self,
        target: Text,
        sampler: Sampler,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        text: TextStream | None = None,
    ) -> None:
        params = sampler.params
        self._target, self._sampler, self._prompt = target, sampler, list(prompt_ids)
        self._limit = max_new_tokens
        self.n_reused: int | None = None  # tokens of the prompt whose KV was there
        self._parents: dict[int, int] = {}  # live node -> its parent
        self._nodes: dict[tuple[int, int], int] = {}  # of the last pass: (parent, token) -> node
        self._rows: dict[int, NDArray[np.float32]] = {}  # of the last pass, until the beams advance
        rules = BeamRules(
            params.num_beams,
            params.length_penalty,
            params.early_stopping,
            len(sampler.stop_tokens),
            max_new_tokens,
        )
        self.search: BeamSearch[Hypothesis] = BeamSearch(
            rules,
            Hypothesis(text=text),
            self._grow,
            lambda one: one.has_ended,
            by_score if params.is_greedy else self._drawn,
        )

    def start(self, most: int | None = None) -> bool:
        """Run the prompt, or so many tokens more of it; at its end choose the beams' first tokens.

        Returns whether it has come to its end.
        """
        lacking = self._target.cut_to(self._prompt)
        if self.n_reused is None:
            self.n_reused = len(self._prompt) - len(lacking)
        row = self._target.prefill(lacking[:most])
        if len(self._target.committed_ids) < len(self._prompt):
            return False
        self._rows = {PREFIX: row}
        self._advance([PREFIX] * len(self.search.running))
        return True

    @property
    def is_over(self) -> bool:
        return self.search.is_over

    @property
    def pending(self) -> list[tuple[int, int]]:
        """(node above, token) of what the next pass computes; beams of equal tokens share it."""
        return list(dict.fromkeys(map(_pending, self.search.running)))

    def step(self) -> None:
        """One pass: score the pending tokens of all running beams, and lengthen these by one.

        Raises BeamMemoryFull where the tree gets too large.
        """
        beams, unique = [_pending(beam) for beam in self.search.running], self.pending
        n_live = len(self._parents)
        n_wanted, n_room = n_live + len(unique), n_live + self._target.node_room
        if n_wanted > n_room:
            raise BeamMemoryFull(len(beams), n_wanted, n_room)
        parents, tokens = [parent for parent, _ in unique], [token for _, token in unique]
        node_ids, logits = self._target.extend(tokens, parents)
        self._parents.update(zip(node_ids, parents, strict=True))
        self._nodes = dict(zip(unique, node_ids, strict=True))
        self._rows = dict(zip(node_ids, logits, strict=True))
        self._advance([self._nodes[pair] for pair in beams])
        self._tidy()

    def results(self, n: int) -> list[tuple[Hypothesis, float]]:
        """The best n sequences with their scores; the best unfinished one if none has ended."""
        return self.search.best(n) or [self.search.best_running()]

    # --- parts -----------------------------------------------------------------------------

    def _advance(self, nodes: list[int]) -> None:
        """Choose continuations; nodes [num_beams]: where each running beam's row is."""
        self.search.advance(self._processed(nodes))
        self._rows = {}

    def _processed(self, nodes: list[int]) -> Iterator[NDArray[np.float32]]:
        """The beams' log-probabilities, one row at a time; beams that share a node share it."""
        before, row = None, np.empty(0, np.float32)
        for node, beam in zip(nodes, list(self.search.running), strict=True):
            if node != before:
                context = [*self._prompt, *beam.token_ids]
                before, row = node, self._sampler.beam_log_probs(context, self._rows[node])
            yield row

    def _grow(self, beam: Hypothesis, token: int) -> Hypothesis:
        node = self._nodes[beam.above, beam.token_ids[-1]] if beam.token_ids else PREFIX
        token_ids = (*beam.token_ids, token)
        has_ended = token in self._sampler.stop_tokens or len(token_ids) >= self._limit
        text = beam.text
        if text is not None and token not in self._sampler.stop_tokens:
            text = text.fork()
            has_ended = text.push([token]).stop is not None or has_ended
        grown = replace(beam, token_ids=token_ids, above=node, has_ended=has_ended, text=text)
        return self._with_logprobs(grown, node)

    def _with_logprobs(self, grown: Hypothesis, node: int) -> Hypothesis:
        params, token = self._sampler.params, grown.token_ids[-1]
        if not params.logprobs:
            return grown
        real = self._rows[node][: self._sampler.n_tokens]
        logprob, top = logprobs_of_token(real, token, params.n_top_logprobs)
        return replace(
            grown,
            logprobs=(*grown.logprobs, logprob),
            top_logprobs=(*grown.top_logprobs, top),
        )

    def _drawn(self, scores: NDArray[np.float32], which: NDArray[np.int64]) -> NDArray[np.float64]:
        """Keys for draws without replacement from softmax(scores), the largest drawn first.

        The k largest of score + Gumbel noise are k such draws (Vieira 2014; Kool et al. 2019). The
        noise is that of (seed, position), entry beam * vocab + token of it. Continuations of
        probability 0 come last: only where there are not k others.
        """
        position = len(self._prompt) + len(self.search.running[0].token_ids)
        return scores + gumbel_at(self._sampler.seed, position, which)

    # --- nodes -----------------------------------------------------------------------------

    def _tidy(self) -> None:
        """Drop branches that no running beam continues; commit what all of them share."""
        paths = [self._path(beam.above) for beam in self.search.running]
        alive = {node for path in paths for node in path}
        dead = [n for n, parent in self._parents.items() if n not in alive]
        roots = [n for n in dead if self._parents[n] == PREFIX or self._parents[n] in alive]
        if roots:
            self._target.prune(roots)
        shared = [
            level[0]
            for level in takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False))
        ]
        if shared:
            below = {path[len(shared)] for path in paths if len(path) > len(shared)}
            self._target.commit(shared, keep=sorted(below))
        gone, end = set(shared), shared[-1] if shared else None
        self._parents = {
            node: PREFIX if parent == end else parent
            for node, parent in self._parents.items()
            if node in alive and node not in gone
        }
        if end is not None:
            self.search.running = [
                replace(beam, above=PREFIX) if beam.above == end else beam
                for beam in self.search.running
            ]

    def _path(self, node: int) -> list[int]:
        path = []
        while node != PREFIX:
            path.append(node)
            node = self._parents[node]
        return path[::-1]


def _pending(beam: Hypothesis) -> tuple[int, int]:
    return beam.above, beam.token_ids[-1]


def check_beams(num_beams: int, spec: SpecConfig, max_beams: int) -> None:
    """Raise ConfigError where a loaded target cannot run so many beams."""
    if spec.acceptance != "match" or not spec.is_lossless:
        rule = f"acceptance {spec.acceptance!r}"
        if spec.accept_threshold is not None:
            rule = f"accept_threshold {spec.accept_threshold}"
        raise ConfigError(
            FieldName("num_beams"),
            f" is {num_beams}, but {rule} is a rule for draft tokens, and beams do not draft: "
            "load without it, or give speculative=False",
        )
    if num_beams > max_beams:
        raise ConfigError(
            FieldName("num_beams"),
            f" is {num_beams}, but the target was loaded for passes of {max_beams} "
            f"tokens: load it with num_beams={num_beams} (--num-beams)",
        )
