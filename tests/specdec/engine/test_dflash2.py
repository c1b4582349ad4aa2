"""A DFlash 2 head as draft of a whole run: the target's text in every bit."""

from __future__ import annotations

import pytest
from checkpoints import save_tiny_checkpoint
from dflash2_heads import save_dflash2_head
from tiny_pair import VOCAB, save_tokenizer

import specdec
from specdec.config import SpecConfig
from specdec.sampling.params import SamplingParams

PROMPTS = ["def fibonacci(n):\n    ", "import os\n\n\nclass Reader:", "# a"]
LOAD = {"memory_budget": "4GiB", "ctx_size": 256, "exact": "on"}
ASKED = {"max_tokens": 32, "ignore_eos": True, "seed": 5}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dflash2")
    target = folder / "target"
    save_tiny_checkpoint("llama", target, vocab_size=VOCAB, max_position_embeddings=256)
    save_tokenizer(target)
    head = save_dflash2_head(folder / "head", vocab_size=VOCAB)
    options = {"spec_type": "draft", "num_draft_tokens": 12, **LOAD}
    with (
        specdec.load(target, spec_type="none", **LOAD) as plain,
        specdec.load(target, draft_model=head, **options) as drafted,
    ):
        yield plain, drafted


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_the_targets(models, temperature, width):
    plain, drafted = models
    spec = SpecConfig(("draft",), tree_width=width, num_draft_tokens=12)
    for prompt in PROMPTS:
        expected = plain.generate(prompt, temperature=temperature, **ASKED)
        result = drafted.generate(prompt, temperature=temperature, spec=spec, **ASKED)
        assert result.token_ids == expected.token_ids
        assert result.stats.drafted_tokens > 0


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_chain_rules_draw_from_the_transitions(models, acceptance):
    spec = SpecConfig(("draft",), acceptance=acceptance, num_draft_tokens=4)
    result = models[1].generate(PROMPTS[0], temperature=0.9, spec=spec, **ASKED)
    assert len(result.token_ids) == ASKED["max_tokens"]
    assert result.stats.drafted_tokens > ASKED["max_tokens"]


def test_several_sequences_share_the_heads_passes(models):
    plain, drafted = models
    expected = [plain.generate(prompt, **ASKED).token_ids for prompt in PROMPTS]
    params = SamplingParams(**ASKED)
    results = dict(drafted.generate_each((prompt, params) for prompt in PROMPTS))
    assert [results[i].token_ids for i in range(len(PROMPTS))] == expected


def test_text_up_to_the_contexts_end(models):
    """Blocks are cut where the context ends."""
    prompt, long = "# a " * 48, {**ASKED, "max_tokens": 62}
    expected = models[0].generate(prompt, **long)
    assert len(expected.prompt_token_ids) + 62 in range(250, 257)
    assert models[1].generate(prompt, **long).token_ids == expected.token_ids


def test_a_grammar_leaves_only_its_tokens(models):
    plain, drafted = models
    asked = {"max_tokens": 12, "seed": 5, "regex": "[a-f]{4,9}"}
    expected = plain.generate(PROMPTS[0], **asked)
    assert drafted.generate(PROMPTS[0], **asked).text == expected.text
