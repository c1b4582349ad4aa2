"""An EAGLE-3 head as draft (-md PATH): the target's text, in fewer passes than without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import in_dtype
from eagle3_heads import bigram_head, bigram_target, new_head, save_gguf_head, save_specforge
from tiny_pair import VOCAB, save_tokenizer

import specdec
from specdec.config import SpecConfig
from specdec.sampling.params import SamplingParams

PROMPTS = ["def fibonacci(n):\n    ", "import os\n\n\nclass Reader:\n", "# a"]
OPTIONS = {"memory_budget": "4GiB", "ctx_size": 256, "exact": "on"}
ASKED = {"max_tokens": 40, "ignore_eos": True, "seed": 5}
N_DRAFT = 252


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = bigram_target(tmp_path_factory.mktemp("eagle3") / "target", VOCAB)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def head(target: Path) -> Path:
    return save_specforge(bigram_head(target, N_DRAFT), target.parent / "head")


@pytest.fixture(scope="module")
def plain(target: Path):
    with specdec.load(target, spec_type="none", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module", params=[1, None], ids=["chain", "tree"])
def with_head(request: pytest.FixtureRequest, target: Path, head: Path):
    options = {"spec_type": "draft", "num_draft_tokens": 12, "tree_width": request.param}
    with specdec.load(target, draft_model=head, **options, **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_text_is_the_targets(plain, with_head, prompt, temperature):
    expected = plain.generate(prompt, temperature=temperature, **ASKED)
    result = with_head.generate(prompt, temperature=temperature, **ASKED)
    assert result.token_ids == expected.token_ids
    assert result.stats.mean_acceptance_length > 3.0


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_chain_rules_draw_from_the_heads_vocabulary(with_head, acceptance):
    spec = SpecConfig(("draft",), acceptance=acceptance, num_draft_tokens=4, tree_width=1)
    result = with_head.generate(PROMPTS[0], temperature=0.6, spec=spec, **ASKED)
    assert len(result.token_ids) == ASKED["max_tokens"]
    assert result.stats.mean_acceptance_length > 3.0


def test_several_sequences_share_the_heads_passes(plain, with_head):
    expected = [plain.generate(prompt, **ASKED).token_ids for prompt in PROMPTS]
    params = SamplingParams(**ASKED)
    results = dict(with_head.generate_each((prompt, params) for prompt in PROMPTS))
    assert [results[i].token_ids for i in range(len(PROMPTS))] == expected


def test_a_second_turn_drafts_for_its_new_tokens(plain, with_head):
    first = PROMPTS[1]
    text = first + with_head.generate(first, **ASKED).text + "\n\n    def read(self"
    result = with_head.generate(text, **ASKED)
    assert result.stats.reused_prompt_tokens > 10
    assert result.token_ids == plain.generate(text, **ASKED).token_ids
    assert result.stats.mean_acceptance_length > 3.0


def test_a_quantised_head_of_a_gguf_file_drafts_alike(target, plain, tmp_path):
    head = save_gguf_head(bigram_head(target, N_DRAFT), tmp_path / "head.gguf", "Q8_0")
    options = {"spec_type": "draft", "num_draft_tokens": 12, **OPTIONS}
    with specdec.load(target, draft_model=head, **options) as llm:
        result = llm.generate(PROMPTS[0], **ASKED)
    assert result.token_ids == plain.generate(PROMPTS[0], **ASKED).token_ids
    assert result.stats.mean_acceptance_length > 3.0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_useless_head_changes_nothing(target, plain, tmp_path, temperature):
    head = save_specforge(new_head(vocab_size=VOCAB), tmp_path / "head")
    asked = {**ASKED, "temperature": temperature}
    with specdec.load(target, draft_model=head, **OPTIONS) as llm:
        assert llm.generate(PROMPTS[0], **asked).token_ids == (
            plain.generate(PROMPTS[0], **asked).token_ids
        )


@pytest.mark.parametrize("layout", ["folder", "gguf"])
def test_a_head_is_computed_in_the_targets_number_format(target, tmp_path, layout):
    folder = in_dtype(target, tmp_path / "target", torch.bfloat16)
    save_tokenizer(folder)
    head = bigram_head(target, N_DRAFT)
    if layout == "folder":
        path = save_specforge(head, tmp_path / "head")
    else:
        path = save_gguf_head(head, tmp_path / "head.gguf")
    with specdec.load(folder, spec_type="none", **OPTIONS) as llm:
        expected = llm.generate(PROMPTS[0], **ASKED).token_ids
    options = {"spec_type": "draft", "num_draft_tokens": 12, **OPTIONS}
    with specdec.load(folder, draft_model=path, **options) as llm:
        result = llm.generate(PROMPTS[0], **ASKED)
    assert result.token_ids == expected
    assert result.stats.mean_acceptance_length > 2.0
