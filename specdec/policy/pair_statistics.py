"""Acceptance statistics and costs of a loaded pair of models, kept across generations.

Times of passes and drafts hold for every sequence. Acceptance is learnt apart for each mode of
choosing tokens: a greedy target takes its likeliest token, a sampled one does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from specdec.config import DEFAULT_TREE_WIDTH
from specdec.policy.calibration import Calibration, chain_acceptance_rate, depth_gain
from specdec.policy.cost_model import CostModel, run_seconds
from specdec.policy.modes import FIRST_BUDGET, DraftChoice
from specdec.policy.moving_average import (
    LASTING,
    MAX_SAVED_ENTRIES,
    RECENT,
    MovingAverage,
    saved_numbers,
)

_VERSION = 8
"""Version of the saved statistics; files of other versions are ignored."""
_BROKEN = (KeyError, TypeError, ValueError, OverflowError)
"""Errors of reading a file with foreign content."""
_MIN_SAVED_STEPS = 8.0
"""Minimum weight of saved steps with the draft; half of them are the plan's estimate at most."""
_FIRST_NODES, _GROWTH = 15, 2
"""Slow start, because planned costs and draft probabilities are guesses: nodes of the first tree,
and maximum growth over trees that were worth verifying lately (bench/scenarios: 0.99 of the speed
with 32 nodes, 0.997 with 8; without any bound: docs/policy.md)."""


class AcceptanceStatistics:
    """Acceptance statistics of one mode of choosing tokens.

    make: returns the planned choice for a number of sequences in one pass.
    """

    def __init__(self, make: Callable[[int], DraftChoice]) -> None:
        self._make = make
        self._choices: dict[int, DraftChoice] = {}
        self.calibration = Calibration()
        self.chain, self.levels = chain_acceptance_rate(), depth_gain()
        self._max_retained = _FIRST_NODES / _GROWTH

    def choice(self, num_seqs: int = 1) -> DraftChoice:
        """Return the choice between drafting and plain decoding for `num_seqs` sequences per pass.

        There is one for each doubling of the number of sequences, whose speed differs.
        """
        size = num_seqs.bit_length()
        if size not in self._choices:
            self._choices[size] = self._make(num_seqs)
        return self._choices[size]

    @property
    def n_candidates(self) -> int:
        """Nodes to request from drafters: somewhat more than recent trees retained."""
        return max(_FIRST_NODES // _GROWTH, int(_GROWTH * self._max_retained))

    def observe_tree_size(self, n_nodes: int) -> None:
        """Record that a tree of `n_nodes` nodes was worth verifying."""
        self._max_retained = max(float(n_nodes), RECENT * self._max_retained)

    def state_dict(self) -> dict[str, Any]:
        return {
            "choices": {str(size): choice.state_dict() for size, choice in self._choices.items()},
            "calibration": self.calibration.state_dict(),
            "chain": self.chain.state_dict(),
            "levels": self.levels.state_dict(),
            "max_retained": self._max_retained,
        }

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore the output of `state_dict`. Raises ValueError, TypeError, KeyError."""
        for name, choice in dict(state_dict["choices"]).items():
            size = int(name)
            if not 1 <= size <= MAX_SAVED_ENTRIES:
                raise ValueError("no number of sequences")
            self.choice(2 ** (size - 1)).load_state_dict(choice)
        self.calibration.load_state_dict(state_dict["calibration"])
        self.chain.load_state_dict(state_dict["chain"])
        if not 0.0 < self.chain.means[0] <= 1.0:
            raise ValueError("no acceptance rate of chains")
        self.levels.load_state_dict(state_dict["levels"])
        self._max_retained = float(saved_numbers(state_dict["max_retained"], ()))


class Speedup(NamedTuple):
    """Decoding with the draft, as measured in earlier processes.

    relative: tokens per second in multiples of plain decoding's.
    """

    tokens_per_pass: float
    relative: float


class PairStatistics:
    """Costs, and statistics for each mode of choosing tokens; the plan's values at first.

    Args:
        cost: planned seconds of a target pass; copied, not changed.
        draft_cost: planned seconds of a draft pass; None without a draft.
        n_nodes: maximum draft tokens of a tree.
        width: maximum number of branches below one token of a tree.

    Attributes:
        cost: seconds of a target pass, as planned and measured.
    """

    def __init__(
        self,
        cost: CostModel,
        draft_cost: CostModel | None,
        n_nodes: int,
        width: int = DEFAULT_TREE_WIDTH,
    ) -> None:
        draft_pass_seconds = 0.0
        if draft_cost is not None:
            draft_pass_seconds = run_seconds(draft_cost, n_nodes, width)
        self.cost, self.draft_cost, self.n_nodes = replace(cost), draft_cost, n_nodes
        self._drafts = MovingAverage(LASTING, (draft_pass_seconds,))
        self._acceptance_statistics: dict[tuple[object, ...], AcceptanceStatistics] = {}
        self._saved: dict[str, Any] = {}  # statistics of other processes, not restored yet

    @property
    def draft_pass_seconds(self) -> float:
        """Seconds of one run of the draft model, which computes a level of all sequences, or all
        levels of a draft with blocks."""
        return self._drafts.means[0]

    @property
    def block_size(self) -> int | None:
        """See ModelCompute."""
        return None if self.draft_cost is None else self.draft_cost.block_size

    def note_drafting(self, n_runs: int, seconds: float) -> None:
        if n_runs:
            self._drafts.add(seconds / n_runs, n=n_runs)

    def acceptance_statistics(
        self, key: tuple[object, ...], make: Callable[[int], DraftChoice]
    ) -> AcceptanceStatistics:
        """Return the statistics of one mode of choosing tokens; new ones begin with `make`."""
        if key not in self._acceptance_statistics:
            self._acceptance_statistics[key] = AcceptanceStatistics(make)
            if (state_dict := self._saved.pop(str(key), None)) is not None:
                try:
                    self._acceptance_statistics[key].load_state_dict(state_dict)
                except _BROKEN:
                    self._acceptance_statistics[key] = AcceptanceStatistics(make)
        return self._acceptance_statistics[key]

    def learn_on(self, previous: PairStatistics) -> None:
        """Begin with the acceptance of the same pair under another plan, unless it is known. The
        choices between drafting and plain decoding depend on the plan's speeds."""
        learnt: dict[str, Any] = previous.state_dict()["acceptance"]
        for key, state_dict in learnt.items():
            if isinstance(state_dict, dict):  # files may have anything
                self._saved.setdefault(key, {**state_dict, "choices": {}})

    def saved_speedup(self) -> Speedup | None:
        """Return the speedup of single sequences in the mode of choosing tokens with the most
        steps, from other processes' statistics alone; None where few steps are known."""
        best: list[float] = [_MIN_SAVED_STEPS]
        plain = best
        for saved in self._saved.values():
            try:
                choice = saved["choices"]["1"]
                draft = saved_numbers(choice["draft"], (3,)).tolist()
                if draft[0] >= best[0] and min(draft) > 0.0:
                    best, plain = draft, saved_numbers(choice["plain"], (2,)).tolist()
            except _BROKEN:
                continue
        if best is plain or min(plain) <= 0.0:
            return None
        weight, tokens, seconds = best
        return Speedup(tokens / weight, tokens / seconds * plain[1] / plain[0])

    @property
    def has_lost(self) -> bool:
        """Whether drafting for single sequences was slower than plain decoding in other processes,
        in all modes of choosing tokens of which enough steps are known: it has used up its
        exploration budget."""
        budgets = []
        for saved in self._saved.values():
            try:
                choice = saved["choices"]["1"]
                if saved_numbers(choice["draft"], (3,))[0] >= _MIN_SAVED_STEPS:
                    budgets.append(float(saved_numbers(choice["budget"], ())))
            except _BROKEN:
                continue
        return max(budgets, default=FIRST_BUDGET) < FIRST_BUDGET / 2

    def state_dict(self) -> dict[str, Any]:
        """Return JSON-serialisable state, for `pair_statistics_of` in another process."""
        acceptance_statistics = {
            str(key): acceptance_statistics.state_dict()
            for key, acceptance_statistics in self._acceptance_statistics.items()
        }
        return {
            "version": _VERSION,
            "passes": self.cost.state_dict().tolist(),
            "drafts": self._drafts.state_dict(),
            "acceptance": dict(
                [*acceptance_statistics.items(), *self._saved.items()][:MAX_SAVED_ENTRIES]
            ),
        }


def pair_statistics_of(
    cost: CostModel,
    draft_cost: CostModel | None,
    n_nodes: int,
    state_dict: Any = None,
    width: int = DEFAULT_TREE_WIDTH,
) -> PairStatistics:
    """Return statistics that begin with another process's `state_dict`, where these are valid."""
    loaded = PairStatistics(cost, draft_cost, n_nodes, width)
    try:
        if state_dict["version"] == _VERSION:
            loaded.cost.load_state_dict(state_dict["passes"])
            loaded._drafts.load_state_dict(state_dict["drafts"])
            if loaded.draft_pass_seconds < 0.0:
                raise ValueError("no duration of a draft run")
            acceptance_statistics = list(dict(state_dict["acceptance"]).items())
            loaded._saved = dict(acceptance_statistics[:MAX_SAVED_ENTRIES])
    except _BROKEN:
        return PairStatistics(cost, draft_cost, n_nodes, width)
    return loaded
