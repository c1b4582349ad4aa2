"""A decoder layer whose weights are in memory only during its forward.

`LayerRunner` replaces the `forward` of one transformers decoder layer. Around the module's own
forward it binds the layer's tensors, and runs long inputs in chunks of tokens *inside* the layer
(layer-major): a prompt then costs one read of the model, and the memory of one chunk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import nn

from backends.attention.batch import BatchLayout
from backends.attention.interface import KeyMask
from backends.checkpoint.records import TORCH_DTYPES, BoundTensor, packed_by_module
from backends.hf.hidden_states import HiddenStates
from backends.hf.packed_forward import packed_forward, unbind
from backends.hf.weights import DecodesTensors, RawTensors
from backends.recurrent.passes import RecurrentPass
from offload.formats.tensors import TensorRecord
from offload.ring.slots import Check
from offload.units import MIB

MAX_MASK_BYTES = 16 * MIB
_RECURRENT_MASKS = frozenset({"mamba_attention_mask"})
"""Arguments of layers that have both attention and a recurrence."""
Mask: TypeAlias = torch.Tensor | KeyMask
"""Additive mask [1, 1, rows, keys], or a mask for the attention of backends/attention."""
MakeMask = Callable[[BatchLayout, int, int, int | None], Mask]
OpenLayer = Callable[[int, Check], AbstractContextManager[RawTensors]]
"""See TorchWeights.layer."""
ReadingKv = Callable[[int, Check], AbstractContextManager[None]]
"""See KvPool.reading."""


class PassState:
    """State shared by all layers of one forward pass: the layout and the masks made from it.

    make_mask: builds the mask of the layout's rows start..end for a layer's window.
    min_batch_tokens: minimum size of a chunk; the pass has at least as many tokens.
    check_cancel: raises if the pass was cancelled; called before a layer, while waiting for it, and
        between its chunks.
    reading: returns the context in which a layer's keys and values may be used, from its index and
        a check.
    recurrent: the recurrences of the pass, if the model has recurrent layers.
    hidden_states: keeps layers' outputs, if any are to be returned.
    """

    def __init__(
        self,
        layout: BatchLayout,
        make_mask: MakeMask,
        chunk_tokens: int,
        min_batch_tokens: int,
        alibi: Callable[[int], torch.Tensor] | None = None,
        check_cancel: Check = lambda: None,
        reading: ReadingKv = lambda layer, check: nullcontext(),
        recurrent: RecurrentPass | None = None,
        hidden_states: HiddenStates | None = None,
    ) -> None:
        self.reading = reading
        self.layout, self.recurrent = layout, recurrent
        self.hidden_states = hidden_states
        self.check_cancel = check_cancel
        self.alibi = alibi
        self._chunk_tokens, self._min_batch_tokens = chunk_tokens, min_batch_tokens
        self._make_mask = make_mask
        self._masks: dict[tuple[int, int, int | None, bool], Mask] = {}

    def mask(self, start: int, end: int, window: int | None, looks_ahead: bool = False) -> Mask:
        """Return the mask of the new rows start..end; cached for the other layers."""
        key = (start, end, window, looks_ahead)
        if key not in self._masks:
            if self._num_cached_bytes() > MAX_MASK_BYTES:
                self._masks.clear()  # a long prompt: masks are built again for every layer
            layout = self.layout.looking_ahead() if looks_ahead else self.layout
            self._masks[key] = self._make_mask(layout, start, end, window)
        return self._masks[key]

    def chunks(self, num_tokens: int) -> list[tuple[int, int]]:
        """Return (start, end) of the tokens that go through a layer together."""
        starts = list(range(0, num_tokens, self._chunk_tokens))
        if num_tokens - starts[-1] < self._min_batch_tokens:
            starts[-1] = max(0, num_tokens - self._min_batch_tokens)
        return list(zip(starts, [*starts[1:], num_tokens], strict=True))

    def _num_cached_bytes(self) -> int:
        return sum(mask.nbytes for mask in self._masks.values())


class LayerRunner:
    """The forward of decoder layer `index`: bind its weights, run the chunks, unbind them."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        tensors: Sequence[BoundTensor],
        open_layer: OpenLayer,
        window: int | None,
        dtype: torch.dtype,
        is_resident: bool,
        decoder: DecodesTensors,
        has_attention: bool = True,
        looks_ahead: bool = False,
    ) -> None:
        self._looks_ahead = looks_ahead
        self._index, self._has_attention = index, has_attention
        self._forward, self._replaced = module.forward, module.__dict__.get("forward")
        self._signature = inspect.signature(module.forward)
        self._tensors = [bound for bound in tensors if bound.packed is None]
        self._packed = [packed_forward(same, decoder, dtype) for same in packed_by_module(tensors)]
        self._open_layer = open_layer
        self._window = window
        self._dtype = dtype
        self._module = module
        self._is_resident = is_resident
        self._is_bound = False  # stays true for a resident layer only: its weights never move
        self.state: PassState | None = None
        module.forward = self

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        state = self.state
        assert state is not None, "the backend sets the state before a forward"
        state.check_cancel()
        with (
            self._open_layer(self._index, state.check_cancel) as tensors,
            state.reading(self._index, state.check_cancel),
        ):
            if not self._is_bound:
                bind(self._tensors, tensors, self._dtype)
                for packed in self._packed:
                    packed.bind(tensors)
                self._is_bound = self._is_resident
            try:
                output = self._in_chunks(state, hidden_states, self._by_name(args, kwargs))
                if state.hidden_states is not None:
                    state.hidden_states.note(self._index, output)
                return output
            finally:
                if not self._is_resident:  # the slot will hold another layer
                    unbind(self._tensors)
                    for packed in self._packed:
                        packed.unbind()

    def detach(self) -> None:
        """Restore the module's own forward and free weights and masks. Idempotent."""
        self._is_bound, self.state = False, None
        unbind(self._tensors)
        for packed in self._packed:
            packed.detach()
        self._module.__dict__.pop("forward", None)
        if self._replaced is not None:
            self._module.forward = self._replaced

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by name: some families pass the mask by position."""
        if not args:
            return kwargs
        positional = self._signature.bind_partial(None, *args).arguments
        return {**dict(list(positional.items())[1:]), **kwargs}

    def _in_chunks(self, state: PassState, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        axis = token_axis(hidden)
        num_tokens = hidden.shape[axis]
        chunks = state.chunks(num_tokens)
        if len(chunks) == 1:
            return self._forward(hidden, **self._adapt(state, kwargs, 0, num_tokens))
        outputs = []
        for start, end in chunks:
            state.check_cancel()
            rows = {key: slice_rows(arg, start, end, num_tokens) for key, arg in kwargs.items()}
            part = hidden.narrow(axis, start, end - start)
            output = self._forward(part, **self._adapt(state, rows, start, end))
            outputs.append(output[0] if isinstance(output, tuple) else output)
        joined = torch.cat(outputs, dim=axis)
        return (joined, *output[1:]) if isinstance(output, tuple) else joined

    def _adapt(
        self, state: PassState, kwargs: dict[str, Any], start: int, end: int
    ) -> dict[str, Any]:
        """Replace the placeholder mask (and ALiBi bias) by the real one of these rows."""
        if state.recurrent is not None:
            state.recurrent.begin_layer(self._index, start)
        adapted = dict(kwargs)
        if not self._has_attention:  # a mask would only mark padding
            adapted["attention_mask"] = None
            return adapted
        adapted["attention_mask"] = state.mask(start, end, self._window, self._looks_ahead)
        for name in _RECURRENT_MASKS & adapted.keys():
            adapted[name] = None
        if state.alibi is not None and "alibi" in adapted:
            adapted["alibi"] = state.alibi(end)
        return adapted


def token_axis(hidden: torch.Tensor) -> int:
    """Return the axis of the tokens in the input of a layer.

    Some families have several streams: [1, tokens, streams, hidden] (hyper-connections), or
    [streams, 1, tokens, hidden] (Gemma 3n).
    """
    has_streams_after = hidden.ndim == 4 and hidden.shape[0] == 1
    return 1 if has_streams_after else hidden.ndim - 2


def in_memory(bound: Sequence[BoundTensor], tensors: RawTensors) -> list[BoundTensor]:
    """Return those that are in memory; the rows of others are read when they are needed."""
    return [target for target in bound if target.record.name in tensors]


def bind(bound: Sequence[BoundTensor], tensors: RawTensors, dtype: torch.dtype) -> None:
    """Make the modules' parameters views of `tensors`."""
    views: dict[str, torch.Tensor] = {}  # a tied tensor serves in several places
    for target in bound:
        own = torch.float32 if target.is_float32 else dtype
        for record in target.parts or (target.record,):
            if record.name not in views:
                views[record.name] = as_tensor(tensors[record.name], record, own)
        parts = [views[record.name] for record in target.parts]
        whole = torch.cat(parts) if parts else views[target.record.name]
        target.module._parameters[target.attribute] = whole


def as_tensor(raw: torch.Tensor, record: TensorRecord, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over the bytes `raw`; copies only if misaligned or of another dtype."""
    stored = TORCH_DTYPES[record.dtype]
    if raw.data_ptr() % stored.itemsize:
        raw = raw.clone()  # an odd header length shifts every tensor of the file
    return raw.view(stored).view(record.shape).to(dtype)


def slice_rows(value: Any, start: int, end: int, num_tokens: int) -> Any:
    """Return rows start..end of a value with one entry per token: [1, n, ...] or [n]."""
    if isinstance(value, tuple):
        return tuple(slice_rows(item, start, end, num_tokens) for item in value)
    if isinstance(value, torch.Tensor):
        if value.ndim >= 2 and value.shape[1] == num_tokens:
            return value[:, start:end]
        if value.ndim == 1 and value.shape[0] == num_tokens:
            return value[start:end]
    return value
