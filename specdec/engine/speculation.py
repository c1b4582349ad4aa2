"""Drafting and verification of one step, for all sequences that share it."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack

from backends.contract.backend import Backend
from backends.contract.sequence import SequenceInput, SequenceOutput
from specdec.drafters.batched_drafting import run_batched
from specdec.engine.draft_worker import DraftWorker
from specdec.engine.scheduler import Batch
from specdec.engine.sequence import Sequence, VerifiedTree
from specdec.metrics.recorder import StatsRecorder, Totals
from specdec.policy.shared_step import observe_together, should_draft_ahead, trim_together
from specdec.verification.tree import ROOT, DraftTree

Trees = list[tuple[Sequence, DraftTree]]
_MANY = 2**20


class Speculation:
    """Drafts with one model and verifies with another.

    Args:
        target: the model whose output is wanted.
        draft: the model that drafts, where one does: to be told to end.
        worker: drafts while passes run, where the policy wants it; None: nothing does.
        max_draft_tokens: of one pass of the draft.
        max_nodes: whose logits one pass of the target gives.
        totals: where passes are counted.
    """

    def __init__(
        self,
        target: Backend,
        draft: Backend | None = None,
        worker: DraftWorker | None = None,
        *,
        max_draft_tokens: int | None = None,
        max_nodes: int = _MANY,
        totals: Totals | None = None,
    ) -> None:
        self.totals = totals or Totals()
        self._target, self._draft, self._worker = target, draft, worker
        self._max_draft_tokens, self._max_nodes = max_draft_tokens, max_nodes

    def draft_prefill(self, batch: Batch) -> None:
        """Let the drafts of sequences in prefill compute the same chunks as the target."""
        num_seqs = len(_drafting(batch.decode))
        if num_seqs:
            steps = [
                chunk.sequence.draft_prefill(chunk.num_tokens, num_seqs) for chunk in batch.prefill
            ]
            run_batched(steps, max_num_tokens=self._max_draft_tokens)

    def propose(self, batch: Batch) -> Trees:
        """Return the part of each sequence's draft tree that is worth its tokens.

        A sequence whose drafter failed is left out.
        """
        if not batch.decode:
            return []
        with ExitStack() as clocks:
            for recorder in _recorders(_drafting(batch.decode)):
                clocks.enter_context(recorder.drafting())
            num_seqs, max_nodes = len(_drafting(batch.decode)), self._max_draft_nodes(batch)
            steps = [sequence.propose(num_seqs, max_nodes) for sequence in batch.decode]
            proposed = run_batched(steps, max_num_tokens=self._max_draft_tokens)
            trees = [
                (sequence, tree)
                for sequence, tree in zip(batch.decode, proposed, strict=True)
                if sequence.request.error is None and tree is not None
            ]
            trees = _trim(trees, batch.num_prefill_tokens, max_nodes)
        inputs = _inputs(trees, batch)
        if self._target.n_fitting(inputs) < len(inputs):  # the KV cache is about full
            return [(sequence, tree.subset([ROOT])) for sequence, tree in trees]
        return trees

    def _max_draft_nodes(self, batch: Batch) -> int:
        """Return the draft tokens that the step has capacity for."""
        num_tokens = sum(sequence.min_step_tokens for sequence in batch.decode)
        requested = sum(len(chunk.input.logit_positions) for chunk in batch.prefill)
        num_nodes = min(self._max_nodes - requested, self._target.num_free_nodes) - num_tokens
        if batch.max_num_tokens is not None:
            num_nodes = min(num_nodes, batch.max_num_tokens - batch.num_prefill_tokens - num_tokens)
        return max(0, num_nodes)

    def verify(self, trees: Trees, batch: Batch) -> list[SequenceOutput]:
        """Run the forward pass; where it pays, the drafters prepare the next trees beside it.

        Returns the scores of the trees, and then of the prefill chunks.
        """
        inputs = _inputs(trees, batch)
        if not inputs:
            return []
        num_again = sum(item.num_tokens for item in batch.prefill if item.sequence.num_new_tokens)
        scores = self._verify(trees, inputs)
        self.totals.add(recomputed_tokens=num_again)
        return scores

    def _verify(self, trees: Trees, inputs: SequenceOf[SequenceInput]) -> list[SequenceOutput]:
        drafting, worker = _drafting([sequence for sequence, _ in trees]), self._worker
        if worker is None:
            return self._forward(trees, inputs)
        can_draft = any(sequence.drafter.can_draft_ahead for sequence in drafting)
        if not can_draft or not should_draft_ahead([item.policy for item in drafting]):
            worker.close()
            return self._forward(trees, inputs)

        def draft(should_stop: Callable[[], bool]) -> None:
            with ExitStack() as clocks:
                for recorder in _recorders(drafting):
                    clocks.enter_context(recorder.drafting_ahead())
                steps = [
                    sequence.drafter.drafting_ahead(tree)
                    for sequence, tree in trees
                    if sequence.drafts and sequence.policy.step.is_ahead
                ]
                run_batched(steps, should_stop, self._max_draft_tokens)

        return worker.beside(
            lambda: self._forward(trees, inputs, is_drafting_ahead=True),
            self._target.request_cancel,
            draft,
            self._cancel_draft,
        )

    def _forward(
        self, trees: Trees, inputs: SequenceOf[SequenceInput], *, is_drafting_ahead: bool = False
    ) -> list[SequenceOutput]:
        num_tokens = sum(len(item.token_ids) for item in inputs)
        num_prompt = sum(len(item.token_ids) for item in inputs[len(trees) :])
        began, has_pinned = time.perf_counter(), self._target.pinned_bytes > 0
        with ExitStack() as clocks:
            for recorder in _recorders([sequence for sequence, _ in trees]):
                clocks.enter_context(
                    recorder.verifying(
                        num_tokens, is_drafting_ahead=is_drafting_ahead, has_pinned=has_pinned
                    )
                )
            scores = self._target.forward(inputs)
        seconds = time.perf_counter() - began
        self.totals.add(
            passes=1, batch_tokens=num_tokens, prefill_tokens=num_prompt, pass_seconds=seconds
        )
        return scores

    @staticmethod
    def observe(verified: SequenceOf[tuple[Sequence, VerifiedTree | None]]) -> None:
        """Let the policies learn from the step."""
        done = [
            (item.policy, result) for item, result in verified if item.drafts and result is not None
        ]
        if done:
            policies, result = zip(*done, strict=True)
            acceptances = [item.acceptance for item in result]
            observe_together(policies, acceptances, [item.tree for item in result])

    def request_cancel(self) -> None:
        """End a running pass soon with an error; any thread may call it."""
        self._target.request_cancel()
        self._cancel_draft()

    def _cancel_draft(self) -> None:
        if self._draft is not None:
            self._draft.request_cancel()


def _trim(trees: Trees, num_other_tokens: int, max_nodes: int) -> Trees:
    """Cut the trees of sequences that draft to what is worth its part of the pass."""
    drafting = [(sequence, tree) for sequence, tree in trees if sequence.drafts]
    if not drafting:
        return trees
    num_other_tokens += sum(item.min_step_tokens for item, _ in trees if not item.drafts)
    policies = [sequence.policy for sequence, _ in drafting]
    cached = iter(
        trim_together(policies, [tree for _, tree in drafting], num_other_tokens, max_nodes)
    )
    return [(item, next(cached) if item.drafts else tree) for item, tree in trees]


def _inputs(trees: Trees, batch: Batch) -> list[SequenceInput]:
    chunks = [sequence.decode_chunk(tree) for sequence, tree in trees]
    return [*chunks, *(chunk.input for chunk in batch.prefill)]


def _drafting(sequences: SequenceOf[Sequence]) -> list[Sequence]:
    return [sequence for sequence in sequences if sequence.drafts]


def _recorders(sequences: SequenceOf[Sequence]) -> list[StatsRecorder]:
    """Return each once: the sequences of one request share one."""
    recorders = [sequence.request.recorder for sequence in sequences]
    return list({id(recorder): recorder for recorder in recorders}.values())
