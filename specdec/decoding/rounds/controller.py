"""The loop over rounds: propose, verify, accept, commit, for all texts that share a pass.

Everything else serves the few lines of `step`. One text is a round of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from backends.contract.backend import Backend
from backends.contract.sequence import SequenceRows, SequenceScores
from specdec.decoding.rounds.draft_worker import DraftWorker
from specdec.decoding.rounds.recorder import StatsRecorder, Totals
from specdec.decoding.rounds.text_decoder import TextDecoder
from specdec.drafters.lockstep import in_lockstep
from specdec.policy.shared_round import observe_together, should_draft_ahead, trim_together
from specdec.verification.tree import ROOT, DraftTree

Entering = tuple[TextDecoder, SequenceRows]
"""A text, and the chunk of its prompt that is computed beside the others' round."""
_MANY = 2**20


class Controller:
    """Runs rounds with one target.

    Args:
        target: the model whose output is wanted.
        draft: the model that drafts, where one does: to be told to end.
        ahead: drafts while passes run, where the policy wants it; without it nothing does.
        max_draft_rows: of one pass of the draft.
        max_rows: of one pass of the target, prompts apart but for the last row of each, whose
            logits are wanted.
        totals: where passes are counted.
    """

    def __init__(
        self,
        target: Backend,
        draft: Backend | None = None,
        ahead: DraftWorker | None = None,
        *,
        max_draft_rows: int | None = None,
        max_rows: int = _MANY,
        totals: Totals | None = None,
    ) -> None:
        self.totals = totals or Totals()
        self._target, self._draft, self._ahead = target, draft, ahead
        self._max_draft_rows, self.max_rows = max_draft_rows, max_rows

    def step(
        self,
        texts: Sequence[TextDecoder],
        entering: Sequence[Entering] = (),
        most_rows: int | None = None,
    ) -> None:
        """One round: one pass of the target over the trees of all texts, and what enters beside
        them. Each text knows what became of it: its `news`, its `round` or its own `error`.

        most_rows: of the pass, in all; None: as many as are worth it.

        Raises an error of the models; nothing of the round counts then (`TextDecoder.recover`).
        """
        chunks = [rows for _, rows in entering]
        if texts:
            self._read(entering, len(texts))
        drafted = self._propose(texts, chunks, most_rows)
        batch = [*(text.tree_rows(tree) for text, tree in drafted), *chunks]
        if self._target.n_fitting(batch) < len(batch):  # the KV cache is about full
            drafted = [(text, tree.subset([ROOT])) for text, tree in drafted]
            batch = [*(text.tree_rows(tree) for text, tree in drafted), *chunks]
        n_again = sum(len(rows.token_ids) for text, rows in entering if text.is_begun)
        scores = self._verify(drafted, batch)
        self.totals.add(recomputed_tokens=n_again)
        for (text, tree), found in zip(drafted, scores, strict=False):
            text.settle(tree, found)
        for (text, _), found in zip(entering, scores[len(drafted) :], strict=True):
            text.take_first(found)
        self._learn([text for text, _ in drafted])

    def _read(self, entering: Sequence[Entering], n_texts: int) -> None:
        """The drafts of those that enter take the same chunks as the target."""
        steps = [text.reading(len(rows.token_ids), n_texts) for text, rows in entering]
        in_lockstep(steps, max_rows=self._max_draft_rows)

    def _propose(
        self,
        texts: Sequence[TextDecoder],
        chunks: Sequence[SequenceRows],
        most_rows: int | None,
    ) -> list[tuple[TextDecoder, DraftTree]]:
        """The part of each text's tree that is worth its rows; without texts that failed."""
        with ExitStack() as clocks:
            for recorder in _recorders(texts):
                clocks.enter_context(recorder.drafting())
            n_entering = sum(len(rows.token_ids) for rows in chunks)
            n_nodes = self.max_rows - len(texts) - sum(len(rows.wanted) for rows in chunks)
            if most_rows is not None:
                n_nodes = max(0, min(n_nodes, most_rows - n_entering - len(texts)))
            steps = [text.proposing(len(texts), n_nodes) for text in texts]
            found = zip(texts, in_lockstep(steps, max_rows=self._max_draft_rows), strict=True)
            drafted = [(text, tree) for text, tree in found if text.error is None and tree]
            if not drafted:
                return []
            going_on, trees = zip(*drafted, strict=True)
            policies = [text.policy for text in going_on]
            kept = trim_together(policies, trees, n_entering, n_nodes)
        return list(zip(going_on, kept, strict=True))

    def _verify(
        self, drafted: Sequence[tuple[TextDecoder, DraftTree]], batch: Sequence[SequenceRows]
    ) -> list[SequenceScores]:
        """One pass; where it pays, the drafters prepare the next trees beside it."""
        if not batch:
            return []
        ahead = self._ahead
        can_draft = [text.drafter.can_draft_ahead for text, _ in drafted]
        if ahead is None:
            return self._pass(drafted, batch)
        if not any(can_draft) or not should_draft_ahead([text.policy for text, _ in drafted]):
            ahead.close()
            return self._pass(drafted, batch)

        def draft(should_stop: Callable[[], bool]) -> None:
            with ExitStack() as clocks:
                for recorder in _recorders([text for text, _ in drafted]):
                    clocks.enter_context(recorder.drafting_ahead())
                steps = [
                    text.drafter.drafting_ahead(tree)
                    for text, tree in drafted
                    if text.policy.round.is_ahead
                ]
                in_lockstep(steps, should_stop, self._max_draft_rows)

        return ahead.beside(
            lambda: self._pass(drafted, batch, is_drafting_ahead=True),
            self._target.request_cancel,
            draft,
            self._cancel_draft,
        )

    def request_cancel(self) -> None:
        """End a running pass soon with an error; any thread may call it."""
        self._target.request_cancel()
        self._cancel_draft()

    def _cancel_draft(self) -> None:
        if self._draft is not None:
            self._draft.request_cancel()

    def _pass(
        self,
        drafted: Sequence[tuple[TextDecoder, DraftTree]],
        batch: Sequence[SequenceRows],
        *,
        is_drafting_ahead: bool = False,
    ) -> list[SequenceScores]:
        n_rows = sum(len(rows.token_ids) for rows in batch)
        n_prompt = sum(len(rows.token_ids) for rows in batch if rows.parents is None)
        began, has_held = time.perf_counter(), self._target.held_bytes > 0
        with ExitStack() as clocks:
            for recorder in _recorders([text for text, _ in drafted]):
                clocks.enter_context(
                    recorder.verifying(
                        n_rows, is_drafting_ahead=is_drafting_ahead, has_held=has_held
                    )
                )
            found = self._target.run(batch)
        seconds = time.perf_counter() - began
        self.totals.add(passes=1, pass_rows=n_rows, prompt_rows=n_prompt, pass_seconds=seconds)
        return found

    @staticmethod
    def _learn(texts: Sequence[TextDecoder]) -> None:
        """What the policy makes of the round."""
        done = [(text.policy, text.round) for text in texts if text.round is not None]
        if done:
            policies, rounds = zip(*done, strict=True)
            acceptances = [one.acceptance for one in rounds]
            observe_together(policies, acceptances, [one.tree for one in rounds])


def _recorders(texts: Sequence[TextDecoder]) -> list[StatsRecorder]:
    """Each once: the sequences of one prompt have one together."""
    return list({id(text.recorder): text.recorder for text in texts}.values())
