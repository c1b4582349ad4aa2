"""The routed experts of a GGUF model: stacks of matrices, and llama.cpp's limits on them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from backends.contract.backend import UnsupportedModel
from backends.gguf.hparams import MAX_EXPERTS, Keys
from offload.formats.gguf_index import GgufError
from offload.formats.tensors import TensorRecord

EXPERT_TENSOR = re.compile(r"blk\.\d+\.ffn_(gate|up|gate_up|down)_exps\.weight")
_MIN_GRAPH_NODES, _GRAPH_NODES_PER_TENSOR = 1024, 8
_GRAPH_NODES, _LAYER_NODES = 16, 64
"""Graph nodes of inputs and head, and of a layer without its experts: upper bounds for mixtral and
qwen3moe, with and without flash attention. With 6 layers 54 to 62 experts run; the limit is 52."""
_MIN_USED_LIMIT = 16
"""Experts per token that are never refused: published mixtures with attention in every layer use 1
to 10, and run."""


def count_experts(keys: Keys, index: Mapping[str, TensorRecord]) -> tuple[int, int]:
    """Return (experts of a layer, experts that a token uses), checked as llama.cpp does."""
    n_experts = keys.integer("expert_count", 0, MAX_EXPERTS, 0)
    n_used = keys.integer("expert_used_count", 0, MAX_EXPERTS, 0)
    if n_used > n_experts or (n_experts and not n_used):
        named = {"expert_count": n_experts, "expert_used_count": n_used}
        values = " and ".join(
            f"{keys.full(key)} {'of ' + str(n) if key in keys else 'missing'}"
            for key, n in named.items()
        )
        raise GgufError(
            f"{keys.path} has {values}: a mixture takes 1 or more of its experts for a token; the "
            "header is damaged, download the file again"
        )
    for record in index.values():
        if EXPERT_TENSOR.fullmatch(record.name) and record.shape[0] != n_experts:
            raise GgufError(
                f"{record.path} has {record.name!r} of {record.shape[0]} experts, but "
                f"{keys.full('expert_count')} is {n_experts}: it is damaged, download it again"
            )
    return n_experts, n_used


def check_graph(keys: Keys, n_layers: int, n_used: int, n_tensors: int) -> None:
    """Raise UnsupportedModel for too many experts per token. llama.cpp allocates graph nodes by the
    number of tensors (llama_context::graph_max_nodes), needs two per expert, and aborts without."""
    capacity = max(_MIN_GRAPH_NODES, _GRAPH_NODES_PER_TENSOR * n_tensors)
    limit = max(_MIN_USED_LIMIT, ((capacity - _GRAPH_NODES) // n_layers - _LAYER_NODES) // 2)
    if n_used > limit:
        raise UnsupportedModel(
            f"{keys.path} ({keys.architecture}) takes {n_used} experts for a token, and llama.cpp "
            f"at most {limit} in {n_layers} layers of so few tensors: take its checkpoint"
        )


def slice_of(record: TensorRecord, expert: int) -> TensorRecord:
    """Return one expert of a tensor that has all experts of a layer."""
    n_bytes = record.n_bytes // record.shape[0]
    return replace(
        record,
        name=f"{record.name}[{expert}]",
        shape=record.shape[1:],
        offset=record.offset + expert * n_bytes,
        n_bytes=n_bytes,
    )
