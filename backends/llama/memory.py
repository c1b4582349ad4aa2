"""Memory that llama.cpp allocates for a context, as logged by llama.cpp itself.

A model that is loaded without its weights goes through the same sizing of graphs and buffers as a
real one and logs the sizes; nothing else is reliable for every architecture.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from backends.ggml.library import LlamaError, LlamaModel
from backends.gguf.model import GgufModel
from backends.llama.cells import MOVED_CELLS
from backends.llama.context import ContextOptions, LlamaContext
from offload.units import MIB

_SIZE = re.compile(r"(compute|output|RS) buffer size = +([0-9.]+) MiB")
_KV_SIZE = re.compile(r"(cache): size = +([0-9.]+) MiB \( *\d+ cells")
_ROUNDING_BYTES = 0.005 * MIB  # sizes in the log have two decimals
_CELL_BYTES = 500
"""Bytes per KV cell: position, shift, extension and the set of its 256 sequences, twice; and our
record of its users."""
_SET_NODE_BYTES = 64  # a (position, cell) pair in the ordered set of a sequence
_GRAPH_BYTES = 8 * MIB  # graphs, their nodes and the scheduler's tables


@dataclass(frozen=True)
class ContextMemory:
    """Memory of a context; all sizes are upper bounds in bytes."""

    kv_bytes: int
    compute_bytes: int
    """Bytes of activations of the widest pass."""
    output_bytes: int
    """Bytes of llama.cpp's logits and of the copy that a backend returns."""
    work_bytes: int
    """Bytes of converted operands of products, and of the bookkeeping of cells and graphs."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes of all but the KV cache."""
        return self.compute_bytes + self.output_bytes + self.work_bytes


def context_memory(
    model: GgufModel, weightless: LlamaModel, options: ContextOptions
) -> ContextMemory:
    """Return the memory that a `LlamaBackend` with these options takes beside its weights.

    Args:
        weightless: the same model, with the load mode "none".

    Raises:
        LlamaError: llama.cpp refuses the model or does not log the sizes.
    """
    context = LlamaContext(weightless, options)
    n_cells = context.n_cells
    context.close()
    sizes = logged_sizes(context.log)
    if options.is_recurrent:
        sizes = {"cache": 0, **sizes}  # Mamba has no attention
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


def bytes_of_a_state(weightless: LlamaModel) -> int:
    """Return the bytes of the recurrent states of all layers after one token."""
    options = ContextOptions(1, 1)
    context = LlamaContext(weightless, options)
    context.close()
    n_bytes = logged_sizes(context.log).get("RS")
    if n_bytes is None:
        raise LlamaError(
            "llama.cpp does not say how large its recurrent states are: use llama-cpp-python 0.3.36"
        )
    return -(-n_bytes // options.n_sequences)


def logged_sizes(log: list[str]) -> dict[str, int]:
    """Return bytes by kind (cache, compute, output; RS: recurrent states), summed over buffers and
    rounded up."""
    sizes: dict[str, int] = {}
    for line in log:
        if match := _SIZE.search(line) or _KV_SIZE.search(line):
            n_bytes = int(float(match.group(2)) * MIB + _ROUNDING_BYTES) + 1
            sizes[match.group(1)] = sizes.get(match.group(1), 0) + n_bytes
    return sizes


def _operand_bytes(model: GgufModel, options: ContextOptions) -> int:
    """Return the maximum bytes of a product's activations in the weights' partner format.

    Float32 at most, as wide as the widest matrix, for each token (and each expert of a token, of
    which there are up to as many as experts, but only eight in the widest models).
    """
    matrices = [r for layer in model.layers for r in layer.tensors if len(r.shape) > 1]
    widest = max((r.shape[-1] for r in (*matrices, *model.non_layer_records)), default=0)
    return 4 * widest * options.max_num_tokens * max(1, min(model.n_experts, 8))
