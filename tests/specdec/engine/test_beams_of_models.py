"""Beam search against transformers' own, and on llama.cpp's cache against recomputed rows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from alone import own
from beams import search
from gguf_models import save_tiny_gguf
from table_backend import TableBackend
from transformers import AutoModelForCausalLM, GenerationConfig

from backends.hf.backend import TorchBackend
from specdec.sampling.beam_search import best_continuations
from specdec.sampling.gumbel import gumbel_at
from specdec.sampling.params import SamplingParams

VOCAB = 96  # for the tiny checkpoints
PAD = 1


@pytest.fixture(scope="module", params=range(3))
def pair(request, checkpoint_factory):
    """The same random model in both libraries."""
    folder = checkpoint_factory("llama", seed=request.param)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with TorchBackend.resident(folder) as backend:
        yield backend, model


def random_config(rng: np.random.Generator) -> dict[str, Any]:
    num_beams = int(rng.integers(2, 7))
    n_eos = int(rng.choice([0, 1, 2, 8, 30]))
    options: dict[str, Any] = {
        "num_beams": num_beams,
        "num_return_sequences": int(rng.integers(1, num_beams + 1)),
        "max_new_tokens": int(rng.integers(1, 18)),
        "length_penalty": float(rng.choice([-2.0, 0.0, 0.6, 1.0, 2.5])),
        "early_stopping": [True, False, "never"][int(rng.integers(3))],
        "eos_token_id": rng.choice(np.arange(1, VOCAB), n_eos, replace=False).tolist(),
        "pad_token_id": PAD,
    }
    if rng.random() < 0.3:
        options["repetition_penalty"] = 1.3
    if rng.random() < 0.3:
        options["no_repeat_ngram_size"] = 2
    if n_eos and rng.random() < 0.3:
        options["min_new_tokens"] = min(4, options["max_new_tokens"])
    return options


def expected_beams(model, config: GenerationConfig, prompt: list[int]):
    config.return_dict_in_generate = config.output_scores = True
    actual = model.generate(torch.tensor([prompt]), generation_config=config)
    return actual.sequences[:, len(prompt) :].tolist(), actual.sequences_scores.tolist()


def assert_same_beams(ours, model, config: GenerationConfig, prompt: list[int]) -> None:
    sequences, scores = expected_beams(model, config, prompt)
    # A place without a finished sequence has the bare prompt there, and is left out here.
    sequences = [s for s, score in zip(sequences, scores, strict=True) if score > -1e8]
    assert len(ours) == len(sequences)
    for (actual, score), expected, requested_score in zip(ours, sequences, scores, strict=False):
        n_tokens = len(actual.token_ids)
        assert list(actual.token_ids) == expected[:n_tokens]
        assert set(expected[n_tokens:]) <= {PAD, -1}  # the latter without an EOS
        assert score == pytest.approx(requested_score, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("seed", range(10))
def test_sequences_and_scores_equal_those_of_generate(seed, pair):
    backend, model = pair
    rng = np.random.default_rng(seed)
    options = random_config(rng)
    prompt = rng.integers(1, VOCAB, size=int(rng.integers(1, 9))).tolist()
    config = GenerationConfig(**options)
    params = SamplingParams.from_generation_config(config)
    ours = search(backend, prompt, params, params.eos_token_ids or ())
    assert_same_beams(ours, model, config, prompt)


@pytest.mark.parametrize("seed", range(6))
def test_beam_sampling_equals_generate_with_the_same_draws(seed, pair, monkeypatch):
    """torch.multinomial draws with our noise: the rest of the strategy must then agree."""
    backend, model = pair
    rng = np.random.default_rng(100 + seed)
    options = random_config(rng)
    options |= {"do_sample": True, "temperature": 0.8, "top_k": int(rng.choice([3, 20, 50]))}
    if seed % 2:
        options |= {"top_p": 0.8, "min_p": 0.05}
    prompt = rng.integers(1, VOCAB, size=5).tolist()
    position = itertools.count(len(prompt))

    def draw(probs: torch.Tensor, num_samples: int) -> torch.Tensor:
        log_p = torch.log(probs[0]).numpy()
        noise = gumbel_at(seed, next(position), np.arange(len(log_p)))
        taken = best_continuations(log_p + noise, num_samples)
        return torch.from_numpy(taken)[None]

    monkeypatch.setattr(torch, "multinomial", draw)
    config = GenerationConfig(**options)
    params = SamplingParams.from_generation_config(config).replace(seed=seed)
    ours = search(backend, prompt, params, params.eos_token_ids or ())
    assert_same_beams(ours, model, config, prompt)


@pytest.mark.gguf
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gguf_beams_equal_recomputed_ones(family, is_streamed, tmp_path):
    """A llama.cpp cache of trees is compared with one prompt for every row."""
    pytest.importorskip("llama_cpp")
    from backends.gguf.model import load_gguf_model
    from backends.llama.backend import LlamaBackend
    from offload.placement.placement import Placement

    model = load_gguf_model(save_tiny_gguf(family, tmp_path / "model.gguf", seed=4))
    options: dict[str, Any] = {
        "max_context": 60,
        "n_threads": 1,
        "cache_type_k": "f32",
        "cache_type_v": "f32",
        "flash_attention": False,
    }
    plan = Placement(tuple(model.layers), 2)
    loading = {"placement": plan, "load_mode": "stream"} if is_streamed else {"load_mode": "mmap"}
    with (
        LlamaBackend(model, load_mode="mmap", **options) as plain,
        LlamaBackend(model, max_nodes=80, **loading, **options) as tree,
    ):

        def rows(prefix: tuple[int, ...]) -> np.ndarray:
            own(plain).rollback(0)
            logits = own(plain).prefill(prefix).astype(np.float64)
            return np.exp(logits - logits.max())

        for seed, (num_beams, temperature) in enumerate(((3, 0.0), (5, 0.0), (3, 0.9))):
            params = SamplingParams(
                num_beams=num_beams,
                n=num_beams,
                max_tokens=12,
                temperature=temperature,
                seed=seed,
                length_penalty=0.7,
            )
            prompt = [3 + seed, 17, 5, 60]
            actual = search(tree, prompt, params, eos=tuple(range(2, VOCAB, 5)))
            expected = search(
                TableBackend(rows, VOCAB), prompt, params, eos=tuple(range(2, VOCAB, 5))
            )
            assert [item.token_ids for item, _ in actual] == [
                item.token_ids for item, _ in expected
            ]
            np.testing.assert_allclose(
                [score for _, score in actual], [score for _, score in expected], atol=1e-3
            )
