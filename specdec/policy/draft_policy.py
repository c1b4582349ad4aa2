"""DraftPolicy: choose the tree size of every step from measured times and learnt acceptance.

A streamed pass takes as long as its reads until the arithmetic of its tokens takes longer
(docs/how-it-works.md). Nodes below that knee cost nothing; above it each one delays the pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specdec.config import SpecConfig
from specdec.drafters.base import TreeLimits
from specdec.policy.assumptions import best_depth, tokens_of_levels
from specdec.policy.calibration import note_chain
from specdec.policy.cost_model import run_seconds, runs_of_levels
from specdec.policy.modes import DraftChoice, Outcome
from specdec.policy.pair_statistics import PairStatistics
from specdec.policy.tree_shape import TreeShape
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import DRAFT_SOURCE, DraftTree

MAX_AUTO_NODES = 127
"""Maximum nodes of a tree by default: further nodes are hardly ever accepted, and their logits take
memory. Plans for a GPU, where a node costs next to nothing, may have more."""
_TYPICAL_DEPTH = 4
"""Minimum levels and nodes of a step that is evidence about the draft: a smaller one is at the end
of a sequence or shares its pass with a prefill chunk."""

_MAX_PLAIN_RATIO = 1.25
"""Maximum measured time of a pass without draft tokens, relative to one with them. (The smaller of
both would always be too small where times are noisy: 0.94 of the speed in bench/scenarios.)"""


@dataclass
class Step:
    """State of one step, from `limits` to `observe_together`."""

    began: float
    uses_draft: bool
    is_first: bool = False  # first step of a generation: the draft's cache may lack the prompt
    is_catching_up: bool = False  # the draft's cache lacks tokens emitted while it was not used
    is_typical: bool = True  # not limited by max_tokens or capacity
    is_ahead: bool = False  # drafts in parallel to its pass
    drafted_at: float = 0.0
    draft_seconds: float = 0.0  # drafting before the pass, without catching up
    catch_up_seconds: float = 0.0
    candidates: DraftTree | None = None  # the proposal before it was trimmed
    num_seqs: int = 1  # sequences that share its drafting and its pass
    num_tokens: int = 1  # tokens of its pass, of all sequences


class DraftPolicy:
    """Size of every tree, chosen from measured times and learnt probabilities of acceptance.

    A step emits 1 + sum of P tokens, P being the probability that a node of its tree is accepted,
    and takes T(num_tokens) + drafting seconds. With the throughput price λ, the tokens per second
    so far, a node, a level of drafting or a step with the draft gains its tokens and costs λ times
    its seconds. The largest difference also gives the most tokens per second in the long run
    (Dinkelbach 1967, on ratios).

    A step begins with `limits`, and goes on in specdec/policy/shared_step.py, with all sequences
    that share its pass.

    Args:
        config: options that the user fixed; the others are chosen here.
        pair_statistics: costs and acceptance so far, updated by every step.
        max_context: maximum tokens of a sequence.
        temperature: sampling temperature; acceptance is learnt apart for classes of it.
        clock: returns seconds.
    """

    def __init__(
        self,
        config: SpecConfig,
        pair_statistics: PairStatistics,
        max_context: int,
        *,
        temperature: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.max_context = max_context
        self.clock = clock
        self.is_chain = config.acceptance != "match"
        self.pair_statistics = pair_statistics
        cost, draft_cost = pair_statistics.cost, pair_statistics.draft_cost
        if config.num_draft_tokens is not None:
            n_nodes = n_likely = config.num_draft_tokens
        else:
            n_nodes = pair_statistics.n_nodes
            # Likely size of a tree before anything is measured: the free tokens of a pass, even
            # if there is memory for more.
            n_likely = min(cost.num_free_tokens - 1, n_nodes)
        self.n_nodes = n_nodes
        """Maximum draft tokens of a tree, for which memory is reserved."""
        per_run = 0.0 if draft_cost is None else run_seconds(draft_cost, n_likely, config.width)
        block_size = pair_statistics.block_size
        per_level = per_run if block_size is None else 0.0
        self.depth = best_depth(config, config.depth, cost.planned_seconds(1 + n_likely), per_level)
        """Levels of a tree that are best by the planned costs."""
        self._has_model = draft_cost is not None and "draft" in config.drafters
        self._proposes_alone = not self._has_model or "ngram" in config.drafters

        def first_choice(num_seqs: int) -> DraftChoice:
            """Return the planned choice, for a sequence's share of a step with and without the
            draft model: `num_seqs` sequences share the nodes that one would have."""
            n_nodes = max(1, (1 + n_likely) // num_seqs - 1)
            tokens = tokens_of_levels(min(self.depth, n_nodes))
            drafting = runs_of_levels(self.depth, block_size) * per_run
            seconds = cost.planned_seconds(num_seqs * (1 + n_nodes)) + drafting
            planned = (tokens, seconds / num_seqs) if self._has_model else None
            return DraftChoice(planned, cost.planned_seconds(num_seqs) / num_seqs)

        self.acceptance_statistics = self.pair_statistics.acceptance_statistics(
            (
                config.drafters,
                config.acceptance,
                config.accept_threshold,
                _temperature_class(temperature),
            ),
            first_choice,
        )
        self.shape = TreeShape(
            config, self.pair_statistics, self.acceptance_statistics, self._has_model
        )
        self.step = Step(0.0, False)
        self._n_steps = 0
        self._note_plain()

    def limits(
        self, context_length: int, max_tokens: int, num_free_slots: int, num_seqs: int = 1
    ) -> TreeLimits:
        """Begin a step, and return the limits of its tree.

        context_length: tokens of the context, the pending one included.
        max_tokens: tokens still wanted; the last one is never drafted, as the target emits it.
        num_free_slots: nodes that the target can score now, the pending token included.
        num_seqs: sequences that share the step, this one included.
        """
        config = self.config
        max_depth = min(self.max_context - context_length, max_tokens - 1)
        limit = max(0, min(self.n_nodes, num_free_slots - 1))
        is_fixed = config.num_draft_tokens is not None
        is_typical = max_depth >= _TYPICAL_DEPTH and limit >= min(_TYPICAL_DEPTH, self.n_nodes)
        self.step = self._begin(is_fixed, is_typical, num_seqs)
        depth = max(0, min(self.depth if is_fixed else config.depth, max_depth))
        if is_fixed:
            ahead_depth = max(0, min(2 * self.depth + 1, max_depth))
            return TreeLimits(limit, depth, config.width, max_ahead_depth=ahead_depth)
        uses_draft = self.step.uses_draft
        if not uses_draft and not self._proposes_alone:
            return TreeLimits(0, depth, config.width)
        limits = self.shape.limits(limit, depth, uses_draft, num_seqs)
        # The next tree's root is at most one level below this one's last level.
        return replace(limits, max_ahead_depth=max(0, min(2 * limits.max_depth + 1, max_depth)))

    def uses_draft(self, num_seqs: int) -> bool:
        """Return whether steps of `num_seqs` sequences use the draft model now."""
        if self.config.num_draft_tokens is not None:
            return self._has_model
        return self._has_model and self.acceptance_statistics.choice(num_seqs).is_draft_better

    @property
    def is_whole(self) -> bool:
        """Whether the tree is verified as proposed.

        True if the user fixed the number of nodes, or if a rule verifies a chain drawn from q:
        dropping drawn tokens that look unlikely leaves no sample of q, and the emitted tokens would
        not have the target's distribution.
        """
        return self.is_chain or self.config.num_draft_tokens is not None

    def learn(
        self, acceptance: Acceptance, tree: DraftTree, root_seconds: float, node_seconds: float
    ) -> Outcome | None:
        """Learn from one sequence's part of a step.

        Return the outcome for its choice; None if it is no evidence.

        root_seconds, node_seconds: time in the pass of its root, and of each of its draft tokens.
        """
        this, acceptance_statistics = self.step, self.acceptance_statistics
        emitted = acceptance.emitted(tree)
        if self.is_chain:
            note_chain(acceptance_statistics.chain, tree.n_drafted, len(tree.follow(emitted)) - 1)
        elif this.candidates is not None:
            acceptance_statistics.calibration.observe(this.candidates, emitted)
        if not this.is_typical or self.config.num_draft_tokens is not None:
            return None
        self._note_plain()
        seconds = root_seconds + node_seconds * tree.n_drafted
        return Outcome(
            len(emitted),
            this.draft_seconds + seconds,
            this.catch_up_seconds,
            _accepted_without_draft(tree, emitted),
            node_seconds * sum(map(_is_proposed_without_draft, tree.sources[1:])),
        )

    @property
    def choice(self) -> DraftChoice:
        return self.acceptance_statistics.choice(self.step.num_seqs)

    def _begin(self, is_fixed: bool, is_typical: bool, num_seqs: int) -> Step:
        choice, before = self.acceptance_statistics.choice(num_seqs), self.step
        uses_draft = self._has_model if is_fixed else choice.is_draft_better
        if is_typical and not is_fixed:
            uses_draft = choice.next_uses_draft(self.shape.min_draft_seconds(num_seqs))
        self._n_steps += 1
        return Step(
            self.clock(),
            uses_draft,
            is_first=self._n_steps == 1,
            is_catching_up=uses_draft and not before.uses_draft,
            is_typical=is_typical,
            num_seqs=num_seqs,
        )

    def _note_plain(self) -> None:
        num_seqs, cost = self.step.num_seqs, self.pair_statistics.cost
        seconds = cost.seconds(num_seqs)
        # The only pass without draft tokens may be the first of the process, which reads all that
        # stays in memory; it cannot take much longer than one with them.
        larger = cost.seconds(max(num_seqs, self.step.num_tokens))
        if seconds > _MAX_PLAIN_RATIO * larger:
            seconds = larger
        self.choice.plain_seconds = seconds / num_seqs


def _is_proposed_without_draft(sources: Sequence[str]) -> bool:
    return any(source != DRAFT_SOURCE for source in sources)


def _accepted_without_draft(tree: DraftTree, emitted: Sequence[int]) -> int:
    """Return the length of the accepted path in the tree of the other drafters alone."""
    n_accepted = 0
    for node in tree.follow(emitted)[1:]:
        if not _is_proposed_without_draft(tree.sources[node]):
            break
        n_accepted += 1
    return n_accepted


def _temperature_class(temperature: float) -> float:
    """Return the class of temperatures whose acceptance is learnt together; 0 is greedy."""
    return min(math.ceil(2.0 * temperature) / 2.0, 2.0)
