"""What llama.cpp allocates for a context, asked of llama.cpp itself.

A model that is loaded without its weights goes through the same arithmetic of graphs and buffers as
a real one and logs the sizes; only that is sure for every architecture.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from backends.ggml.library import LlamaError, LlamaModel
from backends.gguf.model import GgufModel
from backends.llama.cells import MOVED_CELLS
from backends.llama.context import ContextOptions, LlamaContext
from offload.units import MIB

_SIZE = re.compile(r"(compute|output) buffer size = +([0-9.]+) MiB")
_KV_SIZE = re.compile(r"(cache): size = +([0-9.]+) MiB \( *\d+ cells")
_ROUNDING_BYTES = 0.005 * MIB  # of a size in the log
_CELL_BYTES = 500
"""Per KV cell: position, shift, extension and the set of its 256 sequences, twice; and our record
of which sequences hold it."""
_SET_NODE_BYTES = 64  # a (position, cell) pair in the ordered set of a sequence
_GRAPH_BYTES = 8 * MIB  # graphs, their nodes and the scheduler's tables


@dataclass(frozen=True)
class ContextMemory:
    """Memory of a context in bytes, each an upper bound."""

    kv_bytes: int
    compute_bytes: int
    """Activations of the widest pass."""
    output_bytes: int
    """llama.cpp's logits, and the copy that a backend returns."""
    work_bytes: int
    """Operands of matrix products in the weights' format, and bookkeeping of cells and graphs."""

    @property
    def scratch_bytes(self) -> int:
        """All but the KV cache."""
        return self.compute_bytes + self.output_bytes + self.work_bytes


def context_memory(
    model: GgufModel, weightless: LlamaModel, options: ContextOptions
) -> ContextMemory:
    """What a `LlamaBackend` with these options takes beside its weights.

    Args:
        weightless: the same model, with the load mode "none".

    Raises:
        LlamaError: llama.cpp refuses the model or does not say the sizes.
    """
    context = LlamaContext(weightless, options)
    n_cells = context.n_cells
    context.close()
    sizes = logged_sizes(context.log)
    missing = {"cache", "compute", "output"} - set(sizes)
    if missing:
        raise LlamaError(
            f"llama.cpp does not say how large its {min(missing)} buffer is: "
            "use llama-cpp-python 0.3.36"
        )
    copies = options.n_outputs * model.vocab_size * 4
    moved = MOVED_CELLS * sizes["cache"] // n_cells if options.exactness.is_exact else 0
    cells = n_cells * (_CELL_BYTES + options.n_sequences * _SET_NODE_BYTES)
    return ContextMemory(
        kv_bytes=sizes["cache"],
        compute_bytes=sizes["compute"],
        output_bytes=sizes["output"] + copies,
        work_bytes=_operand_bytes(model, options) + cells + moved + _GRAPH_BYTES,
    )


def logged_sizes(log: list[str]) -> dict[str, int]:
    """Bytes by kind (cache, compute, output), summed over the buffers of a kind, rounded up."""
    sizes: dict[str, int] = {}
    for line in log:
        if match := _SIZE.search(line) or _KV_SIZE.search(line):
            n_bytes = int(float(match.group(2)) * MIB + _ROUNDING_BYTES) + 1
            sizes[match.group(1)] = sizes.get(match.group(1), 0) + n_bytes
    return sizes


def _operand_bytes(model: GgufModel, options: ContextOptions) -> int:
    """ggml converts the activations of a product to the weights' partner format: at most float32.

    The columns of the widest matrix, once per row (and per expert that a row is sent to, of which
    there are as many as experts at most, but only eight in the widest models).
    """
    matrices = [r for layer in model.layers for r in layer.tensors if len(r.shape) > 1]
    widest = max((r.shape[-1] for r in (*matrices, *model.non_layer_records)), default=0)
    return 4 * widest * options.max_num_tokens * max(1, min(model.n_experts, 8))
