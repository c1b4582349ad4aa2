"""DFlash heads in GGUF files: proposals of llama.cpp's own graph, and of the same head's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from dflash2_heads import TOP_K, save_dflash2_head
from dflash_gguf import llama_dflash, save_dflash_gguf
from dflash_heads import BLOCK_SIZE, MASK_TOKEN_ID, save_dflash_head
from llama_eagle3 import has_extensions
from loaded_heads import load_dflash, target_states

from backends.contract.backend import PREFIX
from backends.contract.sequence import SequenceInput
from backends.contract.source import BackendOptions
from backends.heads.dflash.source import DFlashSource
from backends.heads.kinds import may_fit
from backends.heads.target import CheckpointTarget
from backends.hf.source import HfSource
from offload.errors import SpecdecError

pytestmark = pytest.mark.gguf
PROMPT = np.random.default_rng(2).integers(4, 96, 24).tolist()
PENDING = [31, 7, 90]
WINDOW = 10
of_llama_cpp = pytest.mark.skipif(not has_extensions(), reason="llama.cpp has no functions for it")


@pytest.fixture(scope="module")
def target(checkpoint_factory: Any) -> Path:
    return checkpoint_factory("llama")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    return {
        "dflash": save_dflash_head(folder / "whole"),
        "sliding": save_dflash_head(folder / "sliding", window=WINDOW),
        "dflash2": save_dflash2_head(folder / "second"),
    }


def proposals(target: Path, head: Path) -> tuple[np.ndarray, list[Any]]:
    """Return the target's states after the prompt, and a pass's output for each pending token."""
    with load_dflash(target, head) as (backend, drafting):
        states, outputs = target_states(backend, PROMPT), []
        for pending in PENDING:
            kv = drafting.new_sequence()
            drafting.forward([SequenceInput(kv, PROMPT, logits_at=[], hidden_states=states)])
            block = [pending, *[MASK_TOKEN_ID] * (BLOCK_SIZE - 1)]
            parents = [PREFIX, *range(kv.next_node_id, kv.next_node_id + BLOCK_SIZE - 1)]
            masked = range(1, BLOCK_SIZE)
            states_at = masked if drafting.masked_block.top_k else ()
            inputs = SequenceInput(kv, block, parents, masked, states_at)
            outputs.append(drafting.forward([inputs])[0])
        return states, outputs


@of_llama_cpp
@pytest.mark.parametrize("factors", [None, [1.0, 2.0, 3.0, 8.0]], ids=["", "rope_freqs"])
@pytest.mark.parametrize("name", ["dflash", "sliding"])
def test_marginals_are_llama_cpps(
    name: str, factors: list[float] | None, target: Path, heads: dict[str, Path], tmp_path: Path
) -> None:
    tensors = {} if factors is None else {"rope_freqs.weight": np.float32(factors)}
    path = save_dflash_gguf(heads[name], tmp_path / "h.gguf", target=target, tensors=tensors)
    states, outputs = proposals(target, path)
    for pending, output in zip(PENDING, outputs, strict=True):
        with llama_dflash(path) as reference:
            expected = reference.marginals(states, pending)
        np.testing.assert_allclose(output.logits, expected, atol=5e-4)


@of_llama_cpp
@pytest.mark.parametrize("scales", [{}, {"logit_scale": 0.5, "final_logit_softcapping": 2.0}])
@pytest.mark.parametrize("embedding_scale", [None, 3.0])
def test_transitions_are_llama_cpps(
    scales: dict[str, float],
    embedding_scale: float | None,
    target: Path,
    heads: dict[str, Path],
    tmp_path: Path,
) -> None:
    metadata = {f"dflash.{k}": v for k, v in scales.items()}
    metadata["dflash.embedding_scale"] = embedding_scale
    path = save_dflash_gguf(heads["dflash2"], tmp_path / "h.gguf", target=target, metadata=metadata)
    states, outputs = proposals(target, path)
    for pending, output in zip(PENDING, outputs, strict=True):
        with llama_dflash(path) as reference:
            tokens, scores = reference.transitions(states, pending)
        own, edges = np.split(output.hidden_states, [TOP_K], axis=1)
        edges = edges.reshape(-1, TOP_K, TOP_K)
        for i in range(BLOCK_SIZE - 1):
            order, other = np.argsort(own[i]), np.argsort(tokens[i])
            assert (own[i][order] == tokens[i][other]).all()
            before = slice(None) if i == 0 else np.argsort(own[i - 1])
            of_other = slice(None) if i == 0 else np.argsort(tokens[i - 1])
            np.testing.assert_allclose(
                edges[i][before][:, order], scores[i][of_other][:, other], atol=5e-4
            )


@pytest.mark.parametrize("name", ["dflash", "sliding", "dflash2"])
def test_proposals_are_those_of_the_folder(
    name: str, target: Path, heads: dict[str, Path], tmp_path: Path
) -> None:
    path = save_dflash_gguf(heads[name], tmp_path / "h.gguf")
    _, expected = proposals(target, heads[name])
    for output, folder in zip(proposals(target, path)[1], expected, strict=True):
        assert np.array_equal(output.logits, folder.logits)
        if name == "dflash2":
            assert np.array_equal(output.hidden_states, folder.hidden_states)


MATRIX = np.zeros((4, 4), dtype=np.float32)
NAN = float("nan")
PATTERN = "dflash.attention.sliding_window_pattern"
SLIDING = {"dflash.attention.sliding_window": 9}


@pytest.mark.parametrize(
    ("metadata", "tensors", "reason"),
    [
        ({"dflash.block_size": None}, {}, "has no dflash.block_size: convert the head again"),
        ({"tokenizer.ggml.mask_token_id": None}, {}, "has no tokenizer.ggml.mask_token_id"),
        ({"dflash.block_size": "six"}, {}, "dflash.block_size of 'six', must be a whole number"),
        ({"dflash.block_size": 300}, {}, "block_size is 300, must be a number from 2 to 256"),
        ({"dflash.block_count": "two"}, {}, "dflash.block_count of 'two', must be a whole number"),
        ({"dflash.block_count": 2**30}, {}, "whole number from 1 to 1048576"),
        ({"dflash.block_count": 3}, {}, "has 2 layers and dflash.block_count of 3"),
        ({"dflash.attention.head_count_kv": 0}, {}, "whole number from 1"),
        ({"dflash.attention.head_count": 2**31}, {}, "whole number from 1"),
        ({"dflash.rope.freq_base": "big"}, {}, "rope.freq_base of 'big', must be a positive"),
        ({"dflash.rope.freq_base": 0.0}, {}, "must be a positive number"),
        ({"dflash.embedding_scale": NAN}, {}, "embedding_scale of nan, must be a positive"),
        ({"dflash.embedding_scale": [1.0]}, {}, "must be a positive number"),
        ({"dflash.attention.causal": "false"}, {}, "must be true or false"),
        ({"dflash.target_layers": [0, 2]}, {}, r"target_layer_ids is \[-1, 1\]"),
        ({"dflash.target_layers": [1, 9]}, {}, "it takes layer 8, the target has 3 layers"),
        ({"dflash.target_layers": [1.5, 3.5]}, {}, "must be a list of int"),
        ({"dflash.target_layers": "13"}, {}, "must be a list of int"),
        ({"dflash.embedding_length": 64}, {}, "hidden states of 64 numbers"),
        ({"dflash.attention.sliding_window": 9}, {}, "no dflash.attention.sliding_window_pattern"),
        ({**SLIDING, PATTERN: [True]}, {}, "a list of 2, one for each layer"),
        ({**SLIDING, PATTERN: [1, 0]}, {}, "must be a list of bool"),
        ({"dflash.rope.scaling.type": "yarn"}, {}, "RoPE scaling, which is not supported"),
        ({"dflash.rope.scaling.factor": 4.0}, {}, "RoPE scaling, which is not supported"),
        ({"dflash.rope.scaling.attn_factor": 2.0}, {}, "RoPE scaling, which is not supported"),
        ({"dflash.hidden_activation": "gelu"}, {}, "the activation 'gelu'"),
        ({"dflash.attention.scale": 0.5}, {}, "attention.scale, which is not supported in GGUF"),
        ({"dflash.rope.dimension_count": 4}, {}, "RoPE in a part of each head"),
        ({}, {"d2t": np.arange(4, dtype=np.int64)}, "DFlash has no d2t"),
        ({}, {"markov_w1.weight": MATRIX}, "DFlash has no markov_w1.weight"),
        ({}, {"blk.0.attn_sinks.weight": MATRIX[0]}, "DFlash has no blk.0.attn_sinks.weight"),
        ({}, {"rope_freqs.weight": MATRIX[0, :3]}, r"shape \(3,\), must be \(4,\)"),
        ({}, {"rope_freqs.weight": MATRIX[0]}, "RoPE factors that are not positive"),
        ({}, {"fc.weight": np.zeros((32, 64), dtype=np.int32)}, "which the gguf package does not"),
    ],
)
def test_other_heads_are_refused_in_one_line(
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    reason: str,
    target: Path,
    heads: dict[str, Path],
    tmp_path: Path,
) -> None:
    path = save_dflash_gguf(
        heads["dflash"], tmp_path / "h.gguf", metadata=metadata, tensors=tensors
    )
    model = CheckpointTarget(HfSource(target, BackendOptions()).model)
    with pytest.raises(SpecdecError, match=reason) as error:
        DFlashSource(model, BackendOptions(), path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_dspark_head_does_not_fit(target: Path, heads: dict[str, Path], tmp_path: Path) -> None:
    """-md auto goes on to another head of this architecture."""
    own = save_dflash_gguf(heads["dflash"], tmp_path / "h.gguf")
    tensors = {"markov_w1.weight": MATRIX}
    other = save_dflash_gguf(heads["dflash"], tmp_path / "dspark.gguf", tensors=tensors)
    assert may_fit(own, target)
    assert not may_fit(other, target)
