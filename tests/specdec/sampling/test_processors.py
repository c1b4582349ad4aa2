"""The numpy forms and the pipeline's order, against transformers itself."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from generation_configs import generation_config

from specdec.sampling.params import SamplingParams
from specdec.sampling.pipeline import LogitsPipeline
from specdec.sampling.processors import SamplingError
from specdec.sampling.sampler import Sampler

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

EOS = (3, 5)
PROMPT_LENGTH = 4
VOCAB = 64


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows(n: int, vocab: int = VOCAB) -> list[np.ndarray]:
    """Random logits: smooth, with ties, with ruled-out tokens, nearly one-hot, all equal."""
    made = []
    for seed in range(n):
        rng = np.random.default_rng(seed)
        row = rng.normal(scale=rng.choice([0.1, 1.0, 4.0, 20.0]), size=vocab).astype(np.float32)
        kind = seed % 5
        if kind == 1:
            row = np.round(row * 2) / 2  # many ties
        elif kind == 2:
            row[rng.random(vocab) < 0.6] = -np.inf
            row[rng.integers(vocab)] = 1.0
        elif kind == 3:
            row[rng.integers(vocab)] = 60.0
        elif kind == 4 and seed % 3 == 0:
            row[:] = 0.25
        made.append(row)
    return made


def prefixes(n: int, vocab: int = VOCAB) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, min(vocab, 6), size=1 + i % 12).astype(np.int64) for i in range(n)]


def assert_same(ours: np.ndarray, theirs: np.ndarray, row: np.ndarray) -> None:
    """Compare scores; among tied tokens any may be the one that stays.

    torch.sort is not stable, so which of several tied tokens top-p keeps at its border depends on
    the machine's sorting kernel. How many it keeps, and with which scores, does not.
    """
    assert ours.dtype == np.float32
    finite = row[np.isfinite(row)]
    if len(np.unique(finite)) < len(finite):
        ours, theirs = np.sort(ours), np.sort(theirs)
    np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(theirs), err_msg=str(row))
    np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6)


def generates_list(
    params: SamplingParams, prompt_length: int = PROMPT_LENGTH, eos_token_ids: tuple[int, ...] = EOS
) -> Any:
    """Return the processors that `generate` builds, by its private method on a reduced model."""
    config = generation_config(params)
    config._eos_token_tensor = torch.tensor(eos_token_ids) if eos_token_ids else None
    config.max_length = prompt_length + params.max_tokens
    model = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False),
        _merge_criteria_processor_list=lambda default, custom: default,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.GenerationMixin._get_logits_processor(
            model, config, input_ids_seq_length=prompt_length, device="cpu", model_kwargs={}
        )


def both(
    ours: LogitsPipeline, theirs: Any, row: np.ndarray, prefix: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    before = row.copy()
    mine = ours(prefix, row)
    np.testing.assert_array_equal(row, before)  # the caller's row is unchanged
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = theirs(torch.from_numpy(prefix)[None], torch.from_numpy(row.copy())[None])
    return mine, other[0].numpy()


OPTIONS = [
    {"temperature": 0.7},
    {"temperature": 1e-4},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_k": 99},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.99},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "typical_p": 0.2},
    {"temperature": 1.0, "typical_p": 0.9},
    {"temperature": 1.0, "epsilon_cutoff": 0.02},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"min_length": 6},
    {"min_tokens": 3},
    {"forced_bos_token_id": 9},
    {"forced_eos_token_id": (3, 5), "max_tokens": 4},
    {"exponential_decay_length_penalty": (2, 1.5)},
    {"suppress_tokens": (1, 2, 60)},
    {"begin_suppress_tokens": (1, 2)},
    {"renormalize_logits": True},
]


@pytest.mark.slow_except(6)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_step_equals_transformers_class(options: dict) -> None:
    params = SamplingParams(**options)
    ours = LogitsPipeline(params, prompt_length=PROMPT_LENGTH, eos_token_ids=EOS)
    theirs = generates_list(params)
    assert len(theirs) == 1
    for row, prefix in zip(rows(60), prefixes(60), strict=True):
        assert_same(*both(ours, theirs, row, prefix), row)


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        (lambda scores: None, "returned None, must be a float tensor"),
        (lambda scores: scores.numpy(), "must be a float tensor"),
        (lambda scores: scores.long(), "must be a float tensor"),
        (lambda scores: scores[:, :3], r"shape \[1, 3\], must be \[1, 8\]"),
        (lambda scores: scores[0], r"shape \[8\], must be \[1, 8\]"),
    ],
)
def test_what_a_processor_of_the_caller_returns_is_checked(returned: Any, match: str) -> None:
    pipeline = LogitsPipeline(SamplingParams(), extra=[lambda _, scores: returned(scores)])
    with pytest.raises(SamplingError, match=match):
        pipeline([1], np.zeros(8, dtype=np.float32))


def test_nan_is_replaced() -> None:
    params = SamplingParams(remove_invalid_values=True)
    row = np.array([np.nan, np.inf, -np.inf, 1.5], dtype=np.float32)
    ours, theirs = LogitsPipeline(params, prompt_length=1), generates_list(params, 1, ())
    assert_same(*both(ours, theirs, row, np.array([0])), row)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "typical_p"])
def test_warpers_agree_on_a_large_vocabulary(name: str) -> None:
    value = {"top_k": 50, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9}[name]
    params = SamplingParams(temperature=1.0, **{name: value})
    ours, theirs = LogitsPipeline(params, prompt_length=1), generates_list(params, 1, ())
    n_different = 0
    for row in rows(10, vocab=30_000):
        mine, other = both(ours, theirs, row, np.array([0]))
        n_different += abs(int(np.isneginf(mine).sum()) - int(np.isneginf(other).sum()))
    # float32 sums over 30 000 terms round differently: a border token in a million may differ
    assert n_different <= 3


FULL = SamplingParams(
    temperature=0.8, top_h=0.9, top_k=40, top_p=0.97, min_p=0.001, typical_p=0.98,
    epsilon_cutoff=0.0005, eta_cutoff=0.0005, repetition_penalty=1.2, no_repeat_ngram_size=3,
    min_tokens=2, min_length=6, bad_words_ids=((7,), (1, 2), (3,)),
    sequence_bias=(((4,), 1.5), ((1, 5), -2.0)), suppress_tokens=(11,),
    begin_suppress_tokens=(12,), forced_bos_token_id=13, forced_eos_token_id=(3,), max_tokens=6,
    exponential_decay_length_penalty=(2, 1.2),
    renormalize_logits=True,
)  # fmt: skip
LISTS = [
    FULL,
    FULL.replace(temperature=0.0),
    # the numbers that replace -inf in remove_invalid_values overflow in the decay penalty
    FULL.replace(remove_invalid_values=True, exponential_decay_length_penalty=None),
    FULL.replace(temperature=1.0, forced_bos_token_id=None, renormalize_logits=False),
    SamplingParams(temperature=0.6, top_p=0.9, top_k=50),
    SamplingParams(),
    SamplingParams(temperature=1.0),
]


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("params", LISTS, ids=lambda p: f"T={p.temperature} {p.top_p}")
@pytest.mark.parametrize("prompt_length", [1, 4])
def test_the_pipeline_is_the_one_generate_builds(
    params: SamplingParams, prompt_length: int
) -> None:
    theirs = generates_list(params, prompt_length)
    ours = LogitsPipeline(params, prompt_length=prompt_length, eos_token_ids=EOS)
    for row, prefix in zip(rows(60), prefixes(60), strict=True):
        if len(prefix) >= prompt_length:
            assert_same(*both(ours, theirs, row, prefix), row)


def test_extra_processors_come_before_the_warpers_and_after_the_rest() -> None:
    seen = []

    class Lift(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(scores[0, 0].item())
            scores = scores.clone()
            scores[:, 6] += 100.0
            return scores

    params = SamplingParams(temperature=0.5, repetition_penalty=2.0, seed=1)
    sampler = Sampler(params, n_tokens=8, logits_processors=[Lift()])
    assert sampler.choose([0], np.ones(8, dtype=np.float32), 0) == 6
    assert seen == [0.5], "after the penalty, before the temperature"


@pytest.fixture(scope="module")
def tiny_model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.6,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2, "bad_words_ids": [[7], [3, 4]]},
        {"min_tokens": 10, "suppress_tokens": [5, 6], "begin_suppress_tokens": [9]},
        {"forced_eos_token_id": [2], "exponential_decay_length_penalty": (3, 1.4)},
        {"sequence_bias": [[[8], 3.0]], "repetition_penalty": 1.2, "renormalize_logits": True},
    ],
    ids=str,
)
def test_greedy_text_equals_generate(options: dict, tiny_model: Any) -> None:
    model = tiny_model
    params = SamplingParams(max_tokens=16, **options)
    prompt = [1, 11, 12, 13]
    expected = model.generate(torch.tensor([prompt]), generation_config=generation_config(params))[
        0
    ].tolist()
    sampler = Sampler(params, n_tokens=40, eos_token_ids=(2,), prompt_length=len(prompt))
    text = list(prompt)
    with torch.no_grad():
        while len(text) < len(prompt) + 16:
            logits = model(torch.tensor([text])).logits[0, -1].numpy()
            text.append(sampler.choose(text, logits, position=len(text)))
            if text[-1] in sampler.stop_tokens:
                break
    assert text == expected


def test_common_samplers_need_neither_torch_nor_transformers() -> None:
    program = """
import sys
import numpy as np
from specdec.sampling.params import SamplingParams
from specdec.drafters import NgramDrafter
from specdec.sampling.sampler import Sampler
import specdec.verification.acceptance, specdec.metrics.stats, specdec.text.detokenizer
params = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, typical_p=0.9, seed=1,
                        repetition_penalty=1.1, no_repeat_ngram_size=2, min_tokens=2)
sampler = Sampler(params, n_tokens=20, eos_token_ids=(2,), prompt_length=1)
sampler.choose([1, 2], np.zeros(20, dtype=np.float32), 2)
assert not {"torch", "transformers"} & set(sys.modules), "imported"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
