"""Planned pinnable memory equals the memory pinned by a process with the assumed usage."""

from __future__ import annotations

import json
from typing import Any

import pytest
from paper_models import PaperModel

from backends.contract.curve import ComputeCurve
from backends.contract.source import ModelCompute
from offload.placement.placement import Placement
from offload.placement.plan import pin_layers_of
from offload.ring.order import ReadOrder
from offload.units import GIB, MIB
from specdec.config import SpecConfig
from specdec.planning.measurements import Measurements
from specdec.planning.memory.memory_plan import Shape
from specdec.planning.memory.pinnable import IN_USE_BYTES, SEQUENCE_TOKENS
from specdec.planning.memory.planner import MemoryPlanner
from specdec.planning.run_plan import RunPlan
from specdec.planning.search import Alternative, predict
from specdec.policy import opportunistic_layers
from specdec.policy.opportunistic_layers import OpportunisticLayers
from specdec.run_options import RunOptions

CTX = 2048
BASE = 400 * MIB
OPTIONS = RunOptions("t", ctx_size=CTX, num_draft_tokens=4)
TARGET = PaperModel("t", 40, 20 * MIB)
CURVE = ComputeCurve.linear(0.1 / GIB, 0.01 / GIB)
SIZES = Measurements(1e9, ModelCompute(CURVE, 10 * MIB), None)
NUM_TOKENS = 5


def chosen(total_bytes: int = 2 * GIB) -> Alternative:
    memory_plan = MemoryPlanner(TARGET, None, OPTIONS, BASE).divide(
        total_bytes, Shape(4, draft_device=None)
    )
    return predict(memory_plan, SIZES, SpecConfig(num_draft_tokens=4))


class Target:
    """A target with as much KV as all nodes of a pass need."""

    pinned_bytes = unread_bytes = 0

    def kv_growth_bytes(self, n_tokens: int, num_new_seqs: int = 0) -> int:
        return OPTIONS.target_nodes(4) * MIB // 4

    def set_pinned_bytes(self, n_bytes: int) -> None:
        self.pinned_bytes = n_bytes


@pytest.mark.parametrize("n_tokens", [1, 500, CTX])
def test_it_is_what_unused_memory_would_hold(
    n_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = chosen()
    parts = dict(item.memory_plan.budget.table())
    unused = parts["available"] + parts["headroom"] + parts["target activations"]
    unused += parts["target KV cache"] - TARGET.kv_bytes(n_tokens, 0) - IN_USE_BYTES
    monkeypatch.setattr(opportunistic_layers, "recent_peak_rss", lambda: 2 * GIB - unused)
    target: Any = Target()
    max_num_tokens = OPTIONS.max_target_tokens(4)
    activations = parts["target activations"]
    opportunistic = OpportunisticLayers(
        target, None, 2 * GIB, activation_bytes=activations, max_num_tokens=max_num_tokens
    )
    opportunistic.pin_after_decode(NUM_TOKENS, n_tokens)
    placement = item.memory_plan.target
    pinned = item.decoding(n_tokens).target.placement
    num_pinned = placement.n_streamed_layers - pinned.n_streamed_layers
    assert num_pinned == target.pinned_bytes // TARGET.slot_bytes(placement) > 0


def test_a_shorter_sequence_leaves_more_memory_to_layers_and_is_faster() -> None:
    item = chosen()
    short, long = item.decoding(1), item.decoding(CTX)
    assert short.target.placement.streamed_bytes < long.target.placement.streamed_bytes
    assert short.tokens_per_second > long.tokens_per_second >= item.tokens_per_second
    assert item.decoding(99 * CTX) == long, "there is no KV for more"


def test_the_layers_are_those_that_a_ring_holds() -> None:
    placement = Placement(TARGET.layers, 3)
    for n_layers in (0, 1, 7, 99):
        pinned = pin_layers_of(placement, n_layers).layers
        actual = {i for i, layer in enumerate(pinned) if not layer.slot_bytes}
        assert actual == ReadOrder(40, 3).chosen(n_layers)


def test_the_plan_tells_of_it() -> None:
    item = chosen()
    plan = RunPlan("as asked", item, (item,))
    values = json.loads(json.dumps(plan.to_dict()))
    streamed = plan.decoding.target.placement.streamed_bytes
    assert values["pinnable_bytes"] == values["streamed_bytes_per_pass"] - streamed > 0
    assert values["plain_tokens_per_second"] > item.plain_tokens_per_second
    (line,) = (line for line in plan.lines() if "unused memory" in line)
    assert line.startswith(f"while a sequence of {SEQUENCE_TOKENS} tokens is decoded")


def test_nothing_is_pinned_if_all_is_resident() -> None:
    item = chosen(8 * GIB)
    assert item.decoding(1).target.placement == item.memory_plan.target
    plan = RunPlan("as asked", item, (item,))
    assert plan.to_dict()["pinnable_bytes"] == 0
    assert "unused memory" not in "\n".join(plan.lines())
