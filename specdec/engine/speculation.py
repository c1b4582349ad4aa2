"""Drafting and verification of one step, for all sequences that share it."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from typing import NamedTuple

from backends.contract.backend import SCORED_ROWS, Backend
from backends.contract.sequence import SequenceInput, SequenceOutput
from specdec.drafters.batched_drafting import run_batched
from specdec.engine.draft_worker import DraftWorker
from specdec.engine.scheduler import Batch
from specdec.engine.sequences.drafting import Drafting
from specdec.engine.sequences.sequence import Sequence, VerifiedTree
from specdec.metrics.recorder import StatsRecorder, Totals
from specdec.policy.shared_step import observe_together, should_draft_ahead, trim_together
from specdec.verification.tree import ROOT, DraftTree

Trees = list[tuple[Sequence, DraftTree]]


class StepOutputs(NamedTuple):
    """Outputs of one forward pass, in the order of its inputs.

    stall_seconds: time for which the pass waited for weights.
    """

    trees: list[SequenceOutput]
    prefill: list[SequenceOutput]
    stall_seconds: float = 0.0


class Speculation:
    """Drafting with one model and verification with another.

    Args:
        target: the target model.
        draft: the draft model, if any; used only to cancel its passes.
        worker: drafts in parallel to passes where the policy wants it.
        max_draft_tokens: maximum tokens of one pass of the draft; None: any number.
        max_nodes: maximum nodes that one pass of the target scores.
        totals: counters of passes.
    """

    def __init__(
        self,
        target: Backend,
        draft: Backend | None,
        worker: DraftWorker,
        *,
        max_draft_tokens: int | None,
        max_nodes: int,
        totals: Totals,
    ) -> None:
        self.totals = totals
        self._target, self._draft, self._worker = target, draft, worker
        self._max_draft_tokens, self._max_nodes = max_draft_tokens, max_nodes

    def draft_prefill(self, batch: Batch) -> None:
        """Compute the draft's KV of the batch's prefill chunks."""
        num_seqs = len(_drafting(batch.decode))
        if num_seqs:
            steps = [
                drafting.prefill(chunk.sequence.token_ids, chunk.num_tokens, num_seqs)
                for chunk in batch.prefill
                if (drafting := chunk.sequence.drafting) is not None
            ]
            run_batched(steps, max_num_tokens=self._max_draft_tokens)

    def propose(self, batch: Batch) -> Trees:
        """Return each sequence's draft tree, trimmed to the nodes that pay.

        A sequence whose drafter failed is left out.
        """
        if not batch.decode:
            return []
        drafting = _drafting(batch.decode)
        with ExitStack() as clocks:
            for recorder in _recorders(drafting):
                clocks.enter_context(recorder.drafting())
            max_nodes = self._max_draft_nodes(batch)
            steps = [sequence.propose(len(drafting), max_nodes) for sequence in batch.decode]
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
        """Return the maximum draft tokens of the step."""
        num_tokens = sum(sequence.min_step_tokens for sequence in batch.decode)
        num_logits = sum(chunk.num_logits for chunk in batch.prefill)
        if self._target.max_scored_tokens is None:
            num_returned = sum(len(chunk.input.logit_positions) for chunk in batch.prefill)
            num_logits = min(num_logits, num_returned + SCORED_ROWS)
        num_nodes = min(self._max_nodes - num_logits, self._target.num_free_nodes) - num_tokens
        if batch.max_num_tokens is not None:
            num_nodes = min(num_nodes, batch.max_num_tokens - batch.num_prefill_tokens - num_tokens)
        return max(0, num_nodes)

    def forward(self, trees: Trees, batch: Batch) -> StepOutputs:
        """Run the target's forward pass, with parallel drafting where it pays."""
        inputs = _inputs(trees, batch)
        if not inputs:
            return StepOutputs([], [])
        resumed = [chunk for chunk in batch.prefill if chunk.sequence.num_new_tokens]
        num_recomputed = sum(chunk.num_tokens for chunk in resumed)
        waited_before = self._target.transfer_stats.wait_seconds
        outputs = self._draft_and_forward(trees, inputs)
        stall_seconds = self._target.transfer_stats.wait_seconds - waited_before
        self.totals.add(recomputed_tokens=num_recomputed)
        return StepOutputs(outputs[: len(trees)], outputs[len(trees) :], stall_seconds)

    def _draft_and_forward(
        self, trees: Trees, inputs: SequenceOf[SequenceInput]
    ) -> list[SequenceOutput]:
        drafting, worker = _drafting([sequence for sequence, _ in trees]), self._worker
        can_draft = any(item.can_draft_ahead for item in drafting)
        if not can_draft or not should_draft_ahead([item.policy for item in drafting]):
            worker.close()
            return self._forward_target(trees, inputs)

        def draft(should_stop: Callable[[], bool]) -> None:
            with ExitStack() as clocks:
                for recorder in _recorders(drafting):
                    clocks.enter_context(recorder.drafting_ahead())
                steps = [
                    item.draft_ahead(tree)
                    for sequence, tree in trees
                    if (item := sequence.drafting) is not None and item.policy.step.is_ahead
                ]
                run_batched(steps, should_stop, self._max_draft_tokens)

        return worker.draft_during(
            lambda: self._forward_target(trees, inputs, is_drafting_ahead=True),
            self._target.request_cancel,
            draft,
            self._cancel_draft,
        )

    def _forward_target(
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
            outputs = self._target.forward(inputs)
        seconds = time.perf_counter() - began
        self.totals.add(
            passes=1, batch_tokens=num_tokens, prefill_tokens=num_prompt, pass_seconds=seconds
        )
        return outputs

    @staticmethod
    def observe(
        verified: SequenceOf[tuple[Sequence, VerifiedTree | None]], stall_seconds: float = 0.0
    ) -> None:
        """Update the acceptance statistics and costs with the step's outcome."""
        outcomes = [
            (seq.drafting.policy, outcome)
            for seq, outcome in verified
            if seq.drafting is not None and outcome is not None
        ]
        if outcomes:
            policies, results = zip(*outcomes, strict=True)
            acceptances = [result.acceptance for result in results]
            trees = [result.tree for result in results]
            observe_together(policies, acceptances, trees, stall_seconds)

    def request_cancel(self) -> None:
        """Cancel a running pass, which ends soon with an error; any thread may call it."""
        self._target.request_cancel()
        self._cancel_draft()

    def _cancel_draft(self) -> None:
        if self._draft is not None:
            self._draft.request_cancel()


def _trim(trees: Trees, num_other_tokens: int, max_nodes: int) -> Trees:
    """Trim the trees of sequences that draft to the nodes that pay for their part of the pass."""
    drafting = [
        (item.policy, tree) for sequence, tree in trees if (item := sequence.drafting) is not None
    ]
    if not drafting:
        return trees
    num_other_tokens += sum(seq.min_step_tokens for seq, _ in trees if seq.drafting is None)
    policies, proposed = zip(*drafting, strict=True)
    trimmed = iter(trim_together(policies, proposed, num_other_tokens, max_nodes))
    return [(seq, tree if seq.drafting is None else next(trimmed)) for seq, tree in trees]


def _inputs(trees: Trees, batch: Batch) -> list[SequenceInput]:
    chunks = [sequence.decode_chunk(tree) for sequence, tree in trees]
    return [*chunks, *(chunk.input for chunk in batch.prefill)]


def _drafting(sequences: SequenceOf[Sequence]) -> list[Drafting]:
    return [sequence.drafting for sequence in sequences if sequence.drafting is not None]


def _recorders(parts: SequenceOf[Sequence | Drafting]) -> list[StatsRecorder]:
    """Return each recorder once: the sequences of one request share one."""
    recorders = [part.request.recorder for part in parts]
    return list({id(recorder): recorder for recorder in recorders}.values())
