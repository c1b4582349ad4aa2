"""A DFlash head as draft of a whole run: the target's text in every bit, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import save_tiny_checkpoint
from dflash_heads import FAMILY, PUBLIC, save_dflash_head
from tiny_pair import VOCAB, save_tokenizer

import specdec
from specdec.config import SpecConfig
from specdec.sampling.params import SamplingParams

PROMPTS = ["def fibonacci(n):\n    ", "import os\n\n\nclass Reader:", "# a"]
LOAD = {"memory_budget": "4GiB", "ctx_size": 256, "exact": "on"}
ASKED = {"max_tokens": 32, "ignore_eos": True, "seed": 5}


def save_target(family: str, directory: Path) -> Path:
    save_tiny_checkpoint(family, directory, vocab_size=VOCAB, max_position_embeddings=256)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module", params=[("llama", PUBLIC), ("qwen3", FAMILY)])
def directories(request, tmp_path_factory) -> tuple[Path, Path]:
    family, layout = request.param
    folder = tmp_path_factory.mktemp(family)
    changes = {"vocab_size": VOCAB} if layout == PUBLIC else {}
    head = save_dflash_head(folder / "head", layout, window=20, **changes)
    return save_target(family, folder / "target"), head


@pytest.fixture(scope="module")
def plain(directories):
    with specdec.load(directories[0], spec_type="none", **LOAD) as llm:
        yield llm


@pytest.fixture(scope="module")
def with_head(directories):
    target, head = directories
    options = {"spec_type": "draft", "num_draft_tokens": 12, **LOAD}
    with specdec.load(target, draft_model=head, **options) as llm:
        yield llm


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_the_targets(plain, with_head, temperature, width):
    spec = SpecConfig(("draft",), tree_width=width, num_draft_tokens=12)
    n_steps = 0
    for prompt in PROMPTS:
        expected = plain.generate(prompt, temperature=temperature, **ASKED)
        result = with_head.generate(prompt, temperature=temperature, spec=spec, **ASKED)
        assert result.token_ids == expected.token_ids
        n_steps += len(result.token_ids) / result.stats.mean_acceptance_length
        assert result.stats.drafted_tokens > 0
    if temperature:  # the target's noise guesses some of its tokens even for random weights
        assert n_steps < len(PROMPTS) * ASKED["max_tokens"]


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_chain_rules_draw_from_the_marginals(with_head, acceptance):
    spec = SpecConfig(("draft",), acceptance=acceptance, num_draft_tokens=4)
    result = with_head.generate(PROMPTS[0], temperature=0.9, spec=spec, **ASKED)
    assert len(result.token_ids) == ASKED["max_tokens"]
    assert result.stats.drafted_tokens > ASKED["max_tokens"]


def test_several_sequences_share_the_heads_passes(plain, with_head):
    expected = [plain.generate(prompt, **ASKED).token_ids for prompt in PROMPTS]
    params = SamplingParams(**ASKED)
    results = dict(with_head.generate_each((prompt, params) for prompt in PROMPTS))
    assert [results[i].token_ids for i in range(len(PROMPTS))] == expected


def test_a_second_turn_drafts_for_its_new_tokens(plain, with_head):
    """The target reuses the first turn's KV, of whose tokens the head has no hidden states."""
    first = PROMPTS[1]
    text = first + with_head.generate(first, **ASKED).text + "\n\n    def read(self"
    result = with_head.generate(text, **ASKED)
    assert result.stats.reused_prompt_tokens > 10
    assert result.token_ids == plain.generate(text, **ASKED).token_ids
    assert result.stats.drafted_tokens > 0


def test_text_up_to_the_contexts_end(plain, with_head):
    """Blocks are cut where the context ends."""
    prompt, long = "# a " * 48, {**ASKED, "max_tokens": 62}
    expected = plain.generate(prompt, **long)
    assert len(expected.prompt_token_ids) + 62 in range(250, 257)
    assert with_head.generate(prompt, **long).token_ids == expected.token_ids


def test_a_useless_head_beside_ngrams_changes_nothing(directories, plain):
    """With everything automatic, as a user runs it; the plan may leave the head out."""
    target, head = directories
    with specdec.load(target, draft_model=head, **LOAD) as llm:
        for prompt in PROMPTS:
            assert (
                llm.generate(prompt, **ASKED).token_ids == plain.generate(prompt, **ASKED).token_ids
            )


def test_the_plan_has_the_heads_memory(directories, with_head):
    parts = dict(with_head.plan.parts)
    assert parts["draft embeddings and head"] > 0
    assert parts["draft KV cache"] > 0
    assert with_head.plan.draft_placement is not None


def test_a_head_is_no_target(directories):
    with pytest.raises(specdec.SpecdecError, match="draft head.*runs only beside its target"):
        specdec.load(directories[1])


def test_the_head_of_another_target_is_refused(directories, tmp_path):
    with pytest.raises(specdec.SpecdecError, match="head of another target") as error:
        specdec.load(save_target("llama", tmp_path / "t"), draft_model=_wide_head(tmp_path / "h"))
    assert "\n" not in str(error.value)


def _wide_head(directory: Path) -> Path:
    return save_dflash_head(directory, hidden_size=64, vocab_size=VOCAB)
