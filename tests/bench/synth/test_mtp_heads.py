"""The MTP head of a grown hybrid proposes what the small model's does, in both formats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from llama_quantize import both_types

from backends.contract.backend import PREFIX
from backends.contract.sequence import SequenceInput
from backends.contract.source import BackendOptions, Loading
from backends.heads.opened import mtp_source
from backends.hf.source import HfSource
from backends.llama.source import GgufSource
from bench.synth.checkpoint import grow
from bench.synth.gguf import grow_gguf
from bench.synth.layouts import LAYOUTS
from bench.synth.recipes import RECIPES
from bench.synth.shapes import HYBRIDS, Experts, LlamaShape
from bench.synth.sizing import choose_shape
from bench.synth.source import SourceModel
from offload.formats.gguf_index import GgufIndex
from offload.placement.placement import Placement
from offload.placement.plan import pin_all
from specdec.models.names import resolve_model

pytestmark = pytest.mark.gguf
SMALL = resolve_model("pair:hybrid")
SHAPE = SourceModel(SMALL).shape
assert SHAPE.recurrent is not None
LARGE = replace(
    SHAPE,
    hidden_size=512,
    n_layers=8,
    n_heads=4,
    n_kv_heads=2,
    intermediate_size=1024,
    tied=False,
    recurrent=replace(SHAPE.recurrent, n_key_heads=2, n_value_heads=6),
)
MIXTURE = replace(LARGE, experts=Experts(8, 3, 64))
PROMPT = np.random.default_rng(2).integers(300, 4000, 24).tolist()
SIZES: dict[str, Any] = {"max_context": 64, "max_nodes": 16, "max_num_tokens": 16}


@contextmanager
def loaded(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the backends of a model and of its head."""
    kind = GgufSource if path.suffix == ".gguf" else HfSource
    target = kind(path, BackendOptions(n_threads=1))
    head = mtp_source(target, BackendOptions(n_threads=1))
    placed = Placement(pin_all(target.layers), 0)
    how = "mmap" if kind is GgufSource else "ram"
    with target.load(Loading(placed, **SIZES, load_mode=how, has_head=True)) as backend:
        head.share_weights(backend)
        of_head = Placement(pin_all(head.layers), 0)
        with head.load(Loading(of_head, **SIZES, load_mode="ram")) as drafting:
            yield backend, drafting


def drafted(path: Path) -> tuple[np.ndarray, list[np.ndarray], list[int]]:
    """Return (the target's hidden states, the head's logits, the tokens of a greedy chain)."""
    with loaded(path) as (backend, head):
        context = PROMPT[:-1]
        chunk = SequenceInput(backend.new_sequence(), context, hidden_states_at=range(len(context)))
        states = backend.forward([chunk])[0].hidden_states
        kv, last = head.new_sequence(), [len(context) - 1]
        chunk = SequenceInput(kv, PROMPT[1:], None, last, last, states)
        (output,) = head.forward([chunk])
        parent, logits, tokens = PREFIX, [output.logits[0]], []
        for _ in range(5):
            tokens.append(int(logits[-1].argmax()))
            node = SequenceInput(kv, tokens[-1:], [parent], [0], [0], output.hidden_states)
            (output,) = head.forward([node])
            (parent,) = output.node_ids
            logits.append(output.logits[0])
        return states, logits, tokens


@pytest.fixture(scope="module")
def small(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[np.ndarray, list[np.ndarray], list[int]]:
    """Return the small model's results on torch, in fp32."""
    folder = tmp_path_factory.mktemp("small") / "fp32"
    grow(SMALL, folder, SHAPE, dtype="fp32")
    return drafted(folder)


@pytest.mark.parametrize(
    ("shape", "is_gguf"),
    [(SHAPE, True), (LARGE, True), (MIXTURE, True), (LARGE, False)],
    ids=["the same in GGUF", "grown GGUF", "mixture in GGUF", "grown checkpoint"],
)
def test_states_and_proposals_are_the_small_models(
    shape: LlamaShape, is_gguf: bool, small: Any, tmp_path: Path
) -> None:
    """In fp32, also of the same weights on torch and on llama.cpp, whose KV cache is f16."""
    path = tmp_path / ("grown.gguf" if is_gguf else "grown")
    (grow_gguf if is_gguf else grow)(SMALL, path, shape, dtype="fp32")
    states, logits, tokens = drafted(path)
    assert tokens == small[2]
    scale = abs(np.stack(small[1])).max()
    assert abs(states[:, : SHAPE.hidden_size] - small[0]).max() < 0.005 * abs(small[0]).max()
    assert not states[:, SHAPE.hidden_size :].any()
    n_tokens = SHAPE.vocab_size
    assert abs(np.stack(logits)[:, :n_tokens] - np.stack(small[1])).max() < 0.005 * scale


def test_a_gguf_head_is_named_as_llama_cpps_converter_names_it(tmp_path: Path) -> None:
    path = tmp_path / "grown.gguf"
    grow_gguf(SMALL, path, LARGE, dtype="q4_k_m")
    index = GgufIndex.from_path(path)
    assert index.metadata["qwen35.block_count"] == LARGE.n_layers + 1
    assert index.metadata["qwen35.nextn_predict_layers"] == 1
    of_head = {n.removeprefix("blk.8."): r for n, r in index.items() if n.startswith("blk.8.")}
    outer = {"eh_proj", "enorm", "hnorm", "shared_head_norm"}
    assert {name.split(".")[1] for name in of_head if name.startswith("nextn.")} == outer
    assert {"attn_q.weight", "attn_q_norm.weight", "post_attention_norm.weight"} <= set(of_head)
    assert of_head["nextn.eh_proj.weight"].shape == (512, 1024)
    assert of_head["ffn_down.weight"].dtype == "Q6_K"  # as of the last layers


@pytest.mark.parametrize("name", [n for n, shape in HYBRIDS.items() if shape.recurrent])
def test_a_shape_counts_the_head(name: str) -> None:
    shape = choose_shape(SHAPE, HYBRIDS[name], None, None, RECIPES["q4_k_m"])
    assert shape.has_mtp_head
    cut = replace(shape, n_layers=4)
    if cut.experts is not None:
        cut = replace(cut, experts=replace(cut.experts, n=4))
    assert LAYOUTS["bf16"].model_bytes(cut) == pytest.approx(2 * cut.parameters, rel=1e-4)


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("dtype", ["q4_k_m", "q5_k_m", "q4_k_s", "iq4_xs"])
@pytest.mark.parametrize("n_layers", [16, 24])
def test_types_of_a_hybrid_are_llama_quantizes(tmp_path: Path, n_layers: int, dtype: str) -> None:
    shape = replace(LARGE, n_layers=n_layers)
    own, llama = both_types(SMALL, tmp_path, shape, dtype)
    assert own == llama
