"""Attention of every family, as transformers calls it: the type of the mask selects the kernel.

On a CPU it is a `BlockedMask` (exact), on a GPU a `SegmentedMask` (fused kernels). Registered with
transformers under the name KEYS_BY_ROW; `hands_mask_on` returns which families can use it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from typing import Any, TypeAlias

import torch
from transformers import AttentionInterface, PreTrainedModel

from backends.attention.blocks import BlockedMask
from backends.attention.masks import SegmentedMask
from backends.attention.segments import attend_segments
from backends.attention.stored_rows import StoredRows
from backends.contract.backend import BackendError

KEYS_BY_ROW = "specdec"
"""Name of this attention among those of transformers."""
KeyMask: TypeAlias = BlockedMask | SegmentedMask
_ATTENTIVE_CLASS = re.compile(r"^(?!.*Vision).*(Attention|Layer$|Block$)")
"""Attention and layer classes of the language model; the same file may have a vision tower."""
_INTERFACE = "ALL_ATTENTION_FUNCTIONS.get_interface("
"""Call by which families take their attention from transformers' interface; hybrids do so without
the flag that says it."""
_SINKS = "s_aux"
_WITHOUT_EFFECT = frozenset(
    "dropout is_causal sliding_window position_ids cache_position use_cache output_attentions "
    "output_router_logits logits_to_keep".split()
)
"""Arguments of families that change nothing here: dropout is for training, the mask says which keys
a row sees, queries and keys include positions already, and the others are for other modules."""
_SELECTIONS = frozenset({"indices", "block_indices"})
"""Arguments with what sparse attention selects: without effect from an indexer that was replaced,
which selects every token and gives a name instead of a tensor."""
_EAGER_ONLY = {"_upcast_and_reordered_attn"}
"""Functions that run only with transformers' own eager attention (GPT-2)."""


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | StoredRows,
    value: torch.Tensor | StoredRows,
    attention_mask: KeyMask,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with queries [1, heads, rows, dim] to keys and values [1, kv heads, keys, dim], on a
    CPU also as the cache stores them.

    The interface is transformers' (AttentionInterface); windows are in the mask.
    softcap: scores become softcap · tanh(scores / softcap) (Gemma 2).
    s_aux [heads]: sinks, scores of a key without a value (gpt-oss).
    Returns [1, rows, heads, value dim].
    """
    _check_arguments(module, key, attention_mask, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(attention_mask, BlockedMask):
        output = attention_mask.attend(query, key, value, scale, softcap=softcap, sinks=s_aux)
    else:
        assert isinstance(key, torch.Tensor), "rows on a GPU are decoded before"
        assert isinstance(value, torch.Tensor), "rows on a GPU are decoded before"
        output = attend_segments(query, key, value, attention_mask, scale, softcap, s_aux)
    return output, None


_KNOWN = _WITHOUT_EFFECT | _SELECTIONS | set(inspect.signature(attention).parameters)


@functools.cache
def hands_mask_on(architecture: type[PreTrainedModel], has_softcap: bool) -> bool:
    """Return whether a family's attention can be computed here; other families get whole masks.

    It must take its attention from transformers' interface, pass the mask on unchanged, and add
    nothing to plain attention but a softcap or sinks.
    """
    try:
        source = inspect.getsource(sys.modules[architecture.__module__])
    except (OSError, TypeError):
        return False
    if not architecture._supports_attention_backend and _INTERFACE not in source:
        return False
    if not architecture._supports_sdpa and not has_softcap and f"{_SINKS}=" not in source:
        return False
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    attentive = [node for node in classes if _ATTENTIVE_CLASS.search(node.name)]
    nodes = [node for class_def in attentive for node in _nodes(class_def)]
    return not any(_looks_into_mask(node) or _adds_to_attention(node) for node in nodes)


def _nodes(tree: ast.AST) -> list[ast.AST]:
    """Return all nodes of a syntax tree, without functions that are never reached."""
    nodes = [tree]
    if _is_for_others(tree) or _is_of_indexer(tree):
        return nodes + [node for child in getattr(tree, "orelse", ()) for node in _nodes(child)]
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.FunctionDef) or child.name not in _EAGER_ONLY:
            nodes += _nodes(child)
    return nodes


def _is_for_others(node: ast.AST) -> bool:
    """Return whether code is a branch for other attention implementations, by their names."""
    return isinstance(node, ast.If) and "_attn_implementation in" in ast.unparse(node.test)


def _is_of_indexer(node: ast.AST) -> bool:
    """Return whether code calls the indexer of sparse attention, which is replaced."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "self.indexer"


def _looks_into_mask(node: ast.AST) -> bool:
    """Return whether code reads or computes with `attention_mask` instead of passing it on."""
    inner: list[ast.expr] = []
    if isinstance(node, ast.Attribute | ast.Subscript):
        inner = [node.value]
    elif isinstance(node, ast.BinOp):
        inner = [node.left, node.right]
    elif isinstance(node, ast.AugAssign):
        inner = [node.value]
    return any(isinstance(part, ast.Name) and part.id == "attention_mask" for part in inner)


def _adds_to_attention(node: ast.AST) -> bool:
    """Return whether code calls `attention_interface` with arguments that this one lacks."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    if node.func.id != "attention_interface":
        return False
    return any(keyword.arg is not None and keyword.arg not in _KNOWN for keyword in node.keywords)


def _check_arguments(
    module: torch.nn.Module, key: torch.Tensor | StoredRows, mask: object, kwargs: dict[str, Any]
) -> None:
    """Raise BackendError for arguments with which the attention would be wrong."""
    name = type(module).__name__
    if not isinstance(mask, KeyMask):
        raise BackendError(f"{name} was given no mask of keys, but {type(mask).__name__}")
    if not mask.fits(key):
        raise BackendError(f"{name} has keys {list(key.shape)}, its mask is for others")
    for argument, value in kwargs.items():
        is_selection = argument in _SELECTIONS and not isinstance(value, str)
        if value is not None and (is_selection or argument not in _KNOWN):
            raise BackendError(
                f"{name} has {argument}, which this attention lacks: run the model as GGUF"
            )


AttentionInterface.register(KEYS_BY_ROW, attention)
