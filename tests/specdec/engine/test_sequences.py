"""Several sequences and beams of one prompt: seeds, chunks, logprobs, memory, contradictions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference_decoding import PROMPT

import specdec


@pytest.mark.slow
def test_several_sequences_are_those_of_neighbouring_seeds(resident):
    options = {"max_tokens": 12, "temperature": 1.0, "top_p": 0.9, "logprobs": 2}
    result = resident.generate(PROMPT, n=4, seed=2**64 - 2, **options)
    assert [o.seed for o in result.outputs] == [2**64 - 2, 2**64 - 1, 0, 1]
    for output in result.outputs:
        (alone,) = resident.generate(PROMPT, seed=output.seed, **options).outputs
        assert alone == output
    assert result.text == result.outputs[0].text
    assert result.stats.generated_tokens == sum(len(o.token_ids) for o in result.outputs)


def test_the_prompt_of_several_sequences_is_computed_once(resident, monkeypatch):
    """The exception is its last token, whose row gives every sequence its first token."""
    computed = []
    run, prompt = resident.target.forward, list(range(5, 45))

    def counting(batch):
        computed.append([len(item.token_ids) for item in batch if item.parents is None])
        return run(batch)

    resident.session.forget_prompt()
    monkeypatch.setattr(resident.target, "forward", counting)
    resident.generate(prompt, n=5, temperature=1.0, max_tokens=6, seed=3)
    assert computed[0] == [len(prompt)]
    assert sum(map(sum, computed[1:])) == 4


def test_chunks_of_several_sequences_say_whose_they_are(resident):
    stream = resident.stream(PROMPT, n=3, temperature=1.0, max_tokens=6, seed=3)
    sequences, indices = ["", "", ""], []
    for chunk in stream:
        sequences[chunk.index] += chunk.text
        indices.append(chunk.index)
    assert set(indices) == {0, 1, 2}
    assert sequences == [output.text for output in stream.result.outputs]


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
def test_top_logprobs_are_the_models_own(options, reference_model, resident):
    result = resident.generate(PROMPT, max_tokens=10, logprobs=4, repetition_penalty=1.3, **options)
    for output in result.outputs:
        ids = [*PROMPT, *output.token_ids]
        with torch.no_grad():
            log_p = reference_model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
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


def test_beams_that_drift_apart_too_far_get_the_remedy(reference_target):
    size = {"ctx_size": 64, "num_beams": 4, "beam_span": 1, "parallel": 1}
    with specdec.load(reference_target, spec_type=(), **size) as llm:
        with pytest.raises(specdec.SpecdecError, match=r"memory for 4: .*beam_span") as caught:
            llm.generate(PROMPT, num_beams=4, max_tokens=40)
        assert "\n" not in str(caught.value)
        assert len(llm.generate(PROMPT, max_tokens=4).token_ids) == 4  # still usable


def test_contradictions_are_named(reference_target, resident):
    with pytest.raises(specdec.SpecdecError, match="load it with num_beams=1000"):
        resident.generate(PROMPT, num_beams=1000)
    lossy = {"ctx_size": 64, "accept_threshold": 0.2, "num_beams": 2}
    with (
        specdec.load(reference_target, **lossy) as llm,
        pytest.raises(specdec.SpecdecError, match=r"accept_threshold 0.2 is a rule for draft"),
    ):
        llm.generate(PROMPT, num_beams=2)
    with specdec.load(reference_target, ctx_size=64, acceptance="rejection", num_beams=2) as llm:
        with pytest.raises(specdec.SpecdecError, match="acceptance 'rejection'"):
            llm.generate(PROMPT, num_beams=2)
        assert llm.generate(PROMPT, num_beams=2, speculative=False, max_tokens=2).token_ids
    with pytest.raises(specdec.SpecdecError, match="greedy decoding has one result"):
        resident.generate(PROMPT, n=2)
    with pytest.raises(specdec.SpecdecError, match="raise num_beams"):
        resident.generate(PROMPT, n=4, num_beams=3)
    with pytest.raises(specdec.SpecdecError, match="length_penalty is 2.0, but num_beams is 1"):
        resident.generate(PROMPT, length_penalty=2.0)


def test_memory_for_beams_is_planned(reference_target):
    options = {"spec_type": (), "ctx_size": 256, "kv_tokens": 256}
    plain = specdec.plan_run(reference_target, **options)
    beams = specdec.plan_run(reference_target, **options, num_beams=40, beam_span=24)
    before, after = dict(plain.parts), dict(beams.parts)
    # In blocks of 64: 256 + 40 * 24 tokens of 256 + 1, and padding rows of passes.
    assert after["target KV cache"] == 20 / 5 * before["target KV cache"]
    assert after["target activations"] > before["target activations"]


@pytest.mark.gguf
def test_a_gguf_target_follows_as_many_beams_as_llama_cpp_has_sequences():
    pytest.importorskip("llama_cpp")
    with pytest.raises(specdec.SpecdecError, match="num_beams is 300.* at most 255 beams"):
        specdec.plan_run("pair:target.gguf", num_beams=300)
