"""Every decoding strategy, against `transformers.generate` on the same model in fp32.

Deterministic ones must give equal token ids: in memory and streamed, plain and speculative.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from forced_streaming import force_streaming
from scipy import stats
from tiny_pair import VOCAB, save_model
from transformers import AutoModelForCausalLM, GenerationConfig

import specdec
from specdec.config import SamplingParams
from specdec.sampling import Sampler

PROMPT = [70, 80, 90, 100, 70, 80]
N_TOKENS = 16
PAD = 1
MANY_EOS = list(range(3, 259, 6))
BEAMS = {"num_beams": 3, "num_return_sequences": 3}

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
def target(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("target"), seed=0, max_position_embeddings=512)


@pytest.fixture(scope="module")
def model(target):
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("draft"), seed=1, num_hidden_layers=1)


@pytest.fixture(scope="module")
def resident(target, draft):
    with specdec.load(target, draft, ctx_size=64, num_draft_tokens=8, num_beams=3) as llm:
        assert llm.plan.residency.n_streamed_layers == 0
        yield llm


@pytest.fixture(scope="module")
def streamed(target, draft):
    with pytest.MonkeyPatch.context() as patch:
        force_streaming(patch)
        with specdec.load(target, draft, ctx_size=64, num_draft_tokens=8, num_beams=3) as llm:
            assert llm.plan.residency.n_streamed_layers == 3
            yield llm


def config_of(options: dict[str, Any]) -> GenerationConfig:
    return GenerationConfig(
        **{"max_new_tokens": N_TOKENS, "pad_token_id": PAD, "eos_token_id": 2, **options}
    )


def generate(model, config: GenerationConfig, prompt=PROMPT, **more: Any) -> list[list[int]]:
    """transformers' new tokens; padding behind the end of a sequence is still there."""
    found = model.generate(torch.tensor([prompt]), generation_config=config, **more)
    return found[:, len(prompt) :].tolist()


def assert_equal(outputs, expected: list[list[int]]) -> None:
    assert len(outputs) == len(expected)
    for output, wanted in zip(outputs, expected, strict=True):
        n_tokens = len(output.token_ids)
        assert list(output.token_ids) == wanted[:n_tokens]
        assert set(wanted[n_tokens:]) <= {PAD, -1}  # the latter without an EOS


@pytest.mark.parametrize("name", STRATEGIES)
def test_deterministic_strategies_equal_generate(name, model, resident, streamed):
    config = config_of(STRATEGIES[name])
    expected = generate(model, config)
    for llm, speculative in ((resident, False), (resident, True), (streamed, True)):
        result = llm.generate(PROMPT, generation_config=config, speculative=speculative)
        assert_equal(result.outputs, expected)
        has_drafted = result.stats.drafted_tokens > 0
        assert has_drafted == (speculative and config.num_beams is None)
        assert (result.stats.bytes_streamed > 0) == (llm is streamed)


def test_forced_bos_token_of_a_prompt_of_one_token(model, resident):
    config = config_of({"forced_bos_token_id": 9, "begin_suppress_tokens": [9]})
    result = resident.generate([5], generation_config=config)
    assert_equal(result.outputs, generate(model, config, [5]))
    assert result.token_ids[0] == 9


@pytest.mark.parametrize("beams", [{}, BEAMS], ids=["greedy", "beams"])
def test_stop_strings_equal_generate(beams, model, resident):
    """transformers looks for them in the prompt's end, too; here they are in the new text only."""
    letters = {t: resident.tokenizer.decode([t]) for t in range(resident.tokenizer.n_tokens)}
    odd = [t for t, text in letters.items() if not (text.isprintable() and text.isascii())]
    options = {"suppress_tokens": [*odd, *(t for t, text in letters.items() if not text)]}
    config = config_of({**options, "repetition_penalty": 1.5, **beams})
    texts = [o.text for o in resident.generate(PROMPT, generation_config=config).outputs]
    for start in (1, 4, 9):
        config.stop_strings = [texts[0][start : start + 2], texts[-1][7:9]]
        tokenizer = resident.tokenizer.hf_tokenizer
        expected = generate(model, config, tokenizer=tokenizer)
        result = resident.generate(PROMPT, generation_config=config)
        assert_equal(result.outputs, expected)
        assert "stop" in {o.finish_reason for o in result.outputs}
        for output in result.outputs:
            assert not any(stop in output.text for stop in config.stop_strings)


SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6, "top_k": 0},
    "top-k": {"temperature": 0.8, "top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.15},
    "typical": {"typical_p": 0.6},
    "top-h": {"top_h": 0.5},
    "epsilon": {"epsilon_cutoff": 0.02},
    "eta": {"eta_cutoff": 0.02},
    "penalised": {"top_k": 8, "repetition_penalty": 1.5, "suppress_tokens": [4, 5, 6]},
}
N_DRAWS = 400
REJECT_BELOW = 1e-6  # our seeds are fixed: a correct sampler passes always


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_strategies_have_generates_distribution(name, model, resident):
    """Pairs of the first two tokens: their exact chances from the model's own probabilities.

    The chances come from `generate`'s processed scores, so that every processor is transformers'.
    """
    config = config_of(
        {"do_sample": True, "max_new_tokens": 2, "eos_token_id": [], **SAMPLED[name]}
    )
    chances = exact_pairs(model, config)
    params = SamplingParams.from_generation_config(config)
    counts: dict[tuple[int, ...], int] = dict.fromkeys(chances, 0)
    rows = {(): first_row(resident.target)}
    for seed in range(N_DRAWS):
        pair = draw_pair(resident.target, params.replace(seed=seed), rows)
        counts[pair] += 1  # KeyError: a pair that cannot be
        if seed % 100 == 0:  # that is what a generation does with the same seed
            assert resident.generate(PROMPT, params, seed=seed).token_ids == pair
    likely = sorted(chances, key=lambda pair: -chances[pair])
    likely = [pair for pair in likely if chances[pair] * N_DRAWS >= 5]
    rest = 1.0 - sum(chances[pair] for pair in likely)
    observed = [counts[pair] for pair in likely]
    expected = [chances[pair] * N_DRAWS for pair in likely]
    if rest * N_DRAWS > 1e-6:
        observed.append(N_DRAWS - sum(observed))
        expected.append(rest * N_DRAWS)
    if len(observed) > 1:
        assert stats.chisquare(observed, expected).pvalue > REJECT_BELOW


def first_row(target) -> np.ndarray:
    target.rollback(0)
    return target.prefill(PROMPT)


def draw_pair(target, params: SamplingParams, rows: dict) -> tuple[int, ...]:
    """Two tokens; rows of logits are computed once for each prefix."""
    sampler = Sampler(params, n_tokens=VOCAB, prompt_length=len(PROMPT))
    tokens: tuple[int, ...] = ()
    while len(tokens) < 2:
        if tokens not in rows:
            target.rollback(0)
            rows[tokens] = target.prefill([*PROMPT, *tokens])
        prefix = [*PROMPT, *tokens]
        tokens = (*tokens, sampler.choose(prefix, rows[tokens], position=len(prefix)))
    return tokens


def exact_pairs(model, config: GenerationConfig) -> dict[tuple[int, ...], float]:
    one = GenerationConfig(
        **{**config.to_diff_dict(), "output_scores": True, "return_dict_in_generate": True}
    )
    one.max_new_tokens = 1

    def next_probs(prompts: list[list[int]]) -> np.ndarray:
        with torch.no_grad():
            scores = model.generate(torch.tensor(prompts), generation_config=one).scores[0]
        return scores.double().softmax(-1).numpy()

    first = next_probs([PROMPT])[0]
    alive = np.flatnonzero(first).tolist()
    second = next_probs([[*PROMPT, token] for token in alive])
    return {
        (one, int(two)): float(first[one] * row[two])
        for one, row in zip(alive, second, strict=True)
        for two in np.flatnonzero(row)
    }


def test_several_sequences_are_those_of_neighbouring_seeds(resident):
    options = {"max_tokens": 12, "temperature": 1.0, "top_p": 0.9, "logprobs": 2}
    result = resident.generate(PROMPT, n=4, seed=2**64 - 2, **options)
    assert [o.seed for o in result.outputs] == [2**64 - 2, 2**64 - 1, 0, 1]
    for output in result.outputs:
        alone = resident.generate(PROMPT, seed=output.seed, **options)
        assert alone.outputs == (output,)
    assert result.text == result.outputs[0].text
    assert result.stats.generated_tokens == sum(len(o.token_ids) for o in result.outputs)


def test_the_prompt_of_several_sequences_is_computed_once(resident, monkeypatch):
    computed = []
    prefill = resident.target.prefill

    def counting(token_ids):
        computed.extend(token_ids)
        return prefill(token_ids)

    resident.forget_prompt()
    monkeypatch.setattr(resident.target, "prefill", counting)
    resident.generate(PROMPT, n=5, temperature=1.0, max_tokens=6, seed=3)
    assert computed == PROMPT


def test_chunks_of_several_sequences_say_whose_they_are(resident):
    stream = resident.stream(PROMPT, n=3, temperature=1.0, max_tokens=6, seed=3)
    texts, indices = ["", "", ""], []
    for chunk in stream:
        texts[chunk.index] += chunk.text
        indices.append(chunk.index)
    assert indices == sorted(indices)
    assert texts == [output.text for output in stream.result.outputs]


def test_beams_come_whole_and_name_their_seed(resident):
    stream = resident.stream(PROMPT, num_beams=3, n=2, max_tokens=8)
    chunks = list(stream)
    assert [chunk.index for chunk in chunks] == [0, 1]
    assert [chunk.token_ids for chunk in chunks] == [o.token_ids for o in stream.result.outputs]
    sampled = resident.generate(PROMPT, num_beams=3, n=2, max_tokens=8, temperature=0.9)
    again = resident.generate(
        PROMPT, num_beams=3, n=2, max_tokens=8, temperature=0.9, seed=sampled.outputs[0].seed
    )
    assert again.outputs == sampled.outputs
    first, second = stream.result.outputs
    assert first.score > second.score
    assert first.seed is None


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3}, {"num_beams": 3, "n": 2}])
def test_top_logprobs_are_the_models_own(options, model, resident):
    result = resident.generate(PROMPT, max_tokens=10, logprobs=4, repetition_penalty=1.3, **options)
    for output in result.outputs:
        ids = [*PROMPT, *output.token_ids]
        with torch.no_grad():
            log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
        assert len(output.top_logprobs) == len(output.token_ids)
        for i, (token, top) in enumerate(zip(output.token_ids, output.top_logprobs, strict=True)):
            row = log_p[len(PROMPT) + i - 1]
            likeliest = np.argsort(-row, kind="stable")[:4].tolist()
            assert list(top) == [*likeliest, *([token] if token not in likeliest else [])]
            np.testing.assert_allclose(list(top.values()), row[list(top)], atol=1e-4)
            assert top[token] == pytest.approx(output.logprobs[i])


def test_a_beams_score_follows_from_its_logprobs(resident):
    result = resident.generate(
        PROMPT, num_beams=3, n=3, max_tokens=7, logprobs=True, length_penalty=0.5
    )
    for output in result.outputs:
        length = len(output.token_ids)
        assert output.score == pytest.approx(sum(output.logprobs) / length**0.5, rel=1e-4)
        assert output.top_logprobs is None


def test_beams_that_drift_apart_too_far_are_told_the_remedy(target):
    with specdec.load(target, ctx_size=64, spec_type=(), num_beams=4, beam_span=1) as llm:
        with pytest.raises(specdec.SpecdecError, match=r"room for 4: .*beam_span") as caught:
            llm.generate(PROMPT, num_beams=4, max_tokens=40)
        assert "\n" not in str(caught.value)
        assert len(llm.generate(PROMPT, max_tokens=4).token_ids) == 4  # still usable


def test_contradictions_are_named(target, resident):
    with pytest.raises(specdec.SpecdecError, match="load it with num_beams=1000"):
        resident.generate(PROMPT, num_beams=1000)
    lossy = {"ctx_size": 64, "accept_threshold": 0.2, "num_beams": 2}
    with (
        specdec.load(target, **lossy) as llm,
        pytest.raises(specdec.SpecdecError, match=r"accept_threshold 0.2 is a rule for draft"),
    ):
        llm.generate(PROMPT, num_beams=2)
    with specdec.load(target, ctx_size=64, acceptance="rejection", num_beams=2) as llm:
        with pytest.raises(specdec.SpecdecError, match="acceptance 'rejection'"):
            llm.generate(PROMPT, num_beams=2)
        assert llm.generate(PROMPT, num_beams=2, speculative=False, max_tokens=2).token_ids
    with pytest.raises(specdec.SpecdecError, match="greedy decoding has one result"):
        resident.generate(PROMPT, n=2)
    with pytest.raises(specdec.SpecdecError, match="raise num_beams"):
        resident.generate(PROMPT, n=4, num_beams=3)
    with pytest.raises(specdec.SpecdecError, match="length_penalty is 2.0, but num_beams is 1"):
        resident.generate(PROMPT, length_penalty=2.0)


def test_memory_for_beams_is_planned(target):
    plain = specdec.plan_run(target, spec_type=(), ctx_size=256)
    beams = specdec.plan_run(target, spec_type=(), ctx_size=256, num_beams=8, beam_span=128)
    before, after = dict(plain.parts), dict(beams.parts)
    assert after["target KV cache"] == 5 * before["target KV cache"] // 2  # 256 + 1024 of 256 + 1
    assert after["target activations"] > before["target activations"]


@pytest.mark.gguf
def test_a_gguf_target_follows_as_many_beams_as_llama_cpp_has_sequences():
    pytest.importorskip("llama_cpp")
    with pytest.raises(specdec.SpecdecError, match="num_beams is 300.* at most 255 beams"):
        specdec.plan_run("pair:target.gguf", num_beams=300)
