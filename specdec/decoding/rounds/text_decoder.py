"""One text while it is decoded: what it has, what it adds to the next pass, and what becomes of it.

The context ends with one *pending* token: emitted, its KV not yet computed. It is the root of the
next tree, so a round always scores at least one token, and plain decoding is the same with a
drafter that proposes nothing. Before that, and when a text comes back that was set aside, the
context enters in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backends.contract.sequence import SequenceRows, SequenceScores, TokenSequence
from offload.errors import SpecdecError
from specdec.config import SpecConfig
from specdec.decoding.rounds.recorder import StatsRecorder
from specdec.drafters.base import Drafter
from specdec.drafters.lockstep import Steps
from specdec.policy.draft_policy import DraftPolicy
from specdec.sampling.logprobs import TopLogprobs, logprobs_of_token
from specdec.sampling.sampler import Sampler
from specdec.verification.acceptance import Acceptance, lenient, match_walk, rejection_walk
from specdec.verification.block import block_walk
from specdec.verification.tree import ROOT, DraftTree

ChainRule = Callable[..., Acceptance]
_CHAIN_RULES: dict[str, ChainRule] = {"rejection": rejection_walk, "block": block_walk}


class Round(NamedTuple):
    """What one round did for one text."""

    tree: DraftTree
    acceptance: Acceptance
    tokens: tuple[int, ...]


class BadProposal(SpecdecError):
    """A drafter proposed what cannot be verified."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the drafter proposed {what}: see specdec.drafters.base.Drafter.propose")


class TextDecoder:
    """One text, its drafter and its rule of acceptance.

    Args:
        drafter: guesses; it never sees the target's logits.
        sampler: the target's choice of a token from a row of logits.
        policy: how large a tree to ask for.
        spec: the rule of acceptance.
        recorder: collects the statistics.
        rng: decides for the rules of chains; the match rule needs none.

    Attributes:
        context: prompt and emitted tokens; the last one is pending once `is_decoding`.
        text: its KV in the target; None while it has none.
        max_tokens: that are still wanted.
        news: the tokens that the last step brought; round: how, where that was a tree.
        error: its own, which ended it.
        logprobs, top_logprobs: of every emitted token, before any processor, as far as the
            sampler's parameters ask for them.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        drafter: Drafter,
        sampler: Sampler,
        policy: DraftPolicy,
        spec: SpecConfig,
        *,
        recorder: StatsRecorder,
        rng: np.random.Generator | None = None,
    ) -> None:
        self.drafter, self.policy, self.recorder = drafter, policy, recorder
        self._sampler = sampler
        self._rule = (
            self._match
            if spec.acceptance == "match"
            else partial(self._decide, _CHAIN_RULES[spec.acceptance])
        )
        self._accept_threshold = spec.accept_threshold
        self._rng = rng
        self.context = list(prompt_ids)
        self._n_prompt = len(self.context)
        self.text: TokenSequence | None = None
        self.max_tokens = 1
        self.news: tuple[int, ...] = ()
        self.round: Round | None = None
        self.error: Exception | None = None
        self.n_reused = 0  # tokens of the prompt whose KV was there
        self.logprobs: list[float] = []
        self.top_logprobs: list[TopLogprobs] = []

    # --- what it adds to a pass ----------------------------------------------------------------

    @property
    def sequence(self) -> TokenSequence:
        assert self.text is not None, "a text has KV while it takes part in passes"
        return self.text

    @property
    def is_begun(self) -> bool:
        """Whether its first token is there."""
        return len(self.context) > self._n_prompt

    @property
    def wanted_ids(self) -> list[int]:
        """The tokens whose KV it needs for the next round."""
        return self.context[:-1] if self.is_begun else self.context

    @property
    def n_entering(self) -> int:
        """Of these the ones that are still to be computed; 0: it is decoding."""
        return len(self.wanted_ids) - self.sequence.n_committed

    @property
    def is_decoding(self) -> bool:
        return self.is_begun and self.n_entering == 0

    def begin(self, text: TokenSequence, *, is_restored: bool = False) -> None:
        """Take up the KV of a beginning of the context.

        is_restored: it is the text's own, from before it was set aside.
        """
        self.text = text
        self.recorder.record_admitted()
        if not self.is_begun and not is_restored:
            self.n_reused = text.n_committed

    def entering_rows(self, most: int) -> SequenceRows:
        """The next `most` tokens of the prompt; the last one's logits are wanted."""
        start = self.sequence.n_committed
        chunk = self.wanted_ids[start : start + most]
        is_last = not self.is_begun and len(chunk) == self.n_entering
        return SequenceRows(self.sequence, chunk, rows=None if is_last else [])

    def reading(self, most: int, n_texts: int) -> Steps[None]:
        """The draft's part of a chunk that enters, beside so many texts that decode."""
        try:
            if self.policy.uses_draft(n_texts):
                yield from self.drafter.reading(self.context, most)
        except Exception as error:
            self.error = error

    def proposing(self, n_texts: int, max_nodes: int) -> Steps[DraftTree]:
        """The tree of the next round, as far as drafters know.

        n_texts: that share the round, with at most so many draft tokens.
        """
        self.news, self.round = (), None
        most = max_nodes // n_texts if self.policy.is_whole else max_nodes
        room = min(self.sequence.node_room, 1 + most)
        try:
            limits = self.policy.limits(len(self.context), self.max_tokens, room, n_texts)
            tree = yield from self.drafter.proposing(self.context, limits)
            self._check(tree, room)
            return tree
        except Exception as error:
            self.error = error
            return DraftTree(self.context[-1])

    def _check(self, tree: DraftTree, room: int) -> None:
        """What no pass can run would end the texts of others: a drafter may be a caller's own."""
        if not isinstance(tree, DraftTree):
            raise BadProposal(f"{tree!r}, which is no DraftTree")
        if tree.token_ids[ROOT] != self.context[-1]:
            raise BadProposal(
                f"a tree with the root {tree.token_ids[ROOT]}, but the context ends with "
                f"{self.context[-1]}"
            )
        deepest = self.policy.max_context - len(self.context)
        if len(tree) > room or max(tree.depths) > deepest:
            raise BadProposal(
                f"{tree.n_drafted} tokens in {max(tree.depths)} levels, and there is room for "
                f"{room - 1} in {deepest}"
            )
        n_tokens = self._sampler.n_tokens
        if min(tree.token_ids) < 0 or max(tree.token_ids) >= n_tokens:
            raise BadProposal(f"tokens that are not among the {n_tokens} of the vocabulary")

    def tree_rows(self, tree: DraftTree) -> SequenceRows:
        return SequenceRows(self.sequence, tree.token_ids, self._target_parents(tree))

    def _target_parents(self, tree: DraftTree) -> list[int]:
        """The tree's parents as ids that the target will give its nodes; the root's is PREFIX."""
        first = self.sequence.next_node_id
        return [parent if parent < 0 else first + parent for parent in tree.parents]

    # --- what became of it ---------------------------------------------------------------------

    def take_first(self, scores: SequenceScores) -> None:
        """Where the prompt has come to its end: its first token, pending from now on."""
        self.news, self.round = (), None
        if self.is_begun or not len(scores.logits):
            return
        try:
            row = scores.logits[0]
            token = self._sampler.choose(self.context, row, position=len(self.context))
            self._note_logprobs([row], [token])
            self.context.append(token)
            self.recorder.record_first_token(self.n_reused)
            self.news = (token,)
        except Exception as error:
            self.error = error

    def settle(self, tree: DraftTree, scores: SequenceScores) -> None:
        """Accept what the target agrees with: between 1 and `max_tokens` new tokens."""
        try:
            self.round = self._settled(tree, scores.node_ids, scores.logits)
            self.news = self.round.tokens
        except Exception as error:
            self.error = error

    def _settled(self, tree: DraftTree, node_ids: list[int], logits: NDArray[np.float32]) -> Round:
        acceptance = self._rule(tree, logits, self.max_tokens)
        self.sequence.commit([node_ids[i] for i in acceptance.path])
        with self.recorder.drafting():
            self.drafter.observe(acceptance, tree)
        self.recorder.record_outcome(was_ahead=self.drafter.is_ready)
        tokens = acceptance.emitted(tree)
        self._note_logprobs((logits[i] for i in acceptance.path), tokens)
        self.context.extend(tokens)
        return Round(tree, acceptance, tokens)

    def recover(self) -> None:
        """After a round that broke off: nothing of it counts."""
        if self.text is not None:
            self.text.rollback(min(self.text.n_committed, len(self.wanted_ids)))
        self.drafter.reset()

    def _match(self, tree: DraftTree, logits: NDArray[np.float32], max_tokens: int) -> Acceptance:
        choose = self._sampler.chooser(lambda node: self._prefix(tree, node), logits.__getitem__)
        if self._accept_threshold is not None:

            def target_probs(node: int) -> NDArray[np.float64]:
                row = logits[node]
                return np.exp(self._sampler.log_probs(self._prefix(tree, node), row))

            choose = lenient(tree, choose, target_probs, self._accept_threshold)
        return match_walk(tree, choose, max_tokens, self._sampler.stop_tokens)

    def _decide(
        self, walk: ChainRule, tree: DraftTree, logits: NDArray[np.float32], max_tokens: int
    ) -> Acceptance:
        assert self._rng is not None, "the rules of chains decide at random"

        def target_probs(node: int) -> NDArray[np.float64]:
            return self._sampler.probs(self._prefix(tree, node), logits[node])

        return walk(tree, target_probs, self._rng, max_tokens, self._sampler.stop_tokens)

    def _prefix(self, tree: DraftTree, node: int) -> list[int]:
        """All tokens up to and including `node`: what the target's row `node` continues."""
        return [*self.context, *tree.tokens_on_path(node)]

    def _note_logprobs(self, rows: Iterable[NDArray[np.float32]], tokens: Sequence[int]) -> None:
        params = self._sampler.params
        if not params.logprobs:
            return  # rows may lie on a device: none is brought for nothing
        for row, token in zip(rows, tokens, strict=True):
            real = row[: self._sampler.n_tokens]
            logprob, top = logprobs_of_token(real, token, params.n_top_logprobs)
            self.logprobs.append(logprob)
            self.top_logprobs.append(top)
