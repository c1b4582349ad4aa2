"""Every deterministic strategy, against `transformers.generate` on the same model in fp32.

Token ids are equal: in memory and streamed, plain and speculative.
"""

from __future__ import annotations

from typing import Any

import pytest
from forced_streaming import force_streaming
from reference_decoding import (
    BEAMS,
    PROMPT,
    assert_equal,
    config_of,
    generate,
    load_pair,
)

MANY_EOS = list(range(3, 259, 6))

STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, eos": {"eos_token_id": MANY_EOS},
    "no eos": {"eos_token_id": []},
    "max_length": {"max_length": len(PROMPT) + 7, "max_new_tokens": None},
    "min_new_tokens": {"eos_token_id": MANY_EOS, "min_new_tokens": 9},
    "min_length": {"eos_token_id": MANY_EOS, "min_length": len(PROMPT) + 9},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "repetition_penalty below 1": {"repetition_penalty": 0.8},
    "no_repeat_ngram_size 1": {"no_repeat_ngram_size": 1},
    "no_repeat_ngram_size 2": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[70], [80, 90], [5]], "repetition_penalty": 1.1},
    "sequence_bias": {"sequence_bias": [[[70], 4.0], [[70, 80], 20.0], [[9], -5.0]]},
    "suppress_tokens": {"suppress_tokens": list(range(100, 200))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(0, 259, 2))},
    "forced_bos_token_id, unused": {"forced_bos_token_id": 7},
    "forced_eos_token_id": {"forced_eos_token_id": 2},
    "forced_eos_token_id, several": {"forced_eos_token_id": [11, 2]},
    "exponential decay": {
        "exponential_decay_length_penalty": (3, 1.6),
        "eos_token_id": [2, 30],
    },
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True, "repetition_penalty": 1.2},
    "all penalties": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 4,
        "eos_token_id": MANY_EOS,
        "suppress_tokens": [70],
        "sequence_bias": [[[80], 2.0]],
    },
    "beams": {**BEAMS},
    "beams, eos": {**BEAMS, "eos_token_id": MANY_EOS},
    "beams, early stopping": {**BEAMS, "eos_token_id": MANY_EOS, "early_stopping": True},
    "beams, never early": {**BEAMS, "eos_token_id": MANY_EOS, "early_stopping": "never"},
    "beams, long": {**BEAMS, "eos_token_id": MANY_EOS, "length_penalty": 2.0},
    "beams, short": {**BEAMS, "eos_token_id": MANY_EOS, "length_penalty": -1.0},
    "beams, penalties": {**BEAMS, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "beams, min_new_tokens": {**BEAMS, "eos_token_id": MANY_EOS, "min_new_tokens": 8},
    "beams, forced eos": {**BEAMS, "forced_eos_token_id": 2},
    "beams, max_length": {**BEAMS, "max_length": len(PROMPT) + 5, "max_new_tokens": None},
    "beams, decay": {**BEAMS, "exponential_decay_length_penalty": (3, 1.3)},
}


@pytest.fixture(scope="module")
def streamed(reference_target, reference_draft):
    with pytest.MonkeyPatch.context() as patch:
        force_streaming(patch)
        with load_pair(reference_target, reference_draft) as llm:
            assert llm.plan.placement.n_streamed_layers == 3
            yield llm


@pytest.mark.slow_except(6)
@pytest.mark.parametrize("name", STRATEGIES)
def test_deterministic_strategies_equal_generate(name, reference_model, resident, streamed):
    config = config_of(STRATEGIES[name])
    expected = generate(reference_model, config)
    for llm, speculative in ((resident, False), (resident, True), (streamed, True)):
        result = llm.generate(PROMPT, generation_config=config, speculative=speculative)
        assert_equal(result.outputs, expected)
        has_drafted = result.stats.drafted_tokens > 0
        assert has_drafted == (speculative and config.num_beams is None)
        assert (result.stats.bytes_streamed > 0) == (llm is streamed)


def test_forced_bos_token_of_a_prompt_of_one_token(reference_model, resident):
    config = config_of({"forced_bos_token_id": 9, "begin_suppress_tokens": [9]})
    result = resident.generate([5], generation_config=config)
    assert_equal(result.outputs, generate(reference_model, config, [5]))
    assert result.token_ids[0] == 9


@pytest.mark.parametrize("beams", [{}, BEAMS], ids=["greedy", "beams"])
def test_stop_strings_equal_generate(beams, reference_model, resident):
    """transformers also looks for them in the prompt's end; here only the new text counts."""
    letters = {t: resident.tokenizer.decode([t]) for t in range(resident.tokenizer.n_tokens)}
    odd = [t for t, text in letters.items() if not (text.isprintable() and text.isascii())]
    options = {"suppress_tokens": [*odd, *(t for t, text in letters.items() if not text)]}
    config = config_of({**options, "repetition_penalty": 1.5, **beams})
    sequences = [o.text for o in resident.generate(PROMPT, generation_config=config).outputs]
    for start in (1, 4, 9):
        config.stop_strings = [sequences[0][start : start + 2], sequences[-1][7:9]]
        tokenizer = resident.tokenizer.hf_tokenizer
        expected = generate(reference_model, config, tokenizer=tokenizer)
        result = resident.generate(PROMPT, generation_config=config)
        assert_equal(result.outputs, expected)
        assert "stop" in {o.finish_reason for o in result.outputs}
        for output in result.outputs:
            assert not any(stop in output.text for stop in config.stop_strings)
