"""Key-value block of a GGUF file, from the JSON files of a Hugging Face checkpoint.

Only GPT-2's byte-level BPE, which llama.cpp splits and merges exactly as the checkpoint's own
tokenizer does. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.synth.gguf_file import import_gguf
from bench.synth.shapes import SynthError
from bench.synth.source import read_json

if TYPE_CHECKING:
    from gguf import GGUFWriter


def add_model(writer: GGUFWriter, config: Mapping[str, Any], *, name: str, file_type: str) -> None:
    """Add sizes and constants of a Llama, Qwen3-MoE, Qwen3.5 or NemotronH.

    Args:
        config: contents of config.json.
        name: display name of the model.
        file_type: a name of `gguf.LlamaFileType`, for example "MOSTLY_F16".

    Raises:
        SynthError: the kind of rotary embedding is not supported.
    """
    n_heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // n_heads)
    writer.add_name(name)
    writer.add_file_type(import_gguf().LlamaFileType[file_type])
    writer.add_quantization_version(import_gguf().GGML_QUANT_VERSION)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    n_mtp_layers = int(config.get("mtp_num_hidden_layers") or 0)
    writer.add_block_count(config["num_hidden_layers"] + n_mtp_layers)
    if n_mtp_layers:
        writer.add_nextn_predict_layers(n_mtp_layers)
    writer.add_head_count(n_heads)
    kinds = config.get("layers_block_type")
    if kinds is None:
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count_kv(config.get("num_key_value_heads") or n_heads)
    else:
        _add_layers(writer, config, kinds)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    epsilon = config.get("layer_norm_epsilon") if kinds else config.get("rms_norm_eps")
    writer.add_layer_norm_rms_eps(1e-6 if epsilon is None else epsilon)
    n_rotated = int(head_dim * _rope(config).get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(n_rotated)
    writer.add_rope_freq_base(_rope_theta(config))
    n_experts = config.get("num_experts") or config.get("num_local_experts")
    if n_experts and kinds is None:
        writer.add_expert_count(n_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "linear_num_key_heads" in config:
        _add_recurrent(writer, config, n_rotated)


def _add_recurrent(writer: GGUFWriter, config: Mapping[str, Any], n_rotated: int) -> None:
    """Add sizes of Gated DeltaNet layers, and the axes of rotary positions, the same for text."""
    n_values, head_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(n_values)
    writer.add_ssm_inner_size(n_values * head_dim)
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    third = n_rotated // 2 // 3
    writer.add_rope_dimension_sections([n_rotated // 2 - 2 * third, third, third, 0])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _add_layers(writer: GGUFWriter, config: Mapping[str, Any], kinds: Sequence[str]) -> None:
    """Add the kinds of a NemotronH's layers, which llama.cpp tells from sizes that are 0, and the
    sizes of Mamba-2 and experts."""
    has_experts = "moe" in kinds
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])  # required, though unused
    width = config["moe_intermediate_size" if has_experts else "intermediate_size"]
    n_kv_heads = config["num_key_value_heads"]
    writer.add_feed_forward_length([width if kind in ("mlp", "moe") else 0 for kind in kinds])
    writer.add_head_count_kv([n_kv_heads if kind == "full_attention" else 0 for kind in kinds])
    n_heads = config["mamba_num_heads"]
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_time_step_rank(n_heads)
    writer.add_ssm_inner_size(n_heads * config["mamba_head_dim"])
    if has_experts:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(width)
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_norm(bool(config["norm_topk_prob"]))
        writer.add_expert_weights_scale(float(config["routed_scaling_factor"]))
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Return the base of plain rotary embeddings; transformers 5 nests it."""
    rope = _rope(config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise SynthError(f"rotary embeddings of type {kind!r} cannot be written as GGUF here")
    return float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)


def add_tokenizer(writer: GGUFWriter, folder: Path, num_tokens: int) -> None:
    """Add the tokenizer in `folder`, padded to `num_tokens` rows of the embedding.

    Raises:
        SynthError: it is no GPT-2-style byte-level BPE, or has more than `num_tokens` tokens.
    """
    tokenizer = read_json(folder / "tokenizer.json")
    _check_is_gpt2_like(tokenizer, folder)
    types = import_gguf().TokenType
    tokens = {int(i): (text, types.NORMAL) for text, i in tokenizer["model"]["vocab"].items()}
    for added in tokenizer.get("added_tokens", ()):
        kind = types.CONTROL if added.get("special") else types.USER_DEFINED
        tokens[int(added["id"])] = (added["content"], kind)
    if max(tokens) >= num_tokens:
        raise SynthError(
            f"{folder} has tokens up to id {max(tokens)}, but its embedding has {num_tokens} rows"
        )
    # llama.cpp needs a token for every row. Tokens of type UNUSED are never produced, and decode to
    # nothing; the name is convert_hf_to_gguf.py's.
    table = [tokens.get(i, (f"[PAD{i}]", types.UNUSED)) for i in range(num_tokens)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([text for text, _ in table])
    writer.add_token_types([int(kind) for _, kind in table])
    special = import_gguf().SpecialVocab(folder, load_merges=True, n_vocab=num_tokens)
    special.add_special_token = {"bos": False}
    special.add_to_gguf(writer, quiet=True)


def _check_is_gpt2_like(tokenizer: Mapping[str, Any], folder: Path) -> None:
    """Raise SynthError if llama.cpp's `gpt-2` pre-tokenizer would split differently."""
    model, split = tokenizer.get("model") or {}, tokenizer.get("pre_tokenizer") or {}
    after = tokenizer.get("post_processor") or {}
    fine = {
        "the model is BPE": model.get("type") == "BPE",
        "pieces are not looked up whole": not model.get("ignore_merges"),
        "merges have no dropout": not model.get("dropout"),
        "there is no normalizer": tokenizer.get("normalizer") is None,
        "text is split by ByteLevel's pattern": split.get("type") == "ByteLevel"
        and split.get("use_regex", True),
        "no space is put before the text": not split.get("add_prefix_space"),
        "no special tokens are added": not after.get("special_tokens")
        and after.get("type") in (None, "ByteLevel", "TemplateProcessing"),
    }
    wrong = [rule for rule, holds in fine.items() if not holds]
    if wrong:
        raise SynthError(
            f"{folder}/tokenizer.json is not GPT-2's byte-level BPE, which alone is written here: "
            f"it must hold that {wrong[0]}"
        )
