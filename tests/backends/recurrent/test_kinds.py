"""Recurrences: a token's bits depend on the tokens before it alone, in chains and in trees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from backends.packed.kernels import has_numba
from backends.recurrent.convolution import Convolution
from backends.recurrent.delta import DeltaRule
from backends.recurrent.functions import mamba2
from backends.recurrent.kinds import Recurrence, Rows
from backends.recurrent.mamba import Mamba1, Mamba2
from backends.recurrent.walks import depth_first, max_slots

N_TOKENS = 23
HEADS, KEY_HEADS, DIM = 6, 2, 16
GDN, KDA = qwen.torch_recurrent_gated_delta_rule, kimi.recurrent_kimi_delta_attention


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + len(shape)))


def delta_rows(n_key_heads: int, by_channel: bool) -> Rows:
    decay = -random(N_TOKENS, HEADS, *([DIM] if by_channel else [])).abs()
    query, key = random(N_TOKENS, n_key_heads, DIM), random(N_TOKENS, n_key_heads, DIM, seed=1)
    value, beta = random(N_TOKENS, HEADS, DIM, seed=2), random(N_TOKENS, HEADS, seed=3).sigmoid()
    return query, key, value, decay, beta


def compiled(normalises: bool) -> Recurrence:
    from backends.recurrent.delta_by_numba import CompiledDeltaRule

    return CompiledDeltaRule(normalises)


_MAMBA2 = (
    random(N_TOKENS, 4, DIM),
    random(N_TOKENS, 4),
    random(N_TOKENS, 2, 8),
    random(N_TOKENS, 2, 8, seed=4),
)
_OF_MAMBA2 = (-random(4).abs(), random(4), random(4), (0.0, float("inf")))
_MAMBA1 = (
    *(random(N_TOKENS, 24, seed=i) for i in range(3)),
    random(N_TOKENS, 8),
    random(N_TOKENS, 8, seed=5),
)
KINDS: dict[str, tuple[Recurrence, Rows]] = {
    "convolution": (Convolution(random(40, 4), random(40), "silu"), (random(N_TOKENS, 40),)),
    "convolution of two": (Convolution(random(40, 2), None, None), (random(N_TOKENS, 40),)),
    "gdn": (DeltaRule(GDN, True), delta_rows(KEY_HEADS, False)),
    "kda": (DeltaRule(KDA, True), delta_rows(HEADS, True)),
    "mamba-2": (Mamba2(*_OF_MAMBA2), _MAMBA2),
    "mamba": (Mamba1(-random(24, 8).abs(), random(24), random(24)), _MAMBA1),
}
if has_numba():
    KINDS |= {
        "compiled gdn": (compiled(True), delta_rows(KEY_HEADS, False)),
        "compiled kda": (compiled(False), delta_rows(HEADS, True)),
        "compiled mamba-2": (mamba2(*_OF_MAMBA2), _MAMBA2),
    }


def part(rows: Rows, start: int, end: int) -> Rows:
    return tuple(x[start:end] for x in rows)


def alone(kind: Recurrence, rows: Rows, path: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (state, outputs) of tokens one at a time."""
    state, outputs = kind.initial(rows), []
    for node in path:
        state, output = kind.advance(state, part(rows, node, node + 1))
        outputs.append(output)
    return state, torch.cat(outputs)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_split_of_a_chain(name: str, data: st.DataObject) -> None:
    kind, rows = KINDS[name]
    ends = sorted({0, N_TOKENS, *data.draw(st.lists(st.integers(1, N_TOKENS - 1), max_size=4))})
    state, outputs = kind.initial(rows), []
    for start, end in zip(ends, ends[1:], strict=False):
        before = state.clone()
        after, output = kind.advance(state, part(rows, start, end))
        assert torch.equal(state, before), "a state is never changed in place"
        state = after
        outputs.append(output)
    expected = alone(kind, rows, list(range(N_TOKENS)))
    assert torch.equal(state, expected[0])
    assert torch.equal(torch.cat(outputs), expected[1])


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_tree(name: str, data: st.DataObject) -> None:
    kind, rows = KINDS[name]
    n_before = data.draw(st.integers(0, 5))
    nodes = part(rows, n_before, data.draw(st.integers(n_before + 1, N_TOKENS)))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(len(nodes[0]))]
    requested = data.draw(st.lists(st.integers(0, len(parents) - 1), unique=True, min_size=1))
    state = kind.initial(rows)
    if n_before:
        state, _ = kind.advance(state, part(rows, 0, n_before))
    outputs = kind.branch(state, nodes, parents, requested)
    for node, output in zip(requested, outputs, strict=True):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        whole = [*range(n_before), *(n_before + i for i in path)]
        assert torch.equal(output, alone(kind, rows, whole)[1][-1:])


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_compiled_is_transformers_own_but_for_rounding(name: str) -> None:
    kind, rows = KINDS[name]
    state, output = kind.advance(kind.initial(rows), rows)
    other = compiled(True)
    actual = other.advance(other.initial(rows), rows)
    assert torch.allclose(actual[0], state[0], atol=1e-5)
    assert torch.allclose(actual[1], output, atol=1e-5)


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
def test_compiled_mamba_is_torchs_own_but_for_rounding() -> None:
    kind, rows = KINDS["mamba-2"]
    state, output = kind.advance(kind.initial(rows), rows)
    other, _ = KINDS["compiled mamba-2"]
    assert type(other) is not type(kind)
    actual = other.advance(other.initial(rows), rows)
    assert torch.allclose(actual[0].transpose(1, 2), state, atol=1e-5)
    assert torch.allclose(actual[1], output, atol=1e-5)


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
@pytest.mark.parametrize("name", ["convolution", "convolution of two"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_convolutions_have_torchs_bits(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, (x,) = KINDS[name]
    rows, parents = (x.to(dtype),), [-1, 0, 0, 1, -1, 3, 2]
    state = kind.initial(rows)
    monkeypatch.setattr("backends.recurrent.convolution.has_numba", lambda: False)
    expected = kind.branch(state, part(rows, 0, 7), parents, range(7))
    monkeypatch.undo()
    actual = kind.branch(state, part(rows, 0, 7), parents, range(7))
    assert torch.equal(torch.cat(actual), torch.cat(expected))


@settings(deadline=None)
@given(data=st.data())
def test_a_walk_has_few_states_at_a_time(data: st.DataObject) -> None:
    """A slot is written again only when no later node continues from its state."""
    count = data.draw(st.integers(1, 64))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(count)]
    order, above, slots, n_slots = depth_first(parents)
    assert sorted(order) == list(range(count))
    assert n_slots == max(slots) + 1 <= max_slots(count)
    holder = {-1: -1}  # slot -> the node whose state it has
    for node, start, slot in zip(order, above.tolist(), slots.tolist(), strict=True):
        assert holder[start] == parents[node]
        holder[slot] = node
