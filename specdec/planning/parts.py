"""What two models take of memory beside their layers: of the host, and of a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from backends.contract.nodes import table_bytes
from backends.contract.source import ModelSource
from specdec.config import SpecConfig
from specdec.drafters.candidates import noise_positions
from specdec.drafters.model import level_width
from specdec.drafters.window import draft_context_size
from specdec.planning.run_options import RunOptions

_RUNS_PER_NODE = 6
_PROBABILITY_BYTES = 8  # float64
_RANKED_LOGIT_BYTES = 4 + 8  # float32 and int64
_NOISE_BYTES = 4  # float32
_JUDGED_BYTES = 2 * 8  # p and q in float64 of every token of a chain, until it is judged
_LISTED_BYTES = 160  # Python's numbers, in tuples, in lists
_KEPT_BYTES = 4 + 8  # int32 and float64
LEAST_PLANNED_WIDTH = 64
"""Branches below one draft token that memory is set aside for in any case."""
_BROUGHT_LOGIT_BYTES = 4 + 4  # as they come from a GPU, and float32
DRAFTING_PARTS = ("draft activations", "draft logits", "draft probabilities", "block verification")
"""What drafts take once they are computed, and judged."""


@dataclass
class Parts:
    """Bytes by name."""

    host: dict[str, int] = field(default_factory=dict)
    gpu: dict[str, int] = field(default_factory=dict)


def most_draft_nodes(n_drafted: int, most_leaves: int | None) -> int:
    """Most nodes that the draft runs for one tree of the target, of which it keeps the KV.

    A tree of the best n nodes takes about 2n runs to find, 5n at most of those observed; the rest
    is for drafting ahead.
    """
    n_nodes = _RUNS_PER_NODE * max(level_width(n_drafted), 1 + n_drafted)
    return n_nodes if most_leaves is None else min(n_nodes, most_leaves)


def planned_width(spec: SpecConfig) -> int:
    """Branches below one draft token that memory is set aside for."""
    return max(spec.width, LEAST_PLANNED_WIDTH)


@dataclass(frozen=True)
class PartsOfRun:
    """Computes the parts of one run for trees and contexts of any size."""

    target: ModelSource
    options: RunOptions
    is_on_gpu: bool
    """The target; a draft says it for itself."""

    def parts(
        self,
        ctx_size: int,
        n_drafted: int,
        draft: ModelSource | None,
        *,
        is_draft_on_gpu: bool = False,
    ) -> Parts:
        """Of everything but the layers."""
        found = Parts()
        n_nodes = self.options.target_nodes(n_drafted)
        n_rows = self.options.target_rows(n_drafted)
        target, n_tokens = self.target, self.options.all_tokens(ctx_size)
        _place(
            found,
            "target",
            self.is_on_gpu,
            {
                "embeddings and head": target.outer_bytes,
                "KV cache": target.kv_bytes(n_tokens, n_nodes),
                "activations": target.scratch_bytes(n_tokens, n_rows, n_nodes),
            },
            n_logits=n_rows * target.vocab_size,
        )
        found.host["trees"] = table_bytes(n_nodes)
        if draft is not None:
            n_run = most_draft_nodes(n_drafted, draft.max_tree_leaves)
            n_abreast = level_width(n_drafted)
            window = self.options.spec.draft_window
            draft_ctx = draft_context_size(window, ctx_size, draft.max_context, n_run)
            draft_tokens = draft_ctx * n_tokens // ctx_size
            _place(
                found,
                "draft",
                is_draft_on_gpu,
                {
                    "embeddings and head": draft.outer_bytes,
                    "KV cache": draft.kv_bytes(draft_tokens, n_run),
                    "activations": draft.scratch_bytes(draft_tokens, n_abreast, n_run),
                },
                n_logits=n_abreast * draft.vocab_size,
            )
            found.host["trees"] += table_bytes(n_run)
            found.host["draft probabilities"] = self._probability_bytes(draft, n_drafted, n_run)
        if self.options.spec.acceptance == "block":
            n_rows = min(n_drafted, self.options.spec.depth)
            found.host["block verification"] = n_rows * target.vocab_size * _JUDGED_BYTES
        return found

    def _probability_bytes(self, draft: ModelSource, n_drafted: int, n_run: int) -> int:
        """What drafting keeps beside the draft's logits.

        The rules of chains keep the row that each token was drawn from, of all texts of a pass. A
        tree's level is ranked on a copy of its logits, whose order is one int64 for each, with the
        noise of the positions that its nodes may have; the likeliest are listed, and kept for each
        node.
        """
        spec, n_tokens = self.options.spec, min(draft.vocab_size, self.target.vocab_size)
        if spec.draws_chains:
            n_drawn = self.options.parallel * min(n_drafted, spec.depth)
            n_rows = min(n_drawn, self.options.target_rows(n_drafted) - 1)
            return n_rows * n_tokens * _PROBABILITY_BYTES
        n_abreast, width = level_width(n_drafted), min(planned_width(spec), n_tokens)
        listed = n_abreast * width * _LISTED_BYTES + n_run * width * _KEPT_BYTES
        ranked = n_abreast * n_tokens * _RANKED_LOGIT_BYTES
        n_noise = noise_positions(self.options.parallel)
        return listed + ranked + n_noise * n_tokens * _NOISE_BYTES


def _place(
    parts: Parts, model: str, is_on_gpu: bool, found: Mapping[str, int], *, n_logits: int
) -> None:
    """Where the model computes; of a GPU's logits a copy comes to the host."""
    where = parts.gpu if is_on_gpu else parts.host
    where.update({f"{model} {name}": n_bytes for name, n_bytes in found.items()})
    if is_on_gpu:
        parts.host[f"{model} logits"] = n_logits * _BROUGHT_LOGIT_BYTES
