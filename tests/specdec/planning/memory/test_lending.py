"""What a plan foresees to be lent is what is lent to a process that takes what was assumed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from paper_models import PaperModel

from backends.contract.curve import ComputeCurve
from backends.contract.source import ModelCompute
from offload.residency.placement import Placement
from offload.residency.plan import hold_layers
from offload.ring.order import TicketOrder
from offload.units import GIB, MIB
from specdec.config import SpecConfig
from specdec.planning.memory.division import Divider, Shape
from specdec.planning.memory.lending import IN_USE_BYTES, TEXT_TOKENS
from specdec.planning.run_plan import RunPlan
from specdec.planning.search import Alternative, Figures, predict
from specdec.policy import spare_memory
from specdec.policy.spare_memory import SpareMemory
from specdec.run_options import RunOptions

CTX = 2048
BASE = 400 * MIB
OPTIONS = RunOptions("t", ctx_size=CTX, num_draft_tokens=4)
TARGET = PaperModel("t", 40, 20 * MIB)
CURVE = ComputeCurve.linear(0.1 / GIB, 0.01 / GIB)
FIGURES = Figures(1e9, ModelCompute(CURVE, 10 * MIB), None)
N_ROWS = 5


def chosen(total_bytes: int = 2 * GIB) -> Alternative:
    division = Divider(TARGET, None, OPTIONS, BASE).divide(total_bytes, Shape(4, draft_device=None))
    return predict(division, FIGURES, SpecConfig(num_draft_tokens=4))


class Target:
    """As much KV as for all nodes of a pass is to come."""

    held_bytes = unread_bytes = 0

    def kv_growth_bytes(self, n_tokens: int, n_new_texts: int = 0) -> int:
        return OPTIONS.target_nodes(4) * MIB // 4

    def hold(self, n_bytes: int) -> None:
        self.held_bytes = n_bytes


@pytest.mark.parametrize("n_tokens", [1, 500, CTX])
def test_it_is_what_unused_memory_would_hold(
    n_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = chosen()
    parts = dict(one.division.budget.table())
    unused = parts["available"] + parts["headroom"] + parts["target activations"]
    unused += parts["target KV cache"] - TARGET.kv_bytes(n_tokens, 0) - IN_USE_BYTES
    monkeypatch.setattr(spare_memory, "recent_peak_rss", lambda: 2 * GIB - unused)
    target: Any = Target()
    most_rows = OPTIONS.target_rows(4)
    activations = parts["target activations"]
    spare = SpareMemory(target, None, 2 * GIB, activation_bytes=activations, most_rows=most_rows)
    spare.lend(N_ROWS, n_tokens)
    placed = one.division.target
    held = one.decoding(n_tokens).target.placement
    n_held = placed.n_streamed_layers - held.n_streamed_layers
    assert n_held == target.held_bytes // TARGET.slot_bytes(placed) > 0


def test_a_shorter_text_leaves_more_to_layers_and_is_faster() -> None:
    one = chosen()
    short, long = one.decoding(1), one.decoding(CTX)
    assert short.target.placement.streamed_bytes < long.target.placement.streamed_bytes
    assert short.tokens_per_second > long.tokens_per_second >= one.tokens_per_second
    assert one.decoding(99 * CTX) == long, "there is no KV for more"


def test_the_layers_are_those_that_a_ring_holds() -> None:
    placed = Placement(TARGET.layers, 3)
    for n_layers in (0, 1, 7, 99):
        held = hold_layers(placed, n_layers).layers
        found = {i for i, layer in enumerate(held) if not layer.slot_bytes}
        assert found == TicketOrder(40, 3).chosen(n_layers)


def test_the_plan_tells_of_it() -> None:
    one = chosen()
    plan = RunPlan("as asked", one, (one,))
    values = json.loads(json.dumps(plan.to_dict()))
    streamed = plan.decoding.target.placement.streamed_bytes
    assert values["lent_bytes"] == values["streamed_bytes_per_pass"] - streamed > 0
    assert values["plain_tokens_per_second"] > one.plain_tokens_per_second
    (line,) = (line for line in plan.lines() if "unused memory" in line)
    assert line.startswith(f"while a text of {TEXT_TOKENS} tokens is decoded")


def test_where_all_is_in_memory_nothing_is_lent() -> None:
    one = chosen(8 * GIB)
    assert one.decoding(1).target.placement == one.division.target
    plan = RunPlan("as asked", one, (one,))
    assert plan.to_dict()["lent_bytes"] == 0
    assert "unused memory" not in "\n".join(plan.lines())
