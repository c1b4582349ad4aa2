"""Memory of two models beside their layers, on the host and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

from backends.contract.nodes import table_bytes
from backends.contract.source import MAX_PROMPT_STATES, KvSplit, ModelSource
from offload.process.memory import companion_bytes
from specdec.config import SpecConfig
from specdec.drafters.candidates import noise_positions
from specdec.drafters.frontier import level_width
from specdec.run_options import RunOptions
from specdec.sampling.context_window import draft_context_size

_RUNS_PER_NODE = 6
_PROBABILITY_BYTES = 8  # float64
_RANKED_LOGIT_BYTES = 4 + 8  # float32 and int64
_NOISE_BYTES = 4  # float32
_VERIFIED_BYTES = 2 * 8  # p and q in float64 of every token of a chain, until it is verified
_LISTED_BYTES = 160  # Python's numbers, in tuples, in lists
_NODE_BYTES = 4 + 8  # int32 and float64
MIN_PLANNED_WIDTH = 64
"""Minimum number of branches below one draft token that memory is reserved for."""
_COPIED_LOGIT_BYTES = 4 + 4  # as copied from a GPU, and float32
_STATE_COPIES = 3
"""Copies of the hidden states of a prompt: the pass's, as returned, and as a draft head's input."""
DRAFTING_PARTS = ("draft logits", "draft probabilities", "block verification")
"""Names of the parts for drafting and verification beside activations."""


@dataclass
class Parts:
    """Bytes of each named part, in host memory and VRAM."""

    host: dict[str, int] = field(default_factory=dict)
    gpu: dict[str, int] = field(default_factory=dict)


def max_draft_nodes(n_drafted: int, max_leaves: int | None) -> int:
    """Return the maximum number of nodes in the draft's KV cache for one tree of the target.

    A tree of the best n nodes takes about 2n runs to find, at most 5n were observed; the rest is
    for parallel drafting.
    """
    n_nodes = _RUNS_PER_NODE * max(level_width(n_drafted), 1 + n_drafted)
    return n_nodes if max_leaves is None else min(n_nodes, max_leaves)


def planned_width(spec: SpecConfig) -> int:
    """Return the number of branches below one draft token that memory is reserved for."""
    return max(spec.width, MIN_PLANNED_WIDTH)


def parts_of_run(
    target: ModelSource,
    draft: ModelSource | None,
    options: RunOptions,
    ctx_size: int,
    kv_tokens: int,
    n_drafted: int,
    *,
    is_on_gpu: bool,
    is_draft_on_gpu: bool,
    kv_split: KvSplit | None = None,
) -> Parts:
    """Return the parts of everything but the layers.

    kv_tokens: capacity of the target's KV cache; the draft's has the same number of contexts.
    kv_split: part of the target's KV cache that is in memory; None: all of it.
    """
    result = Parts()
    if companion_bytes():
        result.host["server process"] = companion_bytes()
    n_nodes, num_tokens = options.target_nodes(n_drafted), options.max_target_tokens(n_drafted)
    parallel, sizes = options.max_num_seqs, (ctx_size, kv_tokens)
    _add_model(result, "target", target, is_on_gpu, sizes, num_tokens, n_nodes, parallel)
    if kv_split is not None:
        stored = target.stored_kv(sizes, kv_split, num_tokens, n_nodes)
        result.host["target KV cache"] = stored.hot_bytes
        result.host["staging of target KV cache"] = stored.staging_bytes
        result.host["target activations"] = stored.scratch_bytes
    if draft is not None:
        n_run = max_draft_nodes(n_drafted, draft.max_tree_leaves)
        draft_ctx = draft_context_size(
            options.spec.draft_window, ctx_size, draft.max_context, n_run
        )
        sizes = (draft_ctx, draft_ctx * kv_tokens // ctx_size)
        n_abreast = level_width(n_drafted)
        _add_model(result, "draft", draft, is_draft_on_gpu, sizes, n_abreast, n_run, parallel)
        n_ranked = min(draft.vocab_size, target.vocab_size)
        n_bytes = _probability_bytes(options, n_ranked, n_drafted, n_run)
        result.host["draft probabilities"] = n_bytes
        if draft.hidden_state_bytes:
            n_states = min(kv_tokens, parallel * min(ctx_size, MAX_PROMPT_STATES))
            n_bytes = _STATE_COPIES * n_states * draft.hidden_state_bytes
            result.host["hidden states"] = n_bytes
    if options.spec.acceptance == "block":
        n_verified = min(n_drafted, options.spec.depth)
        result.host["block verification"] = n_verified * target.vocab_size * _VERIFIED_BYTES
    return result


def _add_model(
    parts: Parts,
    model: str,
    source: ModelSource,
    is_on_gpu: bool,
    sizes: tuple[int, int],
    num_tokens: int,
    n_nodes: int,
    n_sequences: int,
) -> None:
    """Add a model's parts to its device; a GPU's logits are copied to the host as well.

    sizes: (tokens of a sequence, of all sequences together) in its KV cache.
    """
    kv_tokens = sizes[1]
    where = parts.gpu if is_on_gpu else parts.host
    where[f"{model} embeddings and head"] = source.non_layer_bytes
    where[f"{model} KV cache"] = source.kv_bytes(kv_tokens, n_nodes)
    state_bytes = source.state_bytes(n_sequences, n_nodes)
    if model == "target":  # drafts do not stream
        state_bytes += source.state_input_bytes(n_nodes)
    if state_bytes:
        where[f"{model} recurrent states"] = state_bytes
    where[f"{model} activations"] = source.shared_scratch_bytes(*sizes, num_tokens, n_nodes)
    if is_on_gpu:
        parts.host[f"{model} logits"] = num_tokens * source.vocab_size * _COPIED_LOGIT_BYTES
    parts.host["trees"] = parts.host.get("trees", 0) + table_bytes(n_nodes)


def _probability_bytes(options: RunOptions, n_tokens: int, n_drafted: int, n_run: int) -> int:
    """Return the bytes of drafting beside the draft's logits, for a vocabulary of `n_tokens`.

    Sampled chains store the distribution (a row) that each token was drawn from, for all sequences
    of a pass. A tree's level is ranked on a copy of its logits, with one int64 each for the order
    and noise for the positions that its nodes may have; each node stores its likeliest candidates.
    """
    spec = options.spec
    if spec.draws_chains:
        n_drawn = options.max_num_seqs * min(n_drafted, spec.depth)
        num_tokens = min(n_drawn, options.max_target_tokens(n_drafted) - 1)
        return num_tokens * n_tokens * _PROBABILITY_BYTES
    n_abreast, width = level_width(n_drafted), min(planned_width(spec), n_tokens)
    listed = n_abreast * width * _LISTED_BYTES + n_run * width * _NODE_BYTES
    ranked = n_abreast * n_tokens * _RANKED_LOGIT_BYTES
    n_noise = noise_positions(options.max_num_seqs)
    return listed + ranked + n_noise * n_tokens * _NOISE_BYTES
