"""A Gemma 4 assistant as draft of a whole run: the target's text in every bit, and transformers'
proposals in every step."""

from __future__ import annotations

from pathlib import Path

import pytest
from assistant_heads import Reference, save_assistant
from checkpoints import save_tiny_checkpoint
from tiny_pair import VOCAB, save_tokenizer

import specdec
from specdec.config import SpecConfig
from specdec.drafters.assistant import AssistantDrafter
from specdec.sampling.params import SamplingParams

PROMPTS = ["def fibonacci(n):\n    ", "import os\n\n\nclass Reader:", "# a"]
LOAD = {"memory_budget": "4GiB", "ctx_size": 256, "exact": "on"}
ASKED = {"max_tokens": 32, "ignore_eos": True, "seed": 5}


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("gemma4")
    sizes = {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB}
    target = folder / "target"
    save_tiny_checkpoint("gemma4", target, **sizes, max_position_embeddings=256)
    save_tokenizer(target)
    return target, save_assistant(folder / "head", vocab_size=VOCAB)


@pytest.fixture(scope="module", params=[None, "q8_0", "fp8"])
def types(request):
    """Number formats of the target's KV cache, which the head reads."""
    return {"cache_type_k": request.param, "cache_type_v": request.param}


@pytest.fixture(scope="module")
def plain(directories, types):
    with specdec.load(directories[0], spec_type="none", **LOAD, **types) as llm:
        yield llm


@pytest.fixture(scope="module")
def with_head(directories, types):
    target, head = directories
    options = {"spec_type": "draft", "num_draft_tokens": 8, **LOAD, **types}
    with specdec.load(target, draft_model=head, **options) as llm:
        yield llm


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_the_targets(plain, with_head, temperature, width):
    spec = SpecConfig(("draft",), tree_width=width, num_draft_tokens=8)
    n_steps = 0
    for prompt in PROMPTS:
        expected = plain.generate(prompt, temperature=temperature, **ASKED)
        result = with_head.generate(prompt, temperature=temperature, spec=spec, **ASKED)
        assert result.token_ids == expected.token_ids
        n_steps += len(result.token_ids) / result.stats.mean_acceptance_length
        assert result.stats.drafted_tokens > 0
    if temperature:  # the target's noise guesses some of its tokens even for random weights
        assert n_steps < len(PROMPTS) * ASKED["max_tokens"]


@pytest.mark.parametrize("types", [None], indirect=True, scope="module")
def test_chains_of_a_run_are_transformers(directories, with_head, monkeypatch):
    """In every step of a run, after rejections as well as at its start."""
    proposed = []
    steps = AssistantDrafter.propose_in_steps

    def noted(self, context_ids, limits):
        tree = yield from steps(self, context_ids, limits)
        proposed.append((list(context_ids), tree.token_ids[1:]))
        return tree

    monkeypatch.setattr(AssistantDrafter, "propose_in_steps", noted)
    spec = SpecConfig(("draft",), tree_width=1, num_draft_tokens=4)
    with_head.generate(PROMPTS[0], spec=spec, **ASKED)
    reference = Reference(*directories)
    drafted = [(context, tokens) for context, tokens in proposed if tokens]
    assert len(drafted) > 20
    for context, tokens in drafted:
        assert tokens == reference.candidates(context, len(tokens))[0]


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_chain_rules_draw_from_the_head(with_head, acceptance):
    spec = SpecConfig(("draft",), acceptance=acceptance, num_draft_tokens=4)
    result = with_head.generate(PROMPTS[0], temperature=0.9, spec=spec, **ASKED)
    assert len(result.token_ids) == ASKED["max_tokens"]
    assert result.stats.drafted_tokens > ASKED["max_tokens"]


def test_several_sequences_share_the_heads_passes(plain, with_head):
    expected = [plain.generate(prompt, **ASKED).token_ids for prompt in PROMPTS]
    params = SamplingParams(**ASKED)
    results = dict(with_head.generate_each((prompt, params) for prompt in PROMPTS))
    assert [results[i].token_ids for i in range(len(PROMPTS))] == expected


def test_a_second_turn_attends_to_the_reused_prefix(plain, with_head):
    first = PROMPTS[1]
    text = first + with_head.generate(first, **ASKED).text + "\n\n    def read(self"
    result = with_head.generate(text, **ASKED)
    assert result.stats.reused_prompt_tokens > 10
    assert result.token_ids == plain.generate(text, **ASKED).token_ids
    assert result.stats.drafted_tokens > 0


def test_a_useless_head_beside_ngrams_changes_nothing(directories, plain):
    """With everything automatic, as a user runs it; the plan may leave the head out."""
    target, head = directories
    with specdec.load(target, draft_model=head, **LOAD) as llm:
        for prompt in PROMPTS:
            assert (
                llm.generate(prompt, **ASKED).token_ids == plain.generate(prompt, **ASKED).token_ids
            )


def test_text_up_to_the_contexts_end(plain, with_head):
    prompt, long = "# a " * 48, {**ASKED, "max_tokens": 62}
    expected = plain.generate(prompt, **long)
    assert len(expected.prompt_token_ids) + 62 in range(250, 257)
    assert with_head.generate(prompt, **long).token_ids == expected.token_ids


def test_the_plan_has_the_heads_memory(with_head):
    parts = dict(with_head.plan.parts)
    assert parts["draft embeddings and head"] > 0
    assert not parts.get("draft KV cache")
    assert with_head.plan.draft_placement is not None


def test_a_head_is_no_target(directories):
    with pytest.raises(specdec.SpecdecError, match="draft head.*runs only beside its target"):
        specdec.load(directories[1])


def test_the_head_of_another_target_is_refused(directories, tmp_path):
    head = save_assistant(tmp_path, vocab_size=VOCAB, backbone_hidden_size=64)
    with pytest.raises(specdec.SpecdecError, match="hidden states of 64 numbers") as error:
        specdec.load(directories[0], draft_model=head)
    assert "\n" not in str(error.value)
