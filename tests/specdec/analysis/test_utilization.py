"""Model FLOPs utilisation: FLOPs against torch's own counter, the peak against its definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import specdec
from backends.contract.curve import ComputeCurve
from backends.contract.source import BackendOptions, ModelCompute
from specdec.analysis.utilization import model_flops
from specdec.metrics.stats import GenerationStats

CURVE = ComputeCurve((1, 4, 16), (1e-9, 1e-9, 8e-9), (1e-9, 1e-9, 8e-9))


@pytest.fixture
def model(checkpoint_factory) -> Path:
    return checkpoint_factory("llama")


def test_the_peak_is_that_of_the_fastest_measured_product(model: Path) -> None:
    flops = model_flops(model, BackendOptions(), ModelCompute(CURVE, 0))
    # fp32: a byte is a quarter of a weight, two FLOPs each; 4 rows in 1 ns are the fastest.
    assert flops.peak_flops_per_second == pytest.approx(2 / 4 * 4 / 1e-9)


@pytest.mark.parametrize("context", [1, 9, 40])
def test_the_flops_of_a_token_are_those_that_torch_counts(model: Path, context: int) -> None:
    flops = model_flops(model, BackendOptions(), ModelCompute(CURVE, 0))
    net = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    ids = torch.zeros(1, context, dtype=torch.long)
    with torch.no_grad():
        cache = net(ids[:, :-1], use_cache=True).past_key_values if context > 1 else None
        with FlopCounterMode(display=False) as counter:
            net(ids[:, -1:], past_key_values=cache, use_cache=True)
    rotary = counter.get_flop_counts().get("LlamaForCausalLM.model.rotary_emb", {})
    counted = counter.get_total_flops() - sum(rotary.values())
    assert flops.of_tokens(1, context) == counted
    assert flops.of_tokens(7, context) == 7 * counted


def test_a_model_without_sizes_in_its_headers_has_no_size(tmp_path: Path) -> None:
    assert model_flops(tmp_path, BackendOptions(), ModelCompute(CURVE, 0)) is None


def test_utilization_is_of_the_peak_and_0_where_that_is_not_known() -> None:
    stats = GenerationStats(model_flops=100, decode_seconds=2.0, peak_flops_per_second=200.0)
    assert stats.model_flops_utilization == 0.25
    assert stats.to_dict()["model_flops_utilization"] == 0.25
    assert GenerationStats(model_flops=100, decode_seconds=2.0).model_flops_utilization == 0.0


def test_rejected_tokens_do_not_count() -> None:
    """Plain and speculative decoding of one output need the same FLOPs, whatever was drafted."""
    with specdec.load("pair:target", "pair:draft", memory_budget="4GiB") as llm:
        plain = llm.generate([1, 2, 3], max_tokens=12, speculative=False, ignore_eos=True).stats
        spec = llm.generate([1, 2, 3], max_tokens=12, ignore_eos=True).stats
        pair = llm.generate([1, 2, 3], max_tokens=12, n=2, temperature=1.0, ignore_eos=True).stats
        flops = llm.session.statistics.model_flops
    assert plain.generated_tokens == spec.generated_tokens == 12
    assert plain.model_flops == spec.model_flops == flops.of_tokens(11, 3 + 5)
    assert pair.model_flops == flops.of_tokens(23, 3 + 5)
    assert 0 < plain.model_flops_utilization < 1


def test_positions_of_beams_count_once_however_many_sequences_are_wanted() -> None:
    how = {"max_tokens": 12, "num_beams": 2, "ignore_eos": True}
    with specdec.load("pair:target", memory_budget="4GiB", num_beams=2) as llm:
        item, two = (llm.generate([1, 2, 3], n=n, **how).stats for n in (1, 2))
        flops = llm.session.statistics.model_flops
    assert item.generated_tokens == two.generated_tokens == 12
    assert item.model_flops == two.model_flops == flops.of_tokens(11, 3 + 5)
