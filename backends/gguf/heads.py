"""MTP heads of GGUF models: their tensors, and the architectures whose heads run.

Layers for multi-token prediction come after the model's own (blk.N of N layers). Of several, for
one token each, the first is a draft head that is run repeatedly. A head runs if its proposals are
those of llama.cpp, and right in trees (tests/backends/heads/test_gguf_heads.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.contract.backend import UnsupportedModel
from backends.gguf.model import GgufModel
from offload.formats.tensors import TensorRecord

TRIED_HEADS = frozenset(
    "qwen35 qwen35moe qwen3next glm4moe deepseek2 cohere2moe hy_v3 nemotron_h_moe step35".split()
)
"""Architectures whose heads run."""
_STATES_WITH_LOGITS_ONLY = frozenset({"qwen3next", "step35"})
"""Architectures whose graph has the head's hidden states of tokens with logits alone."""
_NO_GRAPH = "llama.cpp does not run heads of this architecture"
_UNTRIED = "its proposals have not been compared with llama.cpp's"
_WITH_GRAPH = frozenset("bailingmoe3 deepseek32 deepseek4 glm-dsa mimo2".split())
"""Further architectures whose heads llama.cpp runs."""
_NEEDED = ("eh_proj", "enorm", "hnorm")
_OWN_EMBEDDING = ".nextn.embed_tokens.weight"
_OWN_OUTPUT = ".nextn.shared_head_head.weight"


def head_records(model: GgufModel) -> tuple[TensorRecord, ...]:
    """Return the tensors of the head's layer."""
    start = f"blk.{model.n_layers}."
    return tuple(record for record in model.mtp_records if record.name.startswith(start))


def resident_head_records(records: Sequence[TensorRecord]) -> list[TensorRecord]:
    """Return a head's tensors that stay in memory: all but an embedding, of which few rows are
    read in a pass."""
    return [record for record in records if not record.name.endswith(_OWN_EMBEDDING)]


def output_record(model: GgufModel) -> TensorRecord:
    """Return the matrix that gives the head's logits: its own, or the model's."""
    own = next((r for r in head_records(model) if r.name.endswith(_OWN_OUTPUT)), None)
    return own or model_output_record(model)


def model_output_record(model: GgufModel) -> TensorRecord:
    """Return the matrix that gives the model's logits."""
    return model.index.get("output.weight") or model.index["token_embd.weight"]


def has_states_with_logits_only(model: GgufModel) -> bool:
    """Return whether llama.cpp returns the head's hidden states of tokens with logits alone."""
    return model.architecture in _STATES_WITH_LOGITS_ONLY


def can_run_head(model: GgufModel) -> bool:
    """Return whether the model has a head that runs."""
    return model.architecture in TRIED_HEADS and _has_head(model)


def check_head(model: GgufModel) -> None:
    """Raise UnsupportedModel unless the model has a head that runs."""
    if not _has_head(model):
        raise UnsupportedModel(
            f"{model.path} has no MTP head (no tensors blk.{model.n_layers}.nextn.*): take a file "
            "with one, name a draft model, or leave -md out"
        )
    if model.architecture not in TRIED_HEADS:
        reason = _UNTRIED if model.architecture in _WITH_GRAPH else _NO_GRAPH
        raise UnsupportedModel(
            f"{model.path} ({model.architecture}) has an MTP head that does not run: {reason}; "
            "name a draft model, or leave -md out"
        )


def _has_head(model: GgufModel) -> bool:
    names = {record.name for record in model.mtp_records}
    return all(f"blk.{model.n_layers}.nextn.{name}.weight" in names for name in _NEEDED)
