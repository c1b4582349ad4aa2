"""Log-probabilities of prompt tokens: transformers', whatever chunks, cache and draft."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from reference_decoding import PROMPT
from tiny_gguf import save_tiny_architecture

import specdec
from specdec.sampling.logprobs import PromptScorer

LONG = [5 + (7 * i + i * i) % 85 for i in range(40)]


def set_chunks(llm, num_tokens):
    llm.session.forget_prompt()
    llm.session.engine.scheduler._max_prefill_tokens = num_tokens


def scores(llm, prompt=LONG, k=3, **options):
    return llm.generate(prompt, max_tokens=2, prompt_logprobs=k, **options).prompt_logprobs


@pytest.mark.parametrize("k", [0, 4])
def test_they_are_transformers(k, reference_model, resident):
    result = resident.generate(LONG, max_tokens=4, prompt_logprobs=k)
    with torch.no_grad():
        log_p = reference_model(torch.tensor([LONG])).logits[0].log_softmax(-1).numpy()
    assert len(result.prompt_logprobs) == len(LONG)
    assert result.prompt_logprobs[0] is None
    for token, row, entries in zip(LONG[1:], log_p, result.prompt_logprobs[1:], strict=False):
        likeliest = np.argsort(-row, kind="stable")
        shown = likeliest[:k].tolist()
        assert list(entries) == [*shown, *([] if token in shown else [token])]
        for other, entry in entries.items():
            assert entry.logprob == pytest.approx(row[other], abs=1e-4)
            assert likeliest[entry.rank - 1] == other
    shown = json.loads(json.dumps(result.to_dict()))["prompt_logprobs"]
    entry = result.prompt_logprobs[1][LONG[1]]
    assert shown[1][str(LONG[1])] == {"logprob": entry.logprob, "rank": entry.rank}


def test_the_output_is_the_same_with_them(resident):
    plain = resident.generate(LONG, max_tokens=12)
    assert plain.prompt_logprobs is None
    assert "prompt_logprobs" not in plain.to_dict()
    assert resident.generate(LONG, max_tokens=12, prompt_logprobs=1).token_ids == plain.token_ids


def test_they_are_equal_to_the_bit_whatever_the_chunks(small_llm):
    expected = scores(small_llm)
    for num_tokens in (1, 3, 17):
        set_chunks(small_llm, num_tokens)
        assert scores(small_llm) == expected


def test_a_cached_prefix_is_computed_again(resident):
    set_chunks(resident, 512)
    expected = scores(resident)
    again = resident.generate(LONG, max_tokens=2, prompt_logprobs=3)
    assert again.prompt_logprobs == expected
    assert again.stats.reused_prompt_tokens == 0
    assert resident.generate(LONG, max_tokens=2).stats.reused_prompt_tokens == len(LONG) - 1


def test_several_sequences_share_them(resident):
    result = resident.generate(LONG, n=3, temperature=1.0, seed=1, max_tokens=2, prompt_logprobs=3)
    assert len(result.outputs) == 3
    assert result.prompt_logprobs == scores(resident)


@pytest.mark.gguf
def test_they_come_before_the_first_token_of_any_sequence(tmp_path):
    """The second sequence, which scores nothing, would be ready first."""
    path = save_tiny_architecture("llama", tmp_path / "model.gguf")
    with specdec.load(path, ctx_size=256, spec_type=(), parallel=4) as llm:
        assert llm.target.max_scored_tokens < len(LONG)
        stream = llm.stream(
            LONG, n=2, temperature=1.0, seed=1, max_tokens=4, prompt_logprobs=1, ignore_eos=True
        )
        known = [stream.prompt_logprobs is not None for _ in stream]
        assert len(known) >= 2
        assert all(known)


def test_prompts_of_a_batch(small_llm):
    prompts = [LONG, LONG[:9], PROMPT, [9]]
    options = {"max_tokens": 6, "prompt_logprobs": 2}
    results = small_llm.generate(prompts, **options)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.prompt_logprobs == scores(small_llm, prompt, 2)
    assert results[-1].prompt_logprobs == (None,)


@pytest.mark.gguf
@pytest.mark.parametrize(
    "options",
    [
        {"num_draft_tokens": 8},
        {"spec_type": (), "parallel": 1},
        {"exact": "off", "num_draft_tokens": 8},
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen35"])
def test_those_of_gguf_models_need_rows_of_logits(tmp_path, family, options):
    """A pass returns as many as memory is planned for: the tokens of a tree."""
    pytest.importorskip("llama_cpp")
    path = save_tiny_architecture(family, tmp_path / "m.gguf")
    with specdec.load(path, ctx_size=128, **options) as llm:
        limit, is_exact = llm.target.max_scored_tokens, llm.plan.exactness.is_exact
        actual = scores(llm, [*LONG, *LONG])
        for i in (1, 2, 20, len(LONG) - 1):
            row = llm.generate(LONG[:i], max_tokens=1, logprobs=1024).top_logprobs[0]
            for token, entry in actual[i].items():
                near = pytest.approx(row[token], abs=1e-2)
                assert entry.logprob == (row[token] if is_exact else near)
        assert limit < 2 * len(LONG)  # so that it took several passes


def test_a_beam_search_refuses_them_by_name(resident):
    with pytest.raises(specdec.SpecdecError, match="prompt_logprobs are not computed by a beam"):
        resident.generate(LONG, num_beams=3, prompt_logprobs=1)
    for value in (-1, True, 2000):
        with pytest.raises(specdec.SpecdecError, match="prompt_logprobs"):
            resident.generate(LONG, prompt_logprobs=value)


def test_ties_are_ranked_in_the_order_of_ids():
    scorer = PromptScorer([1, 3, 0], k=2, num_tokens=4)
    assert scorer.missing(0, 9) == [0, 1]
    scorer.score(0, np.array([1, 1, 1, 1, 9], dtype=np.float32))
    assert scorer.missing(0, 9) == [1]
    assert scorer.result is None
    scorer.score(1, np.array([0, 1, 2, 1], dtype=np.float32))
    _, first, second = scorer.result
    assert [(token, entry.rank) for token, entry in first.items()] == [(0, 1), (1, 2), (3, 4)]
    assert [(token, entry.rank) for token, entry in second.items()] == [(2, 1), (1, 2), (0, 4)]
