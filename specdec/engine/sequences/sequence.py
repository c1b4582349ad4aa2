"""One sequence of a request: its tokens, KV, sampler and output.

The last token is *pending*: emitted, but its KV is not computed yet. It is the root of the next
draft tree, so a step scores at least one token of each decoding sequence, and plain decoding is
the same with a drafter that proposes nothing. Prompts, and preempted sequences without a KV file,
are computed in prefill chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backends.contract.kv_files import KvFile
from backends.contract.sequence import SequenceInput, SequenceKV, SequenceOutput
from specdec.drafters.base import Drafter
from specdec.drafters.batched_drafting import DraftSteps
from specdec.engine.sequences.drafting import Drafting
from specdec.engine.sequences.output_buffer import OutputBuffer
from specdec.engine.sequences.outputs import CompletionOutput, PromptProgress, StreamChunk
from specdec.engine.sequences.request import Request, own_errors
from specdec.policy.draft_policy import DraftPolicy
from specdec.sampling.context_window import N_SINKS, ContextWindow
from specdec.sampling.logprobs import PromptLogprobs, PromptScorer
from specdec.sampling.sampler import Sampler
from specdec.sampling.token_limit import TokenLimit
from specdec.sampling.verifier import Verifier
from specdec.text.stream import TextStream
from specdec.traces.recorder import SequenceTrace
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import DraftTree

logger = logging.getLogger(__name__)


class VerifiedTree(NamedTuple):
    """The outcome of one step for one sequence."""

    tree: DraftTree
    acceptance: Acceptance
    token_ids: tuple[int, ...]


class Sequence:
    """One sequence of a request, from its prompt to its end.

    Args:
        sampler: has the sequence's own seed, its stop tokens and the logprobs requested.
        limit: maximum new tokens.
        text: detokenises and finds stop strings; None where no text is wanted.
        index: position among the request's sequences.
        window: part of the tokens that the target's cache contains.

    Attributes:
        token_ids: prompt and emitted tokens; the last one is pending once `is_decoding`.
        kv: KV cache of the target; None while the sequence waits.
        kv_file: the KV of a preempted sequence that was swapped out.
        drafting: its drafter and policy, once started; None in a beam search, which does not draft.
        arrival: number of the sequence in the order of arrival.
    """

    def __init__(
        self,
        request: Request,
        sampler: Sampler,
        limit: TokenLimit,
        text: TextStream | None = None,
        index: int = 0,
        window: ContextWindow = ContextWindow(),  # noqa: B008 (immutable)
    ) -> None:
        self.request, self.sampler, self.index = request, sampler, index
        self._limit, self._window = limit, window
        self._emitted = OutputBuffer(sampler, limit, text)
        self.token_ids = list(request.prompt_ids)
        self._num_prompt_tokens = len(self.token_ids)
        self.kv: SequenceKV | None = None
        self.kv_file: KvFile | None = None
        self.drafting: Drafting | None = None
        self.arrival = -1
        self._num_cached_tokens = 0
        self._scorer: PromptScorer | None = None
        k = sampler.params.prompt_logprobs
        if k is not None and not index:  # the sequences of a request share the prompt
            self._scorer = PromptScorer(request.prompt_ids, k, sampler.n_tokens)
        self.trace: SequenceTrace | None = None
        """Record of the target's distributions, where the run leaves traces."""

    def start(self, drafter: Drafter, policy: DraftPolicy, verifier: Verifier) -> None:
        """Set drafter, policy and verifier; in the engine's thread, before it is scheduled."""
        self.drafting = Drafting(self.request, drafter, policy, self.sampler.n_tokens)
        self.verifier = verifier

    # --- queries of the scheduler --------------------------------------------------------------

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key: the smallest is scheduled first and preempted last."""
        return (-self.request.priority, self.arrival)

    @property
    def can_start(self) -> bool:
        """Whether it may be scheduled: a caller's own drafter serves one sequence at a time."""
        return self.request.drafter is None or self.request.drafting_index >= self.index

    @property
    def is_finished(self) -> bool:
        return self.request.is_aborted or self._emitted.finish_reason is not None

    @property
    def active_kv(self) -> SequenceKV:
        """The KV cache of a sequence that takes part in forward passes."""
        assert self.kv is not None, "a sequence has KV while it takes part in forward passes"
        return self.kv

    @property
    def active_drafting(self) -> Drafting:
        """The drafting of a sequence whose steps have draft trees."""
        assert self.drafting is not None, "beams have steps of their own"
        return self.drafting

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) - self._num_prompt_tokens

    @property
    def num_hidden(self) -> int:
        """Tokens that the window of the target leaves out."""
        return self._window.n_hidden(len(self.token_ids))

    @property
    def num_context_tokens(self) -> int:
        """Tokens that the target sees, the pending one included."""
        return len(self.token_ids) - self.num_hidden

    @property
    def ids_to_compute(self) -> list[int]:
        """Tokens whose KV has to be computed before the next draft tree."""
        view = self._window.view(self.token_ids)
        return view[:-1] if self.num_new_tokens else view

    @property
    def num_uncomputed(self) -> int:
        """Tokens that prefill chunks still have to compute."""
        num_pending = 1 if self.num_new_tokens else 0  # no copy of the ids: called in every step
        return self.num_context_tokens - num_pending - self.active_kv.n_committed

    @property
    def cache_prompt(self) -> bool:
        """Whether KV of other sequences may be used: not for tokens whose logits are needed."""
        return self.request.cache_prompt and not self.scores_prompt

    @property
    def is_decoding(self) -> bool:
        return self.num_new_tokens > 0 and self.num_uncomputed == 0

    @property
    def min_step_tokens(self) -> int:
        """Tokens of a decode step without draft tokens."""
        return 1

    @property
    def has_live_nodes(self) -> bool:
        """Whether live nodes survive a step; memory is planned for one such sequence."""
        return False

    # --- contribution to a step ----------------------------------------------------------------

    def attach(self, kv: SequenceKV, *, is_swapped_in: bool = False) -> None:
        """Set the KV of a prefix of the tokens.

        is_swapped_in: it is the sequence's own KV, which had been swapped out.
        """
        self.kv = kv
        self.request.recorder.record_scheduled()
        if not self.num_new_tokens and not is_swapped_in:
            self._num_cached_tokens = kv.n_committed
        self.note_progress()

    def detach(self) -> None:
        """Drop the reference to the KV, which was freed or cached, and reset the drafter."""
        self.kv = None
        if self.drafting is not None:
            self.drafting.reset()

    @property
    def scores_prompt(self) -> bool:
        """Whether tokens of the prompt still have to be scored."""
        return self._scorer is not None and not self._scorer.is_complete

    def prefill_chunk(self, max_tokens: int, max_logits: int | None = None) -> SequenceInput:
        """Return the next tokens to compute, with logits only at the prompt's last token and where
        its tokens are scored.

        max_logits: maximum tokens with logits, at least 1.
        """
        start = self.active_kv.n_committed
        chunk = self.ids_to_compute[start : start + max_tokens]
        scored = [] if self._scorer is None else self._scorer.missing(start, start + len(chunk))
        is_last = not self.num_new_tokens and len(chunk) == self.num_uncomputed
        with_logits = [*scored, start + len(chunk) - 1] if is_last else scored
        if max_logits is not None and len(with_logits) > max_logits:
            chunk = chunk[: with_logits[max_logits] - start]
            scored, is_last = scored[:max_logits], False
        return SequenceInput(
            self.active_kv,
            chunk,
            logits_at=None if is_last else [],
            hidden_states_at=self._with_states(chunk),
            scored_at=[position - start for position in scored],
            score=partial(self._score, start) if scored else None,
        )

    def _score(self, start: int, place: int, row: NDArray[np.float32]) -> None:
        assert self._scorer is not None, "there is one where a chunk is scored"
        self._scorer.score(start + place, row)

    def _with_states(self, chunk: SequenceOf[int]) -> range:
        """Return the tokens of a prefill chunk whose hidden states the drafter takes."""
        num_states = 0 if self.drafting is None else self.drafting.max_hidden_states
        num_without = max(0, self.num_uncomputed - num_states)
        return range(min(len(chunk), num_without), len(chunk))

    def propose(self, num_seqs: int, max_nodes: int) -> DraftSteps[DraftTree]:
        """Return the draft tree of the next step.

        num_seqs: number of sequences that share the step and its `max_nodes` draft tokens.
        """
        return self.active_drafting.propose(
            self.token_ids,
            self.active_kv,
            num_context_tokens=self.num_context_tokens,
            max_tokens=self.num_of_step,
            max_nodes=max_nodes,
            num_seqs=num_seqs,
        )

    def min_input(self) -> SequenceInput:
        """Return the minimum input of the next step, to query the capacity it takes."""
        return SequenceInput(self.active_kv, [0] * max(1, self.num_uncomputed))

    def decode_chunk(self, tree: DraftTree) -> SequenceInput:
        """Return the tree's nodes as input of the target."""
        first = self.active_kv.next_node_id
        parents = [parent if parent < 0 else first + parent for parent in tree.parents]
        states_at = range(len(tree) if self.active_drafting.max_hidden_states else 0)
        return SequenceInput(self.active_kv, tree.token_ids, parents, hidden_states_at=states_at)

    # --- outcome of a step ---------------------------------------------------------------------

    def note_progress(self) -> None:
        """Tell the caller of the prompt's progress. Several sequences share it."""
        if self.num_new_tokens or self.index:
            return
        seconds = self.request.recorder.seconds_since_scheduled
        num_processed = min(self.active_kv.n_committed, self._num_prompt_tokens)
        self.request.note_progress(
            PromptProgress(self._num_prompt_tokens, self._num_cached_tokens, num_processed, seconds)
        )

    def end_prefill(self, scores: SequenceOutput) -> None:
        """Hand over the hidden states of a prefill chunk, and sample the first new token once the
        prompt is computed."""
        self.active_drafting.take_hidden_states(
            scores.hidden_states, self.active_kv, self.num_hidden
        )
        if self.num_new_tokens or not len(scores.logits):
            return
        with own_errors(self.request):
            row = scores.logits[0]
            token = self.sampler.choose(self.token_ids, row, position=len(self.token_ids))
            self._note_logits([row], [token])
            num_hidden = self.num_hidden
            self.token_ids.append(token)
            self.request.recorder.record_first_token(self._num_cached_tokens)
            self._emit((token,))
            self._shift(num_hidden)

    def accept(self, tree: DraftTree, scores: SequenceOutput) -> VerifiedTree | None:
        """Verify the tree and append the new tokens; return None if this request failed."""
        with own_errors(self.request):
            logits, num_hidden = scores.logits, self.num_hidden
            acceptance = self.verifier.verify(tree, logits, self.token_ids, self.num_of_step)
            self.active_kv.commit([scores.node_ids[i] for i in acceptance.path])
            self.active_drafting.observe(
                acceptance, tree, scores.hidden_states, self.active_kv, num_hidden
            )
            if self.request.error is not None:
                return None
            new_ids = acceptance.emitted(tree)
            self._note_logits([logits[i] for i in acceptance.path], new_ids)
            self.token_ids.extend(new_ids)
            num_taken = self._emit(new_ids)
            self._shift(num_hidden)
            self.request.recorder.record_step(tree, acceptance, n_emitted=num_taken)
            return VerifiedTree(tree, acceptance, new_ids)
        return None

    def _shift(self, num_hidden: int) -> None:
        """Cut the KV to the sinks where the window has jumped: its tokens are computed again.

        num_hidden: tokens that it left out before.
        """
        if self.num_hidden == num_hidden or self.is_finished:
            return
        drafting, num_seen = self.active_drafting, self.num_context_tokens
        if not num_hidden:
            logger.warning(
                f"the context of {drafting.policy.max_context} tokens is full: from here on the "
                f"target sees the first {N_SINKS} tokens and the last {num_seen - N_SINKS} to "
                f"{self._window.n_recent} (--context-shift)"
            )
        self.active_kv.rollback(self.active_kv.restorable(N_SINKS))
        drafting.reset()

    def recover(self) -> None:
        """Roll back a step that was interrupted."""
        if self.kv is not None:
            self.kv.rollback(min(self.kv.n_committed, len(self.ids_to_compute)))
        self.active_drafting.reset()

    def try_recover(self) -> None:
        """Call `recover`; an error fails no other request."""
        with own_errors(self.request):
            self.recover()

    def finish(self) -> None:
        """Complete the outputs and the trace, at the end of the request."""
        if self.trace is not None:
            num_new = self._emitted.num_tokens
            self.trace.end(self.token_ids[: self._num_prompt_tokens + num_new], num_new)

    # --- output --------------------------------------------------------------------------------

    @property
    def num_of_step(self) -> int:
        """Maximum tokens that one step may emit: the window jumps between two steps."""
        num_before_jump = self._window.n_before_jump(len(self.token_ids))
        return self.num_left if num_before_jump is None else min(self.num_left, num_before_jump)

    @property
    def num_left(self) -> int:
        """Number of tokens that may still be generated."""
        return self._limit.n_tokens - self.num_new_tokens

    def _emit(self, new_ids: SequenceOf[int]) -> int:
        """Emit new tokens and their text up to the sequence's end; return the number of tokens."""
        taken, text = self._emitted.take(new_ids)
        self.request.put(StreamChunk(text, tuple(taken), self.index))
        if self._emitted.finish_reason is not None:
            self.request.drafting_index = self.index + 1
            if final_text := self._emitted.flush():
                self.request.put(StreamChunk(final_text, (), self.index))
        return len(taken)

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Log-probabilities of the prompt's tokens, once they are computed, if requested."""
        return None if self._scorer is None else self._scorer.result

    def _note_logits(
        self, rows: SequenceOf[NDArray[np.float32]], token_ids: SequenceOf[int]
    ) -> None:
        if self.trace is not None:
            self.trace.add(rows)
        self._emitted.note_logits(rows, token_ids)

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The sequence so far; all results of a beam search."""
        return [self._emitted.completion(self.token_ids[self._num_prompt_tokens :])]
