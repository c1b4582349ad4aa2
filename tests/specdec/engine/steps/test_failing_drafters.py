"""Errors of a caller's own drafter end its sequence, wherever they occur, and no other one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from stepping import Stepping
from tiny_pair import save_model

import specdec
from specdec.api import LLM
from specdec.drafters.base import Drafter, TreeLimits
from specdec.drafters.batched_drafting import DraftSteps
from specdec.drafters.proposal import BadProposal
from specdec.engine.sequences.request import own_errors
from specdec.engine.stream import GenerationStream
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import DraftTree

PROMPT = [5, 6, 7]
OTHER = [80, 81]
N_TOKENS = 6


class Failing(Drafter):
    """A drafter that raises at the n-th call of one of its methods, and from then on."""

    def __init__(self, method: str, n_before: int) -> None:
        self._method, self._n_before = method, n_before

    def _called(self, method: str) -> None:
        if method == self._method:
            self._n_before -= 1
            if self._n_before < 0:
                raise ValueError(f"my {method}")

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        self._called("propose")
        return DraftTree(context_ids[-1])

    def propose_in_steps(
        self, context_ids: Sequence[int], limits: TreeLimits
    ) -> DraftSteps[DraftTree]:
        self._called("propose_in_steps")  # at once: this function is no generator
        return super().propose_in_steps(context_ids, limits)

    def observe(self, acceptance: Acceptance, tree: DraftTree) -> None:
        self._called("observe")

    def reset(self) -> None:
        self._called("reset")

    def num_uncomputed(self, context_ids: Sequence[int]) -> int:
        self._called("num_uncomputed")
        return 0

    @property
    def can_draft_ahead(self) -> bool:
        self._called("can_draft_ahead")
        return True

    def drafting_ahead(self, tree: DraftTree) -> DraftSteps[None]:
        self._called("drafting_ahead")
        yield from ()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    target = save_model(tmp_path_factory.mktemp("target"), seed=0)
    with specdec.load(
        target,
        ctx_size=128,
        kv_tokens=400,
        num_draft_tokens=16,
        draft_depth=3,
        draft_ahead="on",
    ) as loaded:
        yield loaded


class Proposing(Drafter):
    """A drafter that proposes a child of the root for each of these tokens, or no valid tree."""

    def __init__(self, tokens: Sequence[int] | None, root: int | None = None) -> None:
        self._tokens, self._root = tokens, root

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        if self._tokens is None:
            return None  # type: ignore[return-value]
        tree = DraftTree(context_ids[-1] if self._root is None else self._root)
        for token in self._tokens:
            tree.add(0, token, -1.0)
        return tree


class Deep(Drafter):
    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        tree, node = DraftTree(context_ids[-1]), 0
        for _ in range(limits.max_nodes):
            node = tree.add(node, 5, -1.0)
        return tree


def check_own_error(llm: LLM, failing: GenerationStream, message: str) -> None:
    """Check the error of one sequence beside another one, in one pass."""
    expected = llm.generate(OTHER, max_tokens=N_TOKENS).token_ids
    other = llm.stream(OTHER, max_tokens=N_TOKENS)
    other.start()
    with pytest.raises(BadProposal, match=message):
        list(failing)
    for _ in other:
        pass
    assert other.result.token_ids == expected
    assert not llm.session.engine._running


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (Proposing(None), "None, which is no DraftTree"),
        (Proposing([5], root=0), "the root 0"),
        (Proposing([10**6]), "not among the 259"),
        (Proposing([-1]), "not among the 259"),
        (Proposing(range(3, 200)), "197 tokens in 1 levels"),
    ],
    ids=["nothing", "another root", "no token", "below all tokens", "too many"],
)
def test_a_proposal_that_no_pass_can_run(llm: LLM, drafter: Drafter, message: str) -> None:
    check_own_error(llm, llm.stream(PROMPT, max_tokens=N_TOKENS, drafter=drafter), message)


def test_a_proposal_beyond_the_context(llm: LLM) -> None:
    prompt = [5 + i % 40 for i in range(124)]
    stream = llm.stream(prompt, max_tokens=3, drafter=Deep())
    check_own_error(llm, stream, r"limits are \d+ in 3:")


@pytest.mark.parametrize("n_before", [0, 1])
@pytest.mark.parametrize(
    "method",
    [
        "propose",
        "propose_in_steps",
        "observe",
        "reset",
        "num_uncomputed",
        "can_draft_ahead",
        "drafting_ahead",
    ],
)
def test_a_drafter_that_raises(llm: LLM, method: str, n_before: int) -> None:
    expected = llm.generate(OTHER, max_tokens=N_TOKENS).token_ids
    other = llm.stream(OTHER, max_tokens=N_TOKENS)
    next(other)
    failing = llm.stream(PROMPT, max_tokens=N_TOKENS, drafter=Failing(method, n_before))
    with pytest.raises(ValueError, match=f"my {method}"):
        list(failing)
    for _ in other:
        pass
    assert other.result.token_ids == expected
    assert llm.generate(OTHER, max_tokens=N_TOKENS).token_ids == expected
    assert not llm.session.engine._running
    assert not llm.session.models.prefix_cache._in_use


def test_a_drafter_that_raises_when_the_models_are_loaded_again(llm: LLM) -> None:
    expected = llm.generate(OTHER, max_tokens=N_TOKENS).token_ids
    session = llm.session
    failing = llm.stream(PROMPT, max_tokens=N_TOKENS, drafter=Failing("reset", 1))
    other = llm.stream(OTHER, max_tokens=N_TOKENS)
    with Stepping(llm) as steps:
        steps.next(failing)
        steps.next(other)
        session.engine.send(lambda: session.load_again(session.models.planned))
        steps.step()
    with pytest.raises(ValueError, match="my reset"):
        list(failing)
    for _ in other:
        pass
    assert other.result.token_ids == expected
    assert llm.generate(OTHER, max_tokens=N_TOKENS).token_ids == expected
    assert not session.engine._running
    assert not session.models.prefix_cache._in_use


def test_a_cancelled_sequence_whose_drafter_raises_at_its_end(llm: LLM) -> None:
    failing = llm.stream(PROMPT, max_tokens=N_TOKENS, drafter=Failing("reset", 1))
    with Stepping(llm) as steps:
        steps.next(failing)
        steps.cancel(failing)
    assert failing.result.finish_reason == "cancelled"
    assert not llm.session.engine._running
    assert not llm.session.models.prefix_cache._in_use


def test_the_first_error_is_the_one_that_counts(llm: LLM) -> None:
    request = llm.stream(PROMPT, max_tokens=N_TOKENS)._request
    for message in ("first", "second"):
        with own_errors(request):
            raise ValueError(message)
    assert str(request.error) == "first"
