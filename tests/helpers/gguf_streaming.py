"""Backends of tiny GGUF models, in memory and streamed, and a call sequence that covers all."""

from __future__ import annotations

import numpy as np
from alone import own

from backends.contract.backend import PREFIX
from backends.llama.backend import LlamaBackend
from offload.placement.experts import ExpertCachePlan, min_slots
from offload.placement.placement import Placement
from offload.placement.plan import pin_all

PROMPT = [3, 17, 5, 60, 41, 8, 22, 9, 33, 70, 11, 54]
TREE_TOKENS = [7, 20, 30, 21, 22, 31, 40]
TREE_PARENTS = [-1, 0, 0, 1, 3, 2, 3]
OPTIONS = {"max_context": 60, "max_nodes": 20, "n_threads": 2}


def placement(layers, n_slots=2):
    return Placement(tuple(layers), n_slots)


def pinned(layer, choose):
    return layer.with_resident(frozenset(r.name for r in layer.tensors if choose(r.name)))


def in_memory(model, **options):
    return LlamaBackend(model, load_mode="mmap", **{**OPTIONS, **options})


def streamed(model, layers=None, n_slots=2, **options):
    plan = placement(layers or model.layers, n_slots)
    return LlamaBackend(model, placement=plan, **{**OPTIONS, **options})


def exercise(backend):
    """Return the logits of two steps with trees, chains, commits, prunes and rollbacks."""
    actual = []
    for _ in range(2):
        actual.append(own(backend).prefill(PROMPT))
        first = own(backend).next_node_id
        parents = [PREFIX if p == -1 else first + p for p in TREE_PARENTS]
        actual.append(own(backend).extend(TREE_TOKENS, parents)[1])
        own(backend).commit([first, first + 1, first + 3], keep=[first + 6])
        actual.append(own(backend).extend([50, 51], [first + 6, PREFIX], logits_at=[1])[1])
        own(backend).prune([first + 6])
        actual.append(own(backend).extend([9], [PREFIX])[1])
        own(backend).rollback(7)
    return actual


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def by_experts(model, n_bytes, n_slots=0):
    """Return a mixture's placement: all but experts in memory (or streamed through so many slots),
    and about `n_bytes` for the experts, at least as many as one layer's."""
    plan = ExpertCachePlan(model.experts, 1)
    minimum = min_slots(model.experts)
    plan = ExpertCachePlan(model.experts, max(minimum, n_bytes // plan.slot_bytes))
    layers = model.layers_without_experts
    return Placement(layers if n_slots else pin_all(layers), n_slots, experts=plan)


def streamed_experts(model, n_bytes=0, n_slots=0, **options):
    return LlamaBackend(model, placement=by_experts(model, n_bytes, n_slots), **OPTIONS | options)
