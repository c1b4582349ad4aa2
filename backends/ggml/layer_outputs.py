"""LayerOutputs: hidden states of a model's layers, read while llama.cpp computes a pass.

llama.cpp names the output of each decoder layer in its graphs, `l_out-<layer>` in nearly every
architecture. ggml calls back after the nodes that it was asked to call back after (`cb_eval` of a
context); their values are copied there. So it needs no function that only some releases have, and
works for architectures whose graphs llama.cpp's own functions for draft heads
(llama_get_embeddings_layer_inp) do not know and abort on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from backends.ggml.library import LlamaError
from backends.ggml.tensor import F32, Tensor

_NAMES = {
    "nemotron_h": "nemotron_h_block_out",
    "nemotron_h_moe": "nemotron_h_block_out",
    "plamo2": "ffn_residual",
}
"""Names of outputs by architecture, where they are not `l_out`."""
_NAMES_OF_INPUTS = {"step35": "attn_norm_in"}
"""Names of layers' inputs by architecture, where llama.cpp gives outputs these names instead: each
is the output of the layer before."""
_NAME, _SRC = Tensor.name.offset, Tensor.src.offset
_OUTPUT_WEIGHTS = (b"output.weight", b"token_embd.weight")


class LayerOutputs:
    """Outputs of layers in the passes of one context, for the tokens that a pass asks for.

    Args:
        library: llama_cpp's low-level module.
        architecture: general.architecture of the model.
        width: numbers of a hidden state.
        vocab_size: columns of the logits.
    """

    def __init__(
        self, library: ModuleType, architecture: str, width: int, vocab_size: int = 0
    ) -> None:
        name = _NAMES_OF_INPUTS.get(architecture) or _NAMES.get(architecture, "l_out")
        self._start = f"{name}-".encode()
        self._shift = int(architecture in _NAMES_OF_INPUTS)
        self._width, self._vocab_size = width, vocab_size
        self._layers: tuple[int, ...] = ()
        self._rows = np.zeros(0, dtype=np.int64)
        self._num_tokens = 0
        self._num_done: dict[int, int] = {}
        """Tokens of the pass whose outputs have been computed, by layer."""
        self._states = np.zeros((0, 0), dtype=np.float32)
        self.output_weight: int | None = None
        """Address of the ggml_tensor of the output head, once a graph has been seen."""
        self.error: BaseException | None = None
        """The error of the running pass in `callback`, which ctypes would lose."""
        self.callback = library.ggml_backend_sched_eval_callback(self._on_node)

    def collect(self, layers: Sequence[int]) -> None:
        """Take the outputs of these layers from now on."""
        self._layers = tuple(dict.fromkeys(layers))

    def begin(self, num_tokens: int, rows: np.ndarray) -> None:
        """Begin a pass of so many tokens; rows: ascending indices of those to take outputs of."""
        self._num_tokens, self._rows, self.error = num_tokens, rows, None
        self._num_done = dict.fromkeys(self._layers, 0)
        n_states = len(self._layers) if len(rows) else 0
        self._states = np.empty((len(rows), n_states * self._width), dtype=np.float32)

    def named_layer(self, address: int) -> int | None:
        """Return the layer whose output a node is by its name."""
        start = self._start
        if ctypes.string_at(address + _NAME, len(start)) != start:
            return None
        number = Tensor.from_address(address).name[len(start) :]
        return int(number) - self._shift if number.isdigit() else None

    def is_complete(self, address: int, num_tokens: int) -> bool:
        """Return whether a node has a state for each of so many tokens."""
        node = Tensor.from_address(address)
        return node.type == F32 and tuple(node.ne) == (self._width, num_tokens, 1, 1)

    def layer_of(self, address: int) -> int | None:
        """Return the layer to take whose output a node is; note the output head on the way."""
        if self.output_weight is None:
            self._see_output(address)
        layer = self.named_layer(address) if self._layers else None
        return layer if layer in self._layers else None

    def take(self, layer: int, address: int) -> None:
        """Copy the values of a layer's output, just computed, for the tokens asked for."""
        node = Tensor.from_address(address)
        start, num_tokens = self._num_done[layer], int(node.ne[1])
        if not self.is_complete(address, num_tokens) or not node.data:
            raise LlamaError(
                f"llama.cpp computed no hidden states of layer {layer}: use a draft model"
            )
        self._num_done[layer] = start + num_tokens
        first, end = np.searchsorted(self._rows, (start, start + num_tokens))
        if first == end:
            return
        n_bytes = (num_tokens - 1) * node.nb[1] + self._width * node.nb[0]
        raw = (ctypes.c_ubyte * n_bytes).from_address(node.data)
        shape, strides = (num_tokens, self._width), (node.nb[1], node.nb[0])
        values = np.ndarray(shape, np.float32, raw, strides=strides)
        place = self._layers.index(layer) * self._width
        chosen = values[self._rows[first:end] - start]
        self._states[first:end, place : place + self._width] = chosen

    def states(self, layer: int) -> np.ndarray:
        """Return the outputs of a layer in the last pass, float32 [rows, width], a view.

        Raises LlamaError unless the pass has computed them of all its tokens.
        """
        if self._num_done.get(layer) != self._num_tokens:
            raise LlamaError(
                f"llama.cpp computed the output of layer {layer} for "
                f"{self._num_done.get(layer, 0)} of {self._num_tokens} tokens: use a draft model"
            )
        place = self._layers.index(layer) * self._width
        return self._states[:, place : place + self._width]

    def joined(self, layers: Sequence[int]) -> np.ndarray | None:
        """Return the outputs of these layers side by side without a copy, if they lie so."""
        if tuple(layers) != self._layers:
            return None
        for layer in layers:
            self.states(layer)
        return self._states

    def _see_output(self, address: int) -> None:
        weight = _first_source(address)
        if weight is None or Tensor.from_address(weight).name not in _OUTPUT_WEIGHTS:
            return
        if Tensor.from_address(address).ne[0] == self._vocab_size:  # else: rows of an embedding
            self.output_weight = weight

    def _on_node(self, address: int, ask: bool, _: object) -> bool:
        """Handle ggml's callback, in a context whose layers do not stream."""
        try:
            layer = self.layer_of(address)
            if ask:
                return layer is not None
            if layer is not None:
                self.take(layer, address)
        except BaseException as error:
            self.error = error
            return False
        return True


def _first_source(address: int) -> int | None:
    return ctypes.c_void_p.from_address(address + _SRC).value
