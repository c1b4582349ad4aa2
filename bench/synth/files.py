"""Destination and small files of a grown model: config.json, tokenizer, model card.

Checks disk space, and refuses to replace files that are not ours.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from bench.synth.shapes import Experts, LlamaShape, Mamba, SynthError
from bench.synth.source import HYBRID_MIXTURE, OTHER_NAME_OF_EXPERTS, SourceModel
from offload.units import MIB, format_bytes
from specdec.models.opened import PADDING_KEY

_MARGIN_BYTES = 16 * MIB  # headers, config, tokenizer, index, file-system blocks
# dtype of config.json; GGUF has its own key.
_CONFIG_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp8": "bfloat16", "int4": "bfloat16"}
_WRITTEN_HERE = {"config.json", "README.md"}
_WEIGHT_FILES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".gguf",
)


def write_side_files(
    folder: Path,
    source: SourceModel,
    config: dict[str, Any],
    card: str,
) -> None:
    """Write config.json and the model card, and copy tokenizer and generation settings."""
    for path in source.folder.iterdir():
        unwanted = path.name in _WRITTEN_HERE or path.name.endswith(_WEIGHT_FILES)
        if path.is_file() and not unwanted and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)
    write_json(folder / "config.json", config)
    (folder / "README.md").write_text(card, encoding="utf-8")


def grown_config(source: SourceModel, shape: LlamaShape, dtype: str) -> dict[str, Any]:
    """Return the source's config with the sizes of `shape` and its own rotary parameters."""
    renewed = ("torch_dtype", "hybrid_override_pattern", OTHER_NAME_OF_EXPERTS)
    config = {key: value for key, value in source.config.items() if key not in renewed}
    if shape.vocab_size > source.shape.vocab_size:
        config.setdefault(PADDING_KEY, source.shape.vocab_size)
    epsilon = float(config.get("rms_norm_eps", 1e-6))
    if not shape.is_hybrid:
        epsilon *= source.shape.hidden_size / shape.hidden_size
    if shape.mamba is not None:
        return config | _nemotron_config(shape, shape.mamba, dtype)
    return config | {
        **_hybrid_config(shape),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": epsilon,
        "dtype": _CONFIG_DTYPES.get(dtype),
        **_expert_config(shape),
    }


def _hybrid_config(shape: LlamaShape) -> dict[str, Any]:
    if shape.recurrent is None:
        return {}
    kinds = ("full_attention", "linear_attention")
    sizes: dict[str, Any] = {
        "layer_types": [kinds[shape.is_recurrent(i)] for i in range(shape.n_layers)],
        "linear_num_key_heads": shape.recurrent.n_key_heads,
        "linear_num_value_heads": shape.recurrent.n_value_heads,
        "mtp_num_hidden_layers": int(shape.has_mtp_head),
    }
    if shape.experts is None:
        return sizes
    return sizes | {
        "model_type": HYBRID_MIXTURE,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "shared_expert_intermediate_size": shape.intermediate_size,
    }


def _nemotron_config(shape: LlamaShape, mamba: Mamba, dtype: str) -> dict[str, Any]:
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "layers_block_type": [kinds[mamba.kind_of(i)] for i in range(shape.n_layers)],
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "mamba_num_heads": mamba.n_heads,
        "n_groups": mamba.n_groups,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied,
        "dtype": _CONFIG_DTYPES.get(dtype),
    }
    if shape.experts is None:
        return sizes
    return sizes | {
        "n_routed_experts": shape.experts.n,
        "num_experts_per_tok": shape.experts.n_used,
        "moe_intermediate_size": shape.experts.intermediate_size,
        "moe_shared_expert_intermediate_size": shape.intermediate_size,
        "moe_latent_size": None,
    }


def _expert_config(shape: LlamaShape) -> dict[str, Any]:
    if shape.experts is None:
        return {}
    return {
        "num_experts": shape.experts.n,
        "num_experts_per_tok": shape.experts.n_used,
        "moe_intermediate_size": shape.experts.intermediate_size,
    }


def model_card(
    source: SourceModel,
    shape: LlamaShape,
    dtype: str,
    n_bytes: int,
    seed: int,
    source_name: str | None,
) -> str:
    """Return the model card, which says that this is no trained large model."""
    name, small = source_name or source.folder.name, source.shape
    size = f"{format_bytes(n_bytes)} in {dtype}"
    return f"""# Grown from {name}: for benchmarks only

This is **not** a trained large model. It was grown by function-preserving expansion
(`specdec-bench synth`): it has the bytes, FLOPs and tensor shapes below, and computes the same
function as the small model `{name}`, so its text is the small model's. Most of its weights are
random numbers (seed {seed}) that are multiplied by zero.

| | grown | source |
|---|---|---|
| weights | {shape.parameters:,} ({size}) | {small.parameters:,} |
| layers | {shape.n_layers} | {small.n_layers}, spread evenly |
| hidden size | {shape.hidden_size} | {small.hidden_size} |
| intermediate size | {shape.intermediate_size} | {small.intermediate_size} |
| query / key-value heads | {shape.n_heads} / {shape.n_kv_heads} | {small.n_heads} / \
{small.n_kv_heads} |
| head dimension | {shape.head_dim} | {small.head_dim} |
| vocabulary | {shape.vocab_size}, ids from {small.vocab_size} on are padding | {small.vocab_size} |
| output head | {"tied" if shape.tied else "untied"} | {"tied" if small.tied else "untied"} |
| MTP head | {"yes" if shape.has_mtp_head else "no"} | {"yes" if small.has_mtp_head else "no"} |
| recurrent layers | {_describe_recurrent(shape)} | {_describe_recurrent(small)} |
| experts of a layer | {_describe_experts(shape.experts)} | {_describe_experts(small.experts)} |
"""


def _describe_recurrent(shape: LlamaShape) -> str:
    if shape.mamba is not None:
        kinds = [shape.mamba.kind_of(i) for i in range(shape.n_layers)]
        return f"{kinds.count('M')} of Mamba-2, {shape.mamba.n_heads} heads"
    if shape.recurrent is None:
        return "none"
    few = shape.recurrent
    return f"all but each {few.attention_every}th, {few.n_key_heads} / {few.n_value_heads} heads"


def _describe_experts(experts: Experts | None) -> str:
    if experts is None:
        return "none"
    return f"{experts.n} of size {experts.intermediate_size}, {experts.n_used} for a token"


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def check_folder(out_dir: Path, source_dir: Path, n_bytes: int, force: bool) -> None:
    """Raise SynthError if the folder `out_dir` may not be written or its disk lacks space."""
    destination, source = out_dir.resolve(), source_dir.resolve()
    if destination == source or destination in source.parents:
        raise SynthError(f"{out_dir} holds the source model; choose another folder")
    refuse_folder(out_dir, force)
    check_context_capacity(out_dir, n_bytes)


def refuse_folder(out_dir: Path, force: bool) -> None:
    """Raise SynthError if the folder `out_dir` may not be written, whatever is grown."""
    if out_dir.exists() and not out_dir.is_dir():
        raise SynthError(f"{out_dir} is a file; choose a folder")
    if out_dir.is_dir() and any(out_dir.iterdir()):
        if not force:
            raise SynthError(f"{out_dir} is not empty; choose another folder, or pass --force")
        if not (out_dir / "config.json").is_file():
            raise SynthError(f"{out_dir} is no checkpoint (no config.json): --force spares it")


def check_gguf_file(path: Path, n_bytes: int, force: bool) -> None:
    """Raise SynthError if the file `path` may not be written or its disk lacks space."""
    refuse_gguf_file(path, force)
    check_context_capacity(path, n_bytes)


def refuse_gguf_file(path: Path, force: bool) -> None:
    """Raise SynthError if the file `path` may not be written, whatever is grown."""
    if path.suffix != ".gguf":
        raise SynthError(f"{path} must end in .gguf: with --format gguf, -o names a file")
    if path.is_dir():
        raise SynthError(f"{path} is a folder; choose a file name")
    if path.exists() and not path.is_file():
        raise SynthError(f"{path} is not a regular file; choose another name")
    if path.exists():
        if not force:
            raise SynthError(f"{path} exists; choose another name, or pass --force")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise SynthError(f"{path} is no GGUF file: --force spares it")


def check_context_capacity(destination: Path, n_bytes: int) -> None:
    """Raise SynthError if the disk below `destination` has less than `n_bytes` free."""
    existing = next(p for p in (destination, *destination.parents) if p.exists())
    free, needed = shutil.disk_usage(existing).free, n_bytes + _MARGIN_BYTES
    if free < needed:
        raise SynthError(
            f"not enough disk space at {existing}: {format_bytes(needed)} needed, "
            f"{format_bytes(free)} free"
        )
