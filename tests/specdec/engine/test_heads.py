"""A target's own MTP head as draft: the target's text, and more tokens per pass than without."""

from __future__ import annotations

from pathlib import Path

import pytest
from mtp_heads import save_with_mtp_head
from tiny_pair import save_tokenizer

import specdec
from specdec.config import SpecConfig
from specdec.drafters import head
from specdec.drafters.state_buffer import StateBuffer
from specdec.models.names import MTP_HEAD
from specdec.sampling.params import SamplingParams

PROMPTS = ["def fibonacci(n):\n    ", "import os\n\n\nclass Reader:\n    def __init__(self", "# a"]
OPTIONS = {"memory_budget": "4GiB", "ctx_size": 512}
ASKED = {"max_tokens": 40, "ignore_eos": True, "seed": 5}


@pytest.fixture(scope="module")
def plain():
    with specdec.load("pair:hybrid", spec_type="none", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def with_head():
    options = {"spec_type": "draft", "num_draft_tokens": 12, **OPTIONS}
    with specdec.load("pair:hybrid", draft_model=MTP_HEAD, **options) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_text_is_the_targets(plain, with_head, prompt, temperature):
    expected = plain.generate(prompt, temperature=temperature, **ASKED)
    result = with_head.generate(prompt, temperature=temperature, **ASKED)
    assert result.token_ids == expected.token_ids
    assert result.stats.mean_acceptance_length > 1.5


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_chain_rules_draw_from_the_head(with_head, acceptance):
    spec = SpecConfig(("draft",), acceptance=acceptance, num_draft_tokens=4)
    result = with_head.generate(PROMPTS[0], temperature=0.6, spec=spec, **ASKED)
    assert len(result.token_ids) == ASKED["max_tokens"]
    assert result.stats.mean_acceptance_length > 1.2


def test_several_sequences_share_the_heads_passes(plain, with_head):
    expected = [plain.generate(prompt, **ASKED).token_ids for prompt in PROMPTS]
    params = SamplingParams(**ASKED)
    results = dict(with_head.generate_each((prompt, params) for prompt in PROMPTS))
    assert [results[i].token_ids for i in range(len(PROMPTS))] == expected


def test_a_beam_search_is_the_targets(plain, with_head):
    beams = {"num_beams": 3, "max_tokens": 12}
    expected = plain.generate(PROMPTS[0], **beams).token_ids
    assert with_head.generate(PROMPTS[0], **beams).token_ids == expected


def test_a_constrained_text_is_the_targets(plain, with_head):
    constraint = {"regex": "[a-z]{3,8}( [a-z]{3,8}){9}", "max_tokens": 60}
    expected = plain.generate(PROMPTS[0], **constraint)
    result = with_head.generate(PROMPTS[0], **constraint)
    assert result.token_ids == expected.token_ids
    assert len(result.token_ids) > 10
    assert result.stats.drafted_tokens > 0


def test_hidden_states_of_a_finished_sequence_are_dropped(with_head, monkeypatch):
    made = []

    class Noted(StateBuffer):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(head, "StateBuffer", Noted)
    streams = [with_head.stream(prompt, max_tokens=1) for prompt in PROMPTS]
    assert [len(list(stream)) for stream in streams]
    assert len(made) == len(PROMPTS)
    assert not any(map(len, made))


def test_a_head_goes_on_where_its_own_context_is_full(plain, with_head):
    """It begins anew with the newest hidden states."""
    options = {"spec_type": "draft", "num_draft_tokens": 8, "draft_window": 32, **OPTIONS}
    prompt = PROMPTS[1] + " path" * 230
    expected = plain.generate(prompt, **ASKED)
    with specdec.load("pair:hybrid", draft_model=MTP_HEAD, **options) as llm:
        assert llm.draft is not None
        result = llm.generate(prompt, **ASKED)
        assert result.stats.prompt_tokens > llm.draft.max_context
    assert result.token_ids == expected.token_ids
    assert result.stats.drafted_tokens > 4 * result.stats.passes


def test_a_second_turn_drafts_for_its_new_tokens(plain, with_head):
    """The target reuses the first turn's KV, of whose tokens the head has no hidden states."""
    first = PROMPTS[1]
    text = first + with_head.generate(first, **ASKED).text + "\n\n    def read(self"
    result = with_head.generate(text, **ASKED)
    assert result.stats.reused_prompt_tokens > 10
    assert result.token_ids == plain.generate(text, **ASKED).token_ids
    assert result.stats.mean_acceptance_length > 1.5


def test_a_useless_head_changes_nothing(tmp_path: Path) -> None:
    directory = save_with_mtp_head("glm4-moe", tmp_path)
    save_tokenizer(directory)
    with specdec.load(directory, spec_type="none", exact="on") as llm:
        expected = llm.generate([5, 9, 11], **ASKED).token_ids
    with specdec.load(directory, draft_model=MTP_HEAD, exact="on") as llm:
        assert llm.generate([5, 9, 11], **ASKED).token_ids == expected


def test_a_target_without_a_head_is_refused() -> None:
    with pytest.raises(specdec.SpecdecError, match="has no MTP head"):
        specdec.load("pair:target", draft_model=MTP_HEAD)
