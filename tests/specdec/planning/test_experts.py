"""Plans of mixtures: dense weights first, and an expert cache in the remaining memory."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import save_tiny_checkpoint

import specdec
from backends.contract.backend import UnsupportedModel
from backends.contract.curve import ComputeCurve
from backends.contract.source import BackendOptions, ModelCompute
from backends.hf.source import HfSource
from offload.placement.experts import ExpertCachePlan, LayerExperts, min_slots, slot_bytes
from specdec.models.names import resolve_model
from specdec.planning import measurements
from specdec.planning.gpu import on_gpu
from specdec.planning.measurements import measure_experts
from specdec.planning.memory.placement_planner import CpuPlacementPlanner
from specdec.planning.pass_simulation import PassSimulation
from specdec.planning.plan import plan_run
from specdec.planning.plan_report import expert_line
from specdec.policy.shared_pass import CandidateTree, choose_nodes
from specdec.verification.tree import DraftTree

COMPUTE = ModelCompute(ComputeCurve.linear(1e-12, 1e-13), 0)


@pytest.fixture
def source(checkpoint_factory) -> HfSource:
    return HfSource(checkpoint_factory("qwen3-moe"), BackendOptions())


@pytest.fixture
def placement_planner(source) -> CpuPlacementPlanner:
    return CpuPlacementPlanner(source, "auto")


def test_experts_are_no_part_of_the_layers(source) -> None:
    names = {record.name for layer in source.layers for record in layer.tensors}
    assert not any(".experts." in name for name in names)
    experts = [layer for layer in source.experts if layer is not None]
    assert [(len(x.tensors), len(x.tensors[0]), x.n_used) for x in experts] == [(12, 3, 3)] * 3


def test_all_experts_are_resident_if_they_fit(placement_planner) -> None:
    placement = placement_planner.place(placement_planner.all_bytes, 0)
    assert placement.experts is not None
    assert placement.experts.holds_all
    assert placement.n_moving_layers == 0
    assert placement.host_bytes == placement_planner.all_bytes
    assert placement_planner.parts(placement).host["expert cache"] == placement.experts.n_bytes


def test_the_cache_has_what_dense_weights_leave(placement_planner, source) -> None:
    item = slot_bytes(source.experts)
    for n_missing in (1, 10, 20):
        n_bytes = placement_planner.all_bytes - n_missing * item
        placement = placement_planner.place(n_bytes, 0)
        assert placement.experts is not None
        assert placement.n_streamed_layers == 0
        assert placement.experts.n_slots == 36 - n_missing
        assert placement.host_bytes <= n_bytes
        assert placement.n_moving_layers == 3


def test_the_minimum_is_a_ring_and_the_experts_of_one_token(placement_planner, source) -> None:
    minimum = placement_planner.min_bytes(0)
    placement = placement_planner.place(minimum, 0)
    assert placement.experts is not None
    assert placement.experts.n_slots >= min_slots(source.experts) == 3
    assert placement.host_bytes <= minimum


def test_a_larger_cache_reads_less_and_is_faster(placement_planner, source) -> None:
    """Storage of 1 MB/s: only reads count."""
    item, seconds, read = slot_bytes(source.experts), [], []
    for n_missing in (30, 20, 10, 0):
        placement = placement_planner.place(placement_planner.all_bytes - n_missing * item, 0)
        model = PassSimulation(placement, COMPUTE, 1e6)
        seconds.append(model.seconds(1))
        read.append(placement.streamed_bytes)
        assert model.seconds(8) > model.seconds(1)
        if n_missing:
            assert placement.streamed_bytes / 1e6 == pytest.approx(seconds[-1], rel=0.01)
            assert model.cost_model().seconds(8) > 1.5 * model.cost_model().seconds(1)
    assert seconds == sorted(seconds, reverse=True)
    assert read == sorted(read, reverse=True)
    assert read[-1] == 0


def test_missing_experts_take_longer_than_their_bytes(placement_planner) -> None:
    """Storage of 1 MB/s, and as long again for each byte."""
    placement = placement_planner.place(
        placement_planner.all_bytes - 20 * slot_bytes(placement_planner.source.experts), 0
    )
    read_only = PassSimulation(placement, COMPUTE, 1e6)
    model = replace(read_only, expert_seconds_per_byte=1e-6)
    assert model.expert_bytes_per_second == pytest.approx(5e5)
    assert model.seconds(1) == pytest.approx(2 * read_only.seconds(1), rel=0.01)
    assert model.cost_model().seconds(4) == pytest.approx(
        2 * read_only.cost_model().seconds(4), rel=0.01
    )


@pytest.mark.parametrize("storage", [1e6, 1e9], ids=["reads count", "arithmetic counts"])
def test_the_cost_of_a_prompt_is_near_its_simulation(placement_planner, storage: float) -> None:
    """Also where decoding all experts takes longer than reading them, whatever the tokens."""
    placement = placement_planner.place(
        placement_planner.all_bytes - 20 * slot_bytes(placement_planner.source.experts), 0
    )
    decoding = ModelCompute(ComputeCurve.linear(3e-9, 1e-11), 0)
    model = PassSimulation(placement, decoding, storage)
    cost = model.cost_model()
    assert cost.seconds(1) == pytest.approx(model.seconds(1))
    for num_tokens in (64, 128, 512):
        assert cost.seconds(num_tokens) == pytest.approx(model.seconds(num_tokens), rel=0.1)


def test_they_are_measured_where_they_do_not_all_fit(source, monkeypatch) -> None:
    monkeypatch.setattr(measurements, "missing_seconds_per_byte", lambda layers: 3e-9)
    assert measure_experts(source, 1, 1e9) == pytest.approx(2e-9)
    assert measure_experts(source, 1, 1e8) == 0.0  # short reads that are faster than long ones
    monkeypatch.setattr(measurements, "missing_seconds_per_byte", None)
    assert measure_experts(source, 1 << 40, 1e9) == 0.0


@pytest.mark.parametrize("num_seqs", [1, 4])
def test_a_node_costs_the_experts_that_it_adds(placement_planner, num_seqs: int) -> None:
    """The same holds in a pass that sequences share. Storage of 1 MB/s: only reads count."""
    item = slot_bytes(placement_planner.source.experts)
    placement = placement_planner.place(placement_planner.all_bytes - 20 * item, 0)
    assert placement.experts is not None
    cost = PassSimulation(placement, COMPUTE, 1e6).cost_model()

    def read_seconds(num_tokens: int) -> float:
        return sum(placement.experts.read_bytes(i, num_tokens) for i in range(3)) / 1e6

    added = (read_seconds(16) - read_seconds(1)) / 15  # the plan's cost is linear
    tree = DraftTree(0)
    tree.add(0, 1, 0.0)
    for share in (0.9, 1.1):  # its probability times this is the node's cost
        sure, hopeless = (
            CandidateTree(tree, np.array([1.0, p]), share * 0.5 / added) for p in (0.5, 0.0)
        )
        cached, _ = choose_nodes([sure, *[hopeless] * (num_seqs - 1)], cost)
        assert [len(nodes) for nodes in cached] == [1 + (share < 1), *[1] * (num_seqs - 1)]


def test_what_a_pass_is_expected_to_miss(source) -> None:
    expert_cache = ExpertCachePlan(source.experts, 18)
    experts = source.experts[0]
    assert isinstance(experts, LayerExperts)
    assert experts.n_hit(1) == 3
    assert experts.n_hit(2) == pytest.approx(3 * 2**0.7)
    assert experts.n_hit(100) == 12
    assert expert_cache.hit_rate == pytest.approx(1 - math.exp(-2.75))
    one_layer = 3 * experts.n_bytes / 12 * (1 - expert_cache.hit_rate)
    assert expert_cache.bytes_per_token == pytest.approx(3 * one_layer)
    # Neighbours share hardly any uncached expert; but no pass misses more than it uses.
    assert expert_cache.read_bytes(0, 8) == pytest.approx(one_layer * 8**0.93)
    assert ExpertCachePlan(source.experts, 1).read_bytes(0, 4) == experts.used_bytes(4)
    assert "18 of 36 experts in memory" in expert_line(expert_cache)
    assert "94% of those asked for" in expert_line(expert_cache)


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> Path:
    """Use the embedded pair's vocabulary, so that its draft fits."""
    pair = resolve_model("pair:target")
    directory = save_tiny_checkpoint("qwen3-moe", tmp_path, vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pair / name, directory / name)
    return directory


def test_a_mixture_is_planned_by_name(with_tokenizer: Path) -> None:
    plan = plan_run(with_tokenizer, memory_budget="2GiB")
    assert any("36 of 36 experts in memory" in line for line in plan.lines())
    actual = plan.to_dict()
    assert actual["n_experts"] == actual["n_expert_slots"] == 36
    assert actual["expected_expert_bytes_per_token"] == 0
    assert actual["memory"]["expert cache"] == 36 * actual["expert_slot_bytes"]


def test_a_gpu_is_refused_in_one_line(source) -> None:
    with pytest.raises(UnsupportedModel, match="mixtures of experts and recurrent models do: use"):
        on_gpu(source)


def test_a_draft_does_not_change_a_mixtures_output(with_tokenizer: Path) -> None:
    sequences = []
    for draft in (None, "pair:draft"):
        with specdec.load(with_tokenizer, draft, memory_budget="2GiB", exact="on") as llm:
            sequences.append(llm.generate("def main():", max_tokens=16, temperature=0).text)
    assert sequences[0] == sequences[1]
