"""Unused memory pins layers, and is released before anything requests it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forced_streaming import force_streaming
from gguf_models import save_tiny_gguf
from tiny_pair import save_model

import specdec
from specdec.api import LLM
from specdec.policy import opportunistic_layers
from specdec.policy.kv_price import KvPrice
from specdec.policy.opportunistic_layers import RESERVE_BYTES, OpportunisticLayers

PROMPT = [5, 6, 7]
MANY = 1 << 40


class Target:
    """A target that pins as many layers as requested."""

    def __init__(self, kv_growth_bytes: int = 1000) -> None:
        self.pinned_bytes = self.unread_bytes = 0
        self._kv_growth_bytes = kv_growth_bytes
        self.asked: list[int] = []

    def kv_growth_bytes(self, n_tokens: int, num_new_seqs: int = 0) -> int:
        return self._kv_growth_bytes * max(1, num_new_seqs) + n_tokens

    def set_pinned_bytes(self, n_bytes: int) -> None:
        self.pinned_bytes = n_bytes
        self.asked.append(n_bytes)


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """peak[0]: the process's memory without pinned layers."""
    taken = [0]
    monkeypatch.setattr(opportunistic_layers, "recent_peak_rss", lambda: taken[0])
    return taken


def test_spare_memory_is_pinned_except_a_reserve(peak: list[int]) -> None:
    target: Any = Target()
    opportunistic = OpportunisticLayers(
        target, None, 10 * RESERVE_BYTES, activation_bytes=256 * 100, max_num_tokens=33
    )
    peak[0] = 4 * RESERVE_BYTES
    opportunistic.pin_after_decode(num_step_tokens=33, num_cached_tokens=0)
    assert target.pinned_bytes == 5 * RESERVE_BYTES - 1000
    target.set_pinned_bytes(0)
    opportunistic.pin_after_decode(num_step_tokens=3, num_cached_tokens=0)  # 30 rows more may come
    assert target.pinned_bytes == 5 * RESERVE_BYTES - 1000 - 30 * 100


def test_memory_of_an_idle_draft_is_not_pinned(peak: list[int]) -> None:
    target: Any = Target(0)
    draft: Any = Target(5000)
    opportunistic = OpportunisticLayers(
        target,
        draft,
        10 * RESERVE_BYTES,
        activation_bytes=0,
        max_num_tokens=1,
        draft_activation_bytes=256 * 100,
        draft_level_tokens=8,
        drafting_bytes=7000,
    )
    rest = 300 + 5300 + 7000
    for num_uncomputed, num_tokens in ((300, 256), (256, 256), (200, 200), (9, 9), (8, 8), (1, 8)):
        target.set_pinned_bytes(0)
        opportunistic.pin_after_decode(
            num_step_tokens=1, num_cached_tokens=300, num_uncomputed=num_uncomputed
        )
        assert target.pinned_bytes == 9 * RESERVE_BYTES - rest - num_tokens * 100
    opportunistic.release_for_prefill(num_cached_tokens=300)
    assert target.pinned_bytes == 9 * RESERVE_BYTES - rest - 8 * 100, "more layers would have fit"
    peak[0] = target.pinned_bytes
    opportunistic.release_for_prefill(num_cached_tokens=300)
    assert target.pinned_bytes == 9 * RESERVE_BYTES - rest - 256 * 100


def test_each_sequence_without_draft_kv_begins_a_block(peak: list[int]) -> None:
    target: Any = Target(0)
    draft: Any = Target(5000)
    sequences: Any = SimpleNamespace(n_in_use=3)
    opportunistic = OpportunisticLayers(
        target,
        draft,
        10 * RESERVE_BYTES,
        activation_bytes=0,
        max_num_tokens=1,
        draft_prefix_cache=sequences,
    )
    opportunistic.pin_after_decode(num_step_tokens=1, num_cached_tokens=0, num_seqs=20)
    assert target.pinned_bytes == 9 * RESERVE_BYTES - 17 * 5000
    peak[0] = target.pinned_bytes
    opportunistic.release_for_prefill(num_cached_tokens=0, num_seqs=30)
    assert target.pinned_bytes == 9 * RESERVE_BYTES - 27 * 5000


def test_unread_weights_are_not_counted_as_spare(peak: list[int]) -> None:
    target: Any = Target(0)
    draft: Any = Target(0)
    target.unread_bytes, draft.unread_bytes = 300, 70_000
    opportunistic = OpportunisticLayers(
        target, draft, 10 * RESERVE_BYTES, activation_bytes=0, max_num_tokens=1
    )
    opportunistic.pin_after_decode(num_step_tokens=1, num_cached_tokens=0)
    assert target.pinned_bytes == 9 * RESERVE_BYTES - 70_300


def test_a_mapped_file_takes_the_pinned_memory() -> None:
    target: Any = Target()
    opportunistic = OpportunisticLayers(target, None, MANY, activation_bytes=0, max_num_tokens=1)
    target.set_pinned_bytes(10)
    assert opportunistic.free_memory(4)
    assert target.pinned_bytes == 6
    assert not opportunistic.free_memory(MANY), "not even with all of it"
    assert target.pinned_bytes == 0


def test_a_target_in_memory_has_nothing_to_hold(peak: list[int]) -> None:
    target: Any = Target(0)
    opportunistic = OpportunisticLayers(
        target, None, MANY, activation_bytes=0, max_num_tokens=1, is_streamed=False
    )
    opportunistic.pin_after_decode(num_step_tokens=1, num_cached_tokens=0)
    assert not target.asked


def test_pinned_memory_follows_used_memory(peak: list[int]) -> None:
    target: Any = Target()
    opportunistic = OpportunisticLayers(
        target, None, 10 * RESERVE_BYTES, activation_bytes=0, max_num_tokens=1
    )
    own = 4 * RESERVE_BYTES
    for _ in range(3):  # once pinned, it counts as used, and no more is pinned
        peak[0] = own + target.pinned_bytes
        opportunistic.pin_after_decode(1, 0)
        assert target.pinned_bytes == 5 * RESERVE_BYTES - 1000
    n_asked = len(target.asked)
    peak[0] += RESERVE_BYTES // 4  # a part of the reserve is there for that
    opportunistic.pin_after_decode(1, 0)
    assert len(target.asked) == n_asked
    peak[0] += RESERVE_BYTES
    opportunistic.pin_after_decode(1, 0)
    assert target.pinned_bytes == 5 * RESERVE_BYTES - 1000 - RESERVE_BYTES * 5 // 4
    peak[0] += MANY
    opportunistic.pin_after_decode(1, 0)
    assert target.pinned_bytes == 0


def test_a_prompt_takes_no_more_than_it_adds(peak: list[int]) -> None:
    target: Any = Target(0)
    opportunistic = OpportunisticLayers(
        target, None, 10 * RESERVE_BYTES, activation_bytes=RESERVE_BYTES, max_num_tokens=1
    )
    peak[0] = 4 * RESERVE_BYTES
    opportunistic.pin_after_decode(num_step_tokens=1, num_cached_tokens=0)
    pinned = target.pinned_bytes
    peak[0] += pinned
    opportunistic.release_for_prefill(
        num_cached_tokens=3000
    )  # the widest pass, and 3 000 bytes of KV
    assert 0 < pinned - target.pinned_bytes <= RESERVE_BYTES + 3000
    target.set_pinned_bytes(3 * RESERVE_BYTES)
    peak[0] = 4 * RESERVE_BYTES + target.pinned_bytes
    target.asked.clear()
    opportunistic.release_for_prefill(num_cached_tokens=3000)
    assert target.asked == [], "memory suffices: nothing is released or pinned"
    peak[0] = MANY
    opportunistic.release_for_prefill(num_cached_tokens=3000)
    assert target.pinned_bytes == 0


def test_behind_a_prompt_memory_for_the_widest_pass_is_left(peak: list[int]) -> None:
    target: Any = Target(0)
    opportunistic = OpportunisticLayers(
        target, None, 10 * RESERVE_BYTES, activation_bytes=2 * RESERVE_BYTES, max_num_tokens=1
    )
    peak[0] = 4 * RESERVE_BYTES
    opportunistic.pin_after_prefill(num_cached_tokens=300, has_more_prefill=True)
    assert target.asked == [], "the next prompt would ask it back"
    opportunistic.pin_after_prefill(num_cached_tokens=300)
    assert target.pinned_bytes == 3 * RESERVE_BYTES - 300
    peak[0] = MANY
    opportunistic.pin_after_prefill(num_cached_tokens=300)
    assert target.pinned_bytes == 3 * RESERVE_BYTES - 300, "steps of decoding may take less"


def save(kind: str, folder: Path) -> Path:
    if kind == "checkpoint":
        return save_model(folder / "model", seed=0, num_hidden_layers=8)
    pytest.importorskip("llama_cpp")
    return save_tiny_gguf("llama", folder / "m.gguf", n_layers=8, hidden=256, feed_forward=256)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpoint", pytest.param("gguf", marks=pytest.mark.gguf)])
def test_outputs_are_equal_with_fewer_reads(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_streaming(monkeypatch)
    with specdec.load(save(kind, tmp_path), ctx_size=128) as llm:
        monkeypatch.setattr(opportunistic_layers, "recent_peak_rss", lambda: MANY)
        expected = llm.generate(PROMPT, max_tokens=12, speculative=False)
        assert llm.target.pinned_bytes == 0
        monkeypatch.setattr(opportunistic_layers, "recent_peak_rss", lambda: -MANY)
        actual = llm.generate(PROMPT, max_tokens=12, speculative=False)
        assert actual.token_ids == expected.token_ids
        assert llm.target.pinned_bytes > 0
        assert actual.stats.bytes_streamed < 0.8 * expected.stats.bytes_streamed
        beams = llm.generate(PROMPT, max_tokens=4, num_beams=1, n=2, temperature=0.5, seed=1)
        assert len(beams.outputs) == 2
        check_given_back(llm, monkeypatch)


@pytest.mark.parametrize("kind", ["checkpoint", pytest.param("gguf", marks=pytest.mark.gguf)])
def test_layers_stay_from_the_first_pass_of_decoding_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_streaming(monkeypatch)
    monkeypatch.setattr(opportunistic_layers, "recent_peak_rss", lambda: -MANY)
    with specdec.load(save(kind, tmp_path), ctx_size=128) as llm:
        pinned = note_pinned(llm, monkeypatch)
        llm.generate(PROMPT, max_tokens=3, speculative=False, ignore_eos=True)
    assert pinned[0] == pinned[1] == 0
    assert pinned[2] > 0


def note_pinned(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the pinned bytes at the beginning of each pass."""
    seen: list[int] = []
    run = llm.target.forward

    def noted(batch: Any) -> Any:
        seen.append(llm.target.pinned_bytes)
        return run(batch)

    monkeypatch.setattr(llm.target, "forward", noted)
    return seen


def check_given_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that all pinned memory is released before the prompt's pass if it may need it."""
    assert llm.target.pinned_bytes > 0
    seen = note_pinned(llm, monkeypatch)
    pinned = llm.target.pinned_bytes
    llm.generate(PROMPT, max_tokens=2)
    assert seen[0] == pinned
    seen.clear()
    monkeypatch.setattr(opportunistic_layers, "recent_peak_rss", lambda: MANY)
    llm.generate(PROMPT, max_tokens=2)
    assert seen[0] == 0


def test_sequences_without_draft_kv_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_streaming(monkeypatch)
    monkeypatch.setattr(opportunistic_layers, "recent_peak_rss", lambda: -MANY)
    monkeypatch.setattr(KvPrice, "pays", lambda *_: True)
    model = save("checkpoint", tmp_path)
    with specdec.load(model, model, ctx_size=128, kv_tokens=1024, num_draft_tokens=4) as llm:
        draft: Any = llm.draft
        seen: list[int] = []
        growth = draft.kv_growth_bytes

        def noted(n_tokens: int, num_new_seqs: int = 0) -> int:
            seen.append(num_new_seqs)
            return growth(n_tokens, num_new_seqs)

        llm.generate([5, 6, 7], max_tokens=8, ignore_eos=True)
        assert llm.target.pinned_bytes > 0
        monkeypatch.setattr(draft, "kv_growth_bytes", noted)
        llm.generate([[5 + i, 6, 7] for i in range(6)], max_tokens=8, ignore_eos=True)
        assert (seen[0], seen[-1]) == (6, 0)


@pytest.mark.gguf
def test_a_pass_takes_a_few_cells_with_flash_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp uses it by default."""
    force_streaming(monkeypatch)
    with specdec.load(save("gguf", tmp_path), ctx_size=128) as llm:
        target: Any = llm.target
        assert target._context.has_flash_attention
        num_tokens = max(target.max_nodes, target._options.min_batch_tokens)
        assert target.kv_growth_bytes(0) == num_tokens * target._kv_bytes_per_token


def test_it_is_given_back_before_a_vocabulary_is_made_ready_for_grammars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preparing takes memory once; the next constrained request takes none."""
    pytest.importorskip("llguidance")
    force_streaming(monkeypatch)
    monkeypatch.setattr(opportunistic_layers, "recent_peak_rss", lambda: -MANY)
    with specdec.load(save("checkpoint", tmp_path), ctx_size=128) as llm:
        llm.generate(PROMPT, max_tokens=4)
        assert llm.target.pinned_bytes > 0
        constrained = llm.stream(PROMPT, regex="[ab]{9}", max_tokens=12)
        assert llm.target.pinned_bytes == 0
        assert "".join(chunk.text for chunk in constrained).strip("ab") == ""
        assert llm.target.pinned_bytes > 0
        llm.stream(PROMPT, regex="[ab]{9}")
        assert llm.target.pinned_bytes > 0
