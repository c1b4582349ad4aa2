"""Drafting within a grammar: only permitted tokens, and forced tokens without a draft run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from alone import own
from generating import RandomDrafter, make_controller
from schemas import PERSON
from tiny_pair import VOCAB, save_model

from backends.hf.backend import TorchBackend
from specdec.config import SpecConfig
from specdec.drafters.base import TreeLimits
from specdec.drafters.candidates import CandidateRanker
from specdec.drafters.grammar import GrammarDrafter, within_grammar
from specdec.drafters.merged import MergedDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.constraint import Constraint
from specdec.grammar.state import GrammarState
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler
from specdec.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")

LIMITS = TreeLimits(max_nodes=24, max_depth=24, width=4)
SCHEMA = Constraint("json_schema", json.dumps(PERSON))
KEY = '{"occupation": "astron'
EOS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def draft(folder: Path) -> Iterator[TorchBackend]:
    with TorchBackend.resident(folder, max_context=512) as backend:
        yield backend


@pytest.fixture(scope="module")
def letters(folder: Path) -> Tokenizer:
    """A tokenizer with one token per byte."""
    return Tokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def begin(letters: Tokenizer):
    """begin(constraint): the state before an output, with a prompt of one token."""
    compiler = GrammarCompiler(cache(letters.grammar_tokenizer))
    return lambda constraint=SCHEMA: compiler.begin(constraint, 1, (EOS,))


def proposed(tree) -> list[list[int]]:
    return [list(tree.tokens_on_path(i)) for i in range(1, len(tree))]


def test_what_must_follow_is_a_chain_of_probability_one(begin, letters: Tokenizer) -> None:
    drafter = GrammarDrafter(begin(), VOCAB, max_context=30)
    tree = drafter.propose([7], LIMITS)
    assert tree.is_chain
    assert letters.decode(tree.token_ids[1:]) == KEY
    assert set(tree.log_probs) == {0.0}
    few = TreeLimits(max_nodes=3, max_depth=1, width=4)
    assert letters.decode(drafter.propose([7], few).token_ids[1:]) == '{"o'
    assert GrammarDrafter(begin(), VOCAB, max_context=5).propose([7], LIMITS).n_drafted == 4
    assert drafter.propose([7], TreeLimits(0, 5, 1)).n_drafted == 0


def test_where_there_is_a_choice_nothing_is_proposed(begin, letters: Tokenizer) -> None:
    drafter = GrammarDrafter(begin(), VOCAB, max_context=100)
    assert drafter.propose([7, *letters.encode(KEY)], LIMITS).n_drafted == 0
    after = drafter.propose([7, *letters.encode(KEY + "o")], LIMITS)
    assert letters.decode(after.token_ids[1:]) == 'mer", "age": '


def test_other_proposals_lose_what_may_not_follow(begin, letters: Tokenizer) -> None:
    """n-grams of a prompt with another person in it."""
    token_ids = [7, *letters.encode('{"occupation": "actor", "age": 300, "likes": [true]} {"occ')]
    state = GrammarCompiler(letters.grammar_tokenizer).begin(
        SCHEMA, len(token_ids) - len(letters.encode('{"occ')), (EOS,)
    )
    limits = TreeLimits(max_nodes=40, max_depth=40, width=2)
    whole = NgramDrafter().propose(token_ids, limits)
    cached = within_grammar(NgramDrafter(), state).propose(token_ids, limits)
    assert letters.decode(whole.token_ids[1:]).startswith('upation": "actor"')
    longest = max(proposed(cached), key=len)
    assert letters.decode(longest) == 'upation": "a'
    for tokens in proposed(cached):
        assert state.allows([*token_ids, *tokens[:-1]], tokens[-1])


def test_without_a_grammar_a_drafter_stays_as_it_is() -> None:
    drafter = NgramDrafter()
    assert within_grammar(drafter, None) is drafter


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_candidates_are_those_that_may_follow(begin, letters: Tokenizer, temperature) -> None:
    """Filters of the request choose among them; a row without permitted tokens has none."""
    params = SamplingParams(temperature=temperature, top_k=2 if temperature else 0, seed=1)
    sampler = Sampler(params, n_tokens=VOCAB, prompt_length=1, grammar=begin())
    ranker = CandidateRanker.for_target(sampler, VOCAB)
    assert ranker.grammar is not sampler.grammar
    rows = np.random.default_rng(0).standard_normal((3, VOCAB)).astype(np.float32)
    prefixes = [[7, *letters.encode(KEY)], [7, *letters.encode("x")], [7]]
    choice, dead, only = ranker.rank(rows, [len(prefix) for prefix in prefixes], 8, prefixes)
    assert {token for token, _ in choice} == set(letters.encode("ao"))
    assert dead == []
    assert only == [(letters.encode("{")[0], pytest.approx(0.0))]


def test_a_model_reads_a_forced_stretch_in_one_run(begin, draft, letters: Tokenizer) -> None:
    state: GrammarState = begin()
    drafter = ModelDrafter(draft, VOCAB, ranker=CandidateRanker(VOCAB, grammar=begin()))
    drafter.reset()
    tree = drafter.propose([7], LIMITS)
    assert tree.n_runs <= 3, "the prompt's, that of all forced tokens, and one behind them"
    assert letters.decode(tree.token_ids[1:]).startswith(KEY)
    assert tree.n_drafted == 24 > len(KEY)
    for tokens in proposed(tree):
        assert state.allows([7, *tokens[:-1]], tokens[-1])


def test_every_proposal_of_a_sequence_follows_the_grammar(begin, draft, folder: Path) -> None:
    spec = SpecConfig(num_draft_tokens=12, tree_width=3)
    with TorchBackend.resident(folder, max_context=256) as target:
        for seed in range(3):
            params = SamplingParams(temperature=1.0, seed=seed)
            model = ModelDrafter(draft, VOCAB, ranker=CandidateRanker(VOCAB, grammar=begin()))
            model.reset()
            own(target).rollback(0)
            random = within_grammar(RandomDrafter(VOCAB, seed), begin())
            merged = MergedDrafter([model, random, GrammarDrafter(begin(), VOCAB, 256)])
            controller = make_controller(
                target, merged, params, spec=spec, prompt_length=1, eos=[EOS], grammar=begin()
            )
            checking, tokens = begin(), [controller.start([7])]
            while tokens[-1] != EOS:
                before = list(controller.context)
                done = controller.step(200 - len(tokens))
                for path in proposed(done.tree):
                    assert checking.allows([*before, *path[:-1]], path[-1])
                tokens += done.token_ids
