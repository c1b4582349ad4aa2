"""How large a tree to draft, decided every round from measured times and learnt acceptance.

A streamed pass takes as long as its reads until the arithmetic of its rows overtakes them
(docs/how-it-works.md). Nodes below that knee cost nothing; above it each one delays the pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from specdec.config import SpecConfig
from specdec.drafters.base import TreeLimits
from specdec.policy.assumptions import best_depth, tokens_of_levels
from specdec.policy.costs import STUMBLE, PassCost, level_seconds
from specdec.policy.experience import Experience
from specdec.policy.modes import DraftChoice
from specdec.policy.tree_shape import TreeShape
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import DraftTree

MAX_AUTO_NODES = 128
"""Beyond this the next node of a tree is hardly ever accepted, and its logits take memory; plans
for a GPU, where a node costs next to nothing, may have room for more."""
_TYPICAL_DEPTH = 4
"""A round with room for fewer levels tells nothing of the draft: it is the end of a text."""


@dataclass
class _Round:
    """One round between `limits` and `observe`."""

    began: float
    uses_draft: bool
    is_first: bool = False  # of a generation: the draft's cache may lack the prompt
    is_catching_up: bool = False  # the draft's cache lacks what was emitted while it rested
    is_typical: bool = True  # not cut short by the tokens wanted
    follows_ahead: bool = False  # the pass before had drafting beside it
    is_ahead: bool = False  # so has this one
    drafted_at: float = 0.0
    draft_seconds: float = 0.0  # not hidden by the pass before, without catching up
    catch_up_seconds: float = 0.0
    candidates: DraftTree | None = None  # before it was cut
    n_rows: int = 1  # of its pass


class DraftPolicy:
    """Chooses the size of every tree, from measured times and learnt probabilities of acceptance.

    A round emits 1 + sum of P tokens, P being the probability that a node of its tree is accepted,
    and takes T(rows) + drafting seconds. With λ tokens per second, the speed so far, everything is
    worth its tokens and costs λ times its seconds: a node, a level of drafting, a round with the
    draft or without it, drafting ahead. What has the largest difference also has
    the most tokens per second in the long run (Dinkelbach 1967, on ratios).

    Called in this order every round: `limits`, `trim`, `should_draft_ahead`, `observe`. The time
    from `limits` to `trim` is drafting that nothing hid, the time from `trim` to `observe` is the
    pass and what follows it.

    Args:
        config: what the user fixed; the rest is chosen here.
        cost: of a pass of the target, as planned.
        max_context: tokens that a sequence may have.
        draft_cost: of running one level of a tree through the draft model, if there is one.
        max_nodes: most draft tokens that memory was set aside for.
        experience: of earlier generations; a fresh one when left out.
        temperature: of the sampling; acceptance is learnt apart for each.
        clock: seconds.
    """

    def __init__(
        self,
        config: SpecConfig,
        cost: PassCost,
        max_context: int,
        draft_cost: PassCost | None = None,
        max_nodes: int | None = None,
        *,
        experience: Experience | None = None,
        temperature: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = config
        self._max_context = max_context
        self._clock = clock
        self._is_chain = config.acceptance != "match"
        if config.num_draft_tokens is not None:
            self._n_nodes = n_likely = config.num_draft_tokens
        else:
            n_free = cost.free_rows() - 1
            self._n_nodes = min(n_free, MAX_AUTO_NODES) if max_nodes is None else max_nodes
            # What a tree is likely to have, before anything is measured: memory for more may be
            # there where a pass is not free of charge.
            n_likely = min(n_free, self._n_nodes)
        per_level = 0.0 if draft_cost is None else level_seconds(draft_cost, n_likely)
        self._depth = best_depth(config, config.depth, cost.seconds(1 + n_likely), per_level)
        self._has_model = draft_cost is not None and "draft" in config.drafters
        self._proposes_alone = not self._has_model or "ngram" in config.drafters
        self._experience = experience or Experience(cost, draft_cost, self._n_nodes)

        def first_choice() -> DraftChoice:
            """By what the plan expects of a round with the draft model and without."""
            tokens = tokens_of_levels(min(self._depth, n_likely))
            seconds = cost.seconds(1 + n_likely) + self._depth * per_level
            return DraftChoice((tokens, seconds) if self._has_model else None, cost.seconds(1))

        self._lessons = self._experience.lessons(
            (
                config.drafters,
                config.acceptance,
                config.accept_threshold,
                _temperature_class(temperature),
            ),
            first_choice,
        )
        self._shape = TreeShape(config, self._experience, self._lessons, self._has_model)
        self._round = _Round(0.0, False)
        self._n_rounds = 0
        self._note_plain()

    @property
    def n_nodes(self) -> int:
        """Draft tokens of a tree when nothing else bounds it: what memory is set aside for."""
        return self._n_nodes

    @property
    def depth(self) -> int:
        """Levels of a tree that the plan's costs make best."""
        return self._depth

    def limits(self, context_length: int, max_tokens: int, node_room: int) -> TreeLimits:
        """For a context of that many tokens, pending one included, and the tokens still wanted.

        node_room: nodes that the target can take now, the pending token's among them.

        The last token wanted is never drafted: the target emits it itself.
        """
        config = self._config
        room = min(self._max_context - context_length, max_tokens - 1)
        most = max(0, min(self._n_nodes, node_room - 1))
        is_fixed = config.num_draft_tokens is not None
        self._round = self._begin(is_fixed, is_typical=room >= _TYPICAL_DEPTH)
        depth = max(0, min(self._depth if is_fixed else config.depth, room))
        if is_fixed:
            ahead_depth = max(0, min(2 * self._depth + 1, room))
            return TreeLimits(most, depth, config.width, max_ahead_depth=ahead_depth)
        uses_draft = self._round.uses_draft
        if not uses_draft and not self._proposes_alone:
            return TreeLimits(0, depth, config.width)
        limits = self._shape.limits(most, depth, uses_draft)
        # The next tree begins at the latest one level below this one's last.
        return replace(limits, max_ahead_depth=max(0, min(2 * limits.max_depth + 1, room)))

    def trim(self, tree: DraftTree) -> DraftTree:
        """The part of the proposed tree that is worth verifying.

        Where the user fixed the number of nodes, or a rule verifies a chain drawn from q, all of
        it: a drawn token that is dropped because it looks unlikely was not drawn from q any more,
        and the emitted tokens would not have the target's distribution.
        """
        now, this = self._clock(), self._round
        this.drafted_at, this.candidates = now, tree
        self._note_drafting(tree, now - this.began)
        this.n_rows = len(tree)
        if self._config.num_draft_tokens is not None:
            return tree
        if self._is_chain:
            self._lessons.note_kept(tree.n_drafted)
            return tree
        kept = self._shape.best_part(tree, this.uses_draft, this.draft_seconds)
        this.n_rows = len(kept)
        return kept

    def should_draft_ahead(self) -> bool:
        """Whether to draft the next tree while this one is verified."""
        this = self._round
        if self._config.draft_ahead != "auto":
            this.is_ahead = self._config.draft_ahead == "on"
        elif this.uses_draft:
            this.is_ahead = self._experience.ahead.next_is_ahead(
                self._lessons.choice.rate, self._experience.passes.of(this.n_rows)
            )
        return this.is_ahead

    def observe(self, acceptance: Acceptance, tree: DraftTree) -> None:
        """The round is over: `tree`, as verified, and its outcome."""
        now, this, lessons = self._clock(), self._round, self._lessons
        emitted = acceptance.emitted(tree)
        if self._is_chain:
            lessons.chain.observe(tree.n_drafted, len(tree.follow(emitted)) - 1)
        elif this.candidates is not None:
            lessons.calibration.observe(this.candidates, emitted)
        seconds = this.draft_seconds + self._note_pass(len(tree), now - this.drafted_at)
        if this.is_typical and self._config.num_draft_tokens is None:
            self._note_plain()
            lessons.choice.record(this.uses_draft, len(emitted), seconds, this.catch_up_seconds)

    # --- a round's parts -----------------------------------------------------------------------

    def _begin(self, is_fixed: bool, is_typical: bool) -> _Round:
        choice, before = self._lessons.choice, self._round
        uses_draft = self._has_model if is_fixed else choice.is_draft_better
        if is_typical and not is_fixed:
            uses_draft = choice.next_uses_draft(self._shape.least_draft_seconds())
        self._n_rounds += 1
        return _Round(
            self._clock(),
            uses_draft,
            is_first=self._n_rounds == 1,
            is_catching_up=uses_draft and not before.uses_draft,
            is_typical=is_typical,
            follows_ahead=before.is_ahead,
        )

    def _note_plain(self) -> None:
        passes = self._experience.passes
        is_known = not self._proposes_alone and passes.is_known(1)
        self._lessons.choice.note_plain(passes.of(1), is_known)

    def _note_drafting(self, tree: DraftTree, seconds: float) -> None:
        this, drafts = self._round, self._experience.drafts
        this.draft_seconds = seconds
        if this.is_catching_up:  # that much is not what drafting usually takes
            this.draft_seconds = min(seconds, tree.n_runs * drafts.run_seconds)
            if not this.is_first:  # the prompt is not the draft's fault
                this.catch_up_seconds = seconds - this.draft_seconds
        elif this.uses_draft:
            self._experience.ahead.record_drafting(this.follows_ahead, seconds)
            drafts.observe(tree.n_runs, seconds)

    def _note_pass(self, n_rows: int, seconds: float) -> float:
        """The pass's seconds, less what held it up."""
        this, passes, ahead = self._round, self._experience.passes, self._experience.ahead
        usual = passes.of(n_rows)
        ahead.record_pass(this.is_ahead, min(seconds, STUMBLE * usual), usual)
        slowdown = ahead.slowdown if this.is_ahead else 1.0
        if not (this.is_ahead and ahead.is_on_trial):  # whose slowdown is not known yet
            passes.observe(n_rows, seconds / slowdown)
        return min(seconds, STUMBLE * slowdown * passes.of(n_rows))


def _temperature_class(temperature: float) -> float:
    """Acceptance differs between greedy, cool, usual and hot sampling; 0 is greedy."""
    return min(math.ceil(2.0 * temperature) / 2.0, 2.0)
