"""Bit-exact torch: a row of logits depends on the tokens before it, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from alone import own
from checkpoints import FAMILIES, HYBRIDS, in_dtype
from plain_rows import Plain
from sequence_histories import CONTEXT, MAX_NODES, try_sequences

from backends.attention.scores import Scores
from backends.contract.backend import PREFIX
from backends.contract.source import BackendOptions, Loading
from backends.hf import runner as hf_runner
from backends.hf.source import HfSource
from offload.placement.plan import plan_placement


def make_source(directory: Path, n_threads: int | None = None) -> HfSource:
    source = HfSource(directory, BackendOptions(n_threads, is_exact=True))
    assert source.exactness.is_exact, source.exactness
    return source


def load(source: HfSource, max_context: int = CONTEXT):
    placement = plan_placement(source.layers, 1 << 40)
    return source.load(Loading(placement, max_context, MAX_NODES, MAX_NODES))


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_any_history_gives_the_bits_of_one_token_per_pass(
    family, dtype, checkpoint_factory, tmp_path
) -> None:
    directory = in_dtype(checkpoint_factory(family), tmp_path, dtype)
    with load(make_source(directory)) as backend, load(make_source(directory)) as plain:
        try_sequences(backend, Plain(plain), max_seqs=1, longest=20, max_examples=4)


def long_sequence(n_tokens: int) -> list[int]:
    return np.random.default_rng(0).integers(3, 96, n_tokens).tolist()


LONG_FAMILIES = {
    "llama": {"max_position_embeddings": 512},
    "gemma2": {"max_position_embeddings": 512, "sliding_window": 70},  # an edge within a block
    "bloom": {},
    "gpt-oss": {"max_position_embeddings": 512, "sliding_window": 70},
}


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", LONG_FAMILIES)
def test_any_history_behind_several_blocks(family, dtype, checkpoint_factory, tmp_path) -> None:
    """Trees, commits and rollbacks on both sides of a block boundary."""
    directory = in_dtype(checkpoint_factory(family, **LONG_FAMILIES[family]), tmp_path, dtype)
    options = {"beginning": long_sequence(118), "longest": 20, "max_seqs": 1}
    with load(make_source(directory), 200) as backend, load(make_source(directory), 200) as plain:
        try_sequences(backend, Plain(plain), max_examples=4, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("_torch_threads")
@pytest.mark.parametrize(("family", "n_threads"), [("llama", 2), ("gemma2", 1), ("bloom", 3)])
def test_long_prefixes(family, n_threads, checkpoint_factory, monkeypatch) -> None:
    """Several blocks of keys, chunks of a prompt of any length, threads that share rows."""
    monkeypatch.setattr(hf_runner, "CHUNK_TOKENS", 40)
    token_ids = long_sequence(150)
    directory = checkpoint_factory(family, max_position_embeddings=512)
    with (
        load(make_source(directory, n_threads), 256) as backend,
        load(make_source(directory, n_threads), 256) as item,
    ):
        plain = Plain(item)
        for lengths in ([150], [41, 109], [128, 1, 21]):
            own(backend).rollback(0)
            for start, n in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True):
                row = own(backend).prefill(token_ids[start : start + n])
                assert np.array_equal(row, plain.row(token_ids[: start + n]))
        own(backend).rollback(126)
        first = own(backend).next_node_id
        tree = [PREFIX, PREFIX, first + 1, PREFIX, first + 1, first + 4]
        ids, rows = own(backend).extend(
            [9, token_ids[126], 5, 6, token_ids[127], token_ids[128]], tree
        )
        for i, n in ((1, 127), (4, 128), (5, 129)):
            assert np.array_equal(rows[i], plain.row(token_ids[:n]))
        own(backend).commit([ids[1], ids[4]], keep=[ids[5]])
        _, rows = own(backend).extend(token_ids[129:131], [ids[5], own(backend).next_node_id])
        assert np.array_equal(rows[-1], plain.row(token_ids[:131]))


# --- necessary parts ------------------------------------------------------------------------------


def reverse_the_blocks(monkeypatch, source: HfSource) -> None:
    """Passes of several rows add the last block of keys first."""
    blocks = Scores.blocks

    def reversed_for_many(self, scores, largest):
        if largest.shape[1] <= 8:
            return blocks(self, scores, largest)
        return reversed(
            [(shares, values.clone()) for shares, values in blocks(self, scores, largest)]
        )

    monkeypatch.setattr(Scores, "blocks", reversed_for_many)


def leave_passes_short(monkeypatch, source: HfSource) -> None:
    source.exactness = replace(source.exactness, min_batch_tokens=1)


MISTAKES = [reverse_the_blocks, leave_passes_short]


@pytest.fixture(scope="module")
def one_by_one(checkpoint_factory) -> Plain:
    """Rows of a long prompt, one token per pass."""
    with load(make_source(checkpoint_factory("llama")), 256) as item:
        plain = Plain(item)
        plain.row(long_sequence(240)[:220])
    return plain


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_without_one_of_its_parts_bits_differ(
    mistake, one_by_one, checkpoint_factory, monkeypatch
) -> None:
    """A prompt and chains behind several blocks of keys, in fp32."""
    token_ids = long_sequence(240)
    source = make_source(checkpoint_factory("llama"))
    if mistake is not None:
        mistake(monkeypatch, source)
    with load(source, 256) as backend:
        rows = [own(backend).prefill(token_ids[:200])]
        for n in (1, 2, 3, 14):
            start, first = own(backend).n_committed, own(backend).next_node_id
            parents = [PREFIX, *range(first, first + n - 1)]
            ids, actual = own(backend).extend(token_ids[start : start + n], parents)
            rows += list(actual)
            own(backend).commit(ids)
    expected = [one_by_one.rows[tuple(token_ids[:n])] for n in range(200, 221)]
    is_equal = all(map(np.array_equal, rows, expected))
    assert is_equal == (mistake is None)
