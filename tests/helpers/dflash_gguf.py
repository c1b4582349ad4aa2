"""Tiny DFlash heads as GGUF files, and llama.cpp's own graph of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from dflash2_heads import HIDDEN, TOP_K
from dflash_heads import BLOCK_SIZE, MASK_TOKEN_ID
from llama_eagle3 import llama_batch, llama_context, next_states

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
_GLOBAL_NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
"""Names of llama.cpp's architecture dflash (src/llama-arch.cpp)."""


def save_dflash_gguf(
    head: Path,
    path: Path,
    *,
    target: Path | None = None,
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a head in the public layout as llama.cpp's converter does.

    Args:
        target: checkpoint whose embedding and output head the file has as well.
        kind: number format of the layers' matrices.
        metadata: further strings, numbers and flags, or other ones; None leaves one out.
        tensors: further ones.
    """
    import gguf
    from safetensors.torch import load_file
    from tiny_gguf import add_tokens

    config = json.loads((head / "config.json").read_text())
    named = {_name(k): v.numpy() for k, v in load_file(head / "model.safetensors").items()}
    if target is not None:
        named |= _tables(target)
    writer = gguf.GGUFWriter(path, "dflash")
    for key, value in ({**_metadata(config)} | (metadata or {})).items():
        if value is not None:
            _add(writer, key, value)
    add_tokens(writer, config["vocab_size"])
    for name, value in (named | (tensors or {})).items():
        value = np.ascontiguousarray(value)
        if kind != "F32" and value.ndim == 2 and value.shape[1] % 32 == 0:
            quantised = gguf.quants.quantize(value, gguf.GGMLQuantizationType[kind])
            writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    block, slides = dict(config["dflash_config"]), "sliding_attention"
    own: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": config["head_dim"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "vocab_size": config["vocab_size"],
        "target_layers": [layer + 1 for layer in block.pop("target_layer_ids")],
    }
    if config["use_sliding_window"]:
        own["attention.sliding_window"] = config["sliding_window"]
        own["attention.sliding_window_pattern"] = [kind == slides for kind in config["layer_types"]]
    mask = block.pop("mask_token_id")
    own = {f"dflash.{key}": value for key, value in (own | block).items()}
    return own | {"tokenizer.ggml.mask_token_id": mask}


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)


def _tables(target: Path) -> dict[str, np.ndarray]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target)
    modules = {"token_embd": model.get_input_embeddings(), "output": model.get_output_embeddings()}
    return {f"{k}.weight": module.weight.detach().numpy() for k, module in modules.items()}


def _name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    _, layer, part = name.split(".", 2)
    stem = part.removesuffix(".weight")
    return f"blk.{layer}.{_LAYER_NAMES[stem]}{part.removeprefix(stem)}"


class LlamaDFlash:
    """A head in llama.cpp, with one sequence and one block after a context."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def marginals(self, states: np.ndarray, pending: int) -> np.ndarray:
        """Return logits [block - 1, vocab] after a context with these states [n, layers * hidden]
        of the target."""
        from backends.ggml.library import load_library

        library = load_library()
        self._decode(states, pending)
        n_tokens = library.llama_vocab_n_tokens(
            library.llama_model_get_vocab(library.llama_get_model(self._context))
        )
        logits = library.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (BLOCK_SIZE, n_tokens))[1:].copy()

    def transitions(self, states: np.ndarray, pending: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens [block - 1, k], scores [block - 1, k, k]) of a DFlash 2 head."""
        self._decode(states, pending)
        rows = next_states(self._context, BLOCK_SIZE, HIDDEN)[1:, : TOP_K + TOP_K**2]
        return rows[:, :TOP_K].astype(int), rows[:, TOP_K:].reshape(-1, TOP_K, TOP_K)

    def _decode(self, states: np.ndarray, pending: int) -> None:
        from backends.ggml.library import load_library

        library = load_library()
        with llama_batch([0] * len(states), 0, states, has_tokens=False) as batch:
            assert library.llama_decode(self._context, batch) == 0
        tokens = [pending] + [MASK_TOKEN_ID] * (BLOCK_SIZE - 1)
        with llama_batch(tokens, len(states)) as batch:
            assert library.llama_decode(self._context, batch) == 0


@contextmanager
def llama_dflash(path: Path) -> Iterator[LlamaDFlash]:
    from backends.ggml.library import load_library

    library = load_library()
    with llama_context(path) as context:
        library.llama_set_causal_attn(context, False)
        yield LlamaDFlash(context)
