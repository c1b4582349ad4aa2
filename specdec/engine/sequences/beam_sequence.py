"""A beam search, as one sequence whose draft tree is made of its beams.

    committed   prompt and what all running beams have in common
    live        one branch for each beam, from where they part

After every step the branches that no running beam continues are dropped, and the prefix that all
share is committed. So the KV cache holds one entry for each token of the tree, not one cache for
each beam, nothing is computed twice, and the scheduler sees a sequence like any other. A beam's
last token is pending: its KV comes with the next pass. Beams do not draft: a pass scores num_beams
tokens already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from backends.contract.backend import PREFIX
from backends.contract.sequence import SequenceInput, SequenceOutput
from specdec.checks import ConfigError, FieldName
from specdec.config import SpecConfig
from specdec.drafters.batched_drafting import DraftSteps
from specdec.engine.sequences.output_buffer import OutputBuffer
from specdec.engine.sequences.outputs import CompletionOutput, StreamChunk
from specdec.engine.sequences.request import Request, own_errors
from specdec.engine.sequences.sequence import Sequence, VerifiedTree
from specdec.metrics.recorder import StatsRecorder
from specdec.sampling.beam_search import BeamRules, BeamSearch, by_score
from specdec.sampling.gumbel import gumbel_at
from specdec.sampling.logprobs import TopLogprobs, logprobs_of_token
from specdec.sampling.sampler import Sampler
from specdec.sampling.token_limit import TokenLimit
from specdec.text.stream import TextStream
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import DraftTree

_ONE_TOKEN = (DraftTree(0), Acceptance((0,), 0, is_bonus=False))
"""Outcome of a step for the statistics: all beams grow by one token."""


class BeamMemoryFull(ConfigError):
    """The beams' live tokens exceed the memory reserved for them."""

    def __init__(self, num_beams: int, num_wanted: int, num_nodes: int) -> None:
        super().__init__(
            f"{num_beams} beams need {num_wanted} live tokens since the last one that they have "
            f"in common, and there is memory for {num_nodes}: load with a longer ",
            FieldName("beam_span"),
            " or ",
            FieldName("ctx_size"),
            ", or ask for fewer beams or tokens",
        )


@dataclass(frozen=True)
class Hypothesis:
    """New tokens of one beam.

    above: parent node of the last token, which is pending.
    text: finds stop strings; None where there are none.
    """

    token_ids: tuple[int, ...] = ()
    above: int = PREFIX
    has_ended: bool = False
    text: TextStream | None = None
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()

    @property
    def pending(self) -> tuple[int, int]:
        """(Parent node, token) that the next pass computes; beams of equal tokens share it."""
        return self.above, self.token_ids[-1]


class BeamSequence(Sequence):
    """One beam search: to the scheduler a sequence, to the caller `params.n` outputs.

    Args:
        sampler: processors, stop tokens and the parameters of the search.
        limit: maximum new tokens of each output.
        new_text: makes a stream that detokenises the tokens after the prompt.
    """

    def __init__(
        self,
        request: Request,
        sampler: Sampler,
        limit: TokenLimit,
        new_text: Callable[[], TextStream | None],
    ) -> None:
        super().__init__(request, sampler, limit)
        self._new_text = new_text
        self._outputs: list[CompletionOutput] = []
        self._restart()

    def _restart(self) -> None:
        """Begin the search at the prompt; discard a search that was cut short."""
        params, limit = self.sampler.params, self._limit.n_tokens
        self._has_started = False
        self._parents: dict[int, int] = {}  # live node -> its parent
        self._nodes: dict[tuple[int, int], int] = {}  # last pass: (parent, token) -> node
        self._rows: dict[int, NDArray[np.float32]] = {}  # last pass's logits, until beams advance
        rules = BeamRules(
            params.num_beams,
            params.length_penalty,
            params.early_stopping,
            len(self.sampler.stop_tokens),
            limit,
        )
        self._search: BeamSearch[Hypothesis] = BeamSearch(
            rules,
            Hypothesis(text=self._new_text() if params.stop else None),
            self._grow,
            lambda beam: beam.has_ended,
            by_score if params.is_greedy else self._drawn,
        )

    # --- queries of the scheduler and the engine -----------------------------------------------

    @property
    def is_decoding(self) -> bool:
        return self._has_started

    @property
    def num_uncomputed(self) -> int:
        return 0 if self._has_started else super().num_uncomputed

    @property
    def min_step_tokens(self) -> int:
        return len(self._pending)

    @property
    def has_live_nodes(self) -> bool:
        return True

    def detach(self) -> None:
        self.kv = None
        if not self.is_finished:
            self._begin_anew()

    def recover(self) -> None:
        if self.kv is not None:
            self.kv.rollback(min(self.kv.n_committed, len(self.token_ids) - 1))
        self._begin_anew()

    def _begin_anew(self) -> None:
        if self._has_started:
            self.request.recorder = StatsRecorder(len(self.token_ids))
        self._restart()

    def propose(self, num_seqs: int, max_nodes: int) -> DraftSteps[DraftTree]:
        """Return a placeholder tree: the nodes of the step are the beams'."""
        num_live, num_pending = len(self._parents), len(self._pending)
        if num_pending > (num_free := self.active_kv.num_free_slots):
            num_beams = self.sampler.params.num_beams
            self.request.fail(
                BeamMemoryFull(num_beams, num_live + num_pending, num_live + num_free)
            )
        return _ONE_TOKEN[0]
        yield  # makes this a generator

    def min_input(self) -> SequenceInput:
        return self.decode_chunk(_ONE_TOKEN[0]) if self._has_started else super().min_input()

    def decode_chunk(self, tree: DraftTree) -> SequenceInput:
        parents, token_ids = zip(*self._pending, strict=True)
        return SequenceInput(self.active_kv, token_ids, parents)

    @property
    def _pending(self) -> list[tuple[int, int]]:
        return list(dict.fromkeys(beam.pending for beam in self._search.running))

    # --- outcome of a step ---------------------------------------------------------------------

    def end_prefill(self, scores: SequenceOutput) -> None:
        """Choose the beams' first tokens once the prompt is computed."""
        if not len(scores.logits):
            return
        with own_errors(self.request):
            self._rows = {PREFIX: scores.logits[0]}
            self.request.recorder.record_first_token(self._num_cached_tokens)
            self._advance([PREFIX] * len(self._search.running))
            self._has_started = True

    def accept(self, tree: DraftTree, scores: SequenceOutput) -> VerifiedTree | None:
        """Extend the running beams by one token."""
        with own_errors(self.request):
            unique, beams = self._pending, [beam.pending for beam in self._search.running]
            self._nodes = dict(zip(unique, scores.node_ids, strict=True))
            self._parents.update((node, parent) for (parent, _), node in self._nodes.items())
            self._rows = dict(zip(scores.node_ids, scores.logits, strict=True))
            self._advance([self._nodes[pair] for pair in beams])
            self._prune()
            self.request.recorder.record_step(*_ONE_TOKEN)
        return None

    def finish(self) -> None:
        """Output the best finished hypotheses, or the best unfinished one if none has ended."""
        if self._has_started:
            self._outputs = [
                self._output(result, score) for result, score in self.results(self.sampler.params.n)
            ]
            for index, output in enumerate(self._outputs):
                self.request.put(StreamChunk(output.text, output.token_ids, index))

    def results(self, n: int) -> list[tuple[Hypothesis, float]]:
        """Return the best n hypotheses with their scores, best first."""
        return self._search.best(n) or [self._search.best_running()]

    @property
    def outputs(self) -> list[CompletionOutput]:
        return self._outputs or super().outputs

    def _output(self, result: Hypothesis, score: float) -> CompletionOutput:
        buffer = OutputBuffer(self.sampler, self._limit, self._new_text())
        buffer.fill(result.token_ids, result.logprobs, result.top_logprobs)
        return replace(buffer.completion(result.token_ids), score=score)

    # --- the search ----------------------------------------------------------------------------

    def _advance(self, nodes: list[int]) -> None:
        """Choose continuations; nodes [num_beams]: the node of each running beam's logits."""
        self._search.advance(self._processed(nodes))
        self._rows = {}
        if self._search.is_over:
            self._emitted.finish_reason = "stop"

    def _processed(self, nodes: list[int]) -> Iterator[NDArray[np.float32]]:
        """Yield the beams' log-probabilities; beams that share a node share the row."""
        before, row = None, np.empty(0, np.float32)
        for node, beam in zip(nodes, list(self._search.running), strict=True):
            if node != before:
                context = [*self.token_ids, *beam.token_ids]
                before, row = node, self.sampler.beam_log_probs(context, self._rows[node])
            yield row

    def _grow(self, beam: Hypothesis, token: int) -> Hypothesis:
        node = self._nodes[beam.pending] if beam.token_ids else PREFIX
        stop_ids, token_ids = self.sampler.stop_tokens, (*beam.token_ids, token)
        has_ended = token in stop_ids or len(token_ids) >= self._limit.n_tokens
        text = beam.text
        if text is not None and token not in stop_ids:
            text = text.fork()
            has_ended = text.push([token]).stop is not None or has_ended
        grown = replace(beam, token_ids=token_ids, above=node, has_ended=has_ended, text=text)
        return self._with_logprobs(grown, node)

    def _with_logprobs(self, grown: Hypothesis, node: int) -> Hypothesis:
        params, token = self.sampler.params, grown.token_ids[-1]
        if not params.logprobs:
            return grown
        logits = self._rows[node][: self.sampler.n_tokens]
        logprob, top = logprobs_of_token(logits, token, params.n_top_logprobs)
        return replace(
            grown,
            logprobs=(*grown.logprobs, logprob),
            top_logprobs=(*grown.top_logprobs, top),
        )

    def _drawn(self, scores: NDArray[np.float32], which: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return keys for draws without replacement from softmax(scores), the largest drawn first.

        The k largest of score + Gumbel noise are k such draws (Vieira 2014; Kool et al. 2019). The
        noise is keyed by (seed, position), with one value per beam * vocab + token. Continuations
        of probability 0 are drawn only where there are fewer than k others.
        """
        position = len(self.token_ids) + len(self._search.running[0].token_ids)
        return scores + gumbel_at(self.sampler.seed, position, which)

    # --- nodes ---------------------------------------------------------------------------------

    def _prune(self) -> None:
        """Drop branches that no running beam continues; commit the prefix that all share."""
        running = self._search.running
        paths = [self._path(beam.above) for beam in running]
        alive = {node for path in paths for node in path}
        dead = [n for n, parent in self._parents.items() if n not in alive]
        roots = [n for n in dead if self._parents[n] == PREFIX or self._parents[n] in alive]
        if roots:
            self.active_kv.prune(roots)
        shared = _common_prefix(paths)
        if shared:
            below = {path[len(shared)] for path in paths if len(path) > len(shared)}
            self.active_kv.commit(shared, keep=sorted(below))
        committed, end = set(shared), shared[-1] if shared else None
        self._parents = {
            node: PREFIX if parent == end else parent
            for node, parent in self._parents.items()
            if node in alive and node not in committed
        }
        if end is not None:
            self._search.running = [
                replace(beam, above=PREFIX) if beam.above == end else beam for beam in running
            ]

    def _path(self, node: int) -> list[int]:
        path = []
        while node != PREFIX:
            path.append(node)
            node = self._parents[node]
        return path[::-1]


def _common_prefix(paths: SequenceOf[list[int]]) -> list[int]:
    levels = takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False))
    return [level[0] for level in levels]


def check_beams(num_beams: int, spec: SpecConfig, max_beams: int) -> None:
    """Raise ConfigError if the loaded target cannot run `num_beams` beams."""
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
