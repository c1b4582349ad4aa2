"""A decoder layer whose weights arrive from storage for the time of its forward.

`LayerRunner` replaces the `forward` of one transformers decoder layer. Around the module's own
forward it binds the layer's tensors, and runs long inputs in chunks of rows *inside* the layer
(layer-major): a prompt then costs one read of the model, and the memory of one chunk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import nn

from backends.attention.batch import BatchLayout
from backends.attention.interface import KeyMask
from backends.checkpoint.records import TORCH_DTYPES, BoundTensor, packed_by_module
from backends.hf.packed_forward import packed_forward, unbind
from backends.hf.weights import DecodesTensors, RawTensors
from offload.formats.tensors import TensorRecord
from offload.ring.slots import Check
from offload.units import MIB

MAX_MASK_BYTES = 16 * MIB
Mask: TypeAlias = torch.Tensor | KeyMask
"""Additive [1, 1, rows, keys], or what the attention of backends/attention computes with."""
MakeMask = Callable[[BatchLayout, int, int, int | None], Mask]
OpenLayer = Callable[[int, Check], AbstractContextManager[RawTensors]]
"""See TorchWeights.layer."""


class PassState:
    """What every layer of one forward shares: the layout and the masks made from it.

    make_mask: of the layout's rows start..end, with the window of a layer.
    least_rows: of a chunk; a pass has as many.
    check_cancel: raises where the forward is to end; called before a layer, while it is waited for,
        and between its chunks.
    """

    def __init__(
        self,
        layout: BatchLayout,
        make_mask: MakeMask,
        chunk_rows: int,
        find_min_batch_tokens: int,
        alibi: Callable[[int], torch.Tensor] | None = None,
        check_cancel: Check = lambda: None,
    ) -> None:
        self.layout = layout
        self.check_cancel = check_cancel
        self.alibi = alibi
        self._chunk_rows, self._min_batch_tokens = chunk_rows, find_min_batch_tokens
        self._make_mask = make_mask
        self._masks: dict[tuple[int, int, int | None], Mask] = {}

    def mask(self, start: int, end: int, window: int | None) -> Mask:
        """Of the new rows start..end; kept while all layers use the same one."""
        key = (start, end, window)
        if key not in self._masks:
            if self._num_retained_bytes() > MAX_MASK_BYTES:
                self._masks.clear()  # a long prompt: made anew for every layer
            self._masks[key] = self._make_mask(self.layout, start, end, window)
        return self._masks[key]

    def chunks(self, num_tokens: int) -> list[tuple[int, int]]:
        """(start, end) of the rows that go through a layer together."""
        starts = list(range(0, num_tokens, self._chunk_rows))
        if num_tokens - starts[-1] < self._min_batch_tokens:
            starts[-1] = max(0, num_tokens - self._min_batch_tokens)
        return list(zip(starts, [*starts[1:], num_tokens], strict=True))

    def _num_retained_bytes(self) -> int:
        return sum(mask.nbytes for mask in self._masks.values())


class LayerRunner:
    """The forward of decoder layer `index`: weights in, chunks through, weights out."""

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
    ) -> None:
        self._index = index
        self._forward = module.forward
        self._signature = inspect.signature(module.forward)
        self._tensors = [bound for bound in tensors if bound.packed is None]
        self._packed = [packed_forward(same, decoder, dtype) for same in packed_by_module(tensors)]
        self._open_layer = open_layer
        self._window = window
        self._dtype = dtype
        self._module = module
        self._is_resident = is_resident
        self._is_bound = False  # ever true of a resident layer only: its weights never move
        self.state: PassState | None = None
        module.forward = self

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        state = self.state
        assert state is not None, "the backend sets the state before a forward"
        state.check_cancel()
        with self._open_layer(self._index, state.check_cancel) as tensors:
            if not self._is_bound:
                bind(self._tensors, tensors, self._dtype)
                for packed in self._packed:
                    packed.bind(tensors)
                self._is_bound = self._is_resident
            try:
                return self._in_chunks(state, hidden_states, self._by_name(args, kwargs))
            finally:
                if not self._is_resident:  # the slot will hold another layer
                    unbind(self._tensors)
                    for packed in self._packed:
                        packed.unbind()

    def detach(self) -> None:
        """Give the module its own forward back and let go of weights and masks; may be repeated."""
        self._is_bound, self.state = False, None
        unbind(self._tensors)
        for packed in self._packed:
            packed.detach()
        self._module.__dict__.pop("forward", None)

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments after the hidden states by name: some families give the mask by position."""
        if not args:
            return kwargs
        positional = self._signature.bind_partial(None, *args).arguments
        return {**dict(list(positional.items())[1:]), **kwargs}

    def _in_chunks(self, state: PassState, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        num_tokens = hidden.shape[1]
        chunks = state.chunks(num_tokens)
        if len(chunks) == 1:
            return self._forward(hidden, **self._adapt(state, kwargs, 0, num_tokens))
        outputs = []
        for start, end in chunks:
            state.check_cancel()
            rows = {key: slice_rows(arg, start, end, num_tokens) for key, arg in kwargs.items()}
            output = self._forward(hidden[:, start:end], **self._adapt(state, rows, start, end))
            outputs.append(output[0] if isinstance(output, tuple) else output)
        joined = torch.cat(outputs, dim=1)
        return (joined, None) if isinstance(output, tuple) else joined

    def _adapt(
        self, state: PassState, kwargs: dict[str, Any], start: int, end: int
    ) -> dict[str, Any]:
        """Put the real mask (and ALiBi bias) of these rows where placeholders came through."""
        adapted = dict(kwargs)
        adapted["attention_mask"] = state.mask(start, end, self._window)
        if state.alibi is not None and "alibi" in adapted:
            adapted["alibi"] = state.alibi(end)
        return adapted


def bind(bound: Sequence[BoundTensor], tensors: RawTensors, dtype: torch.dtype) -> None:
    """Let the modules' parameters be views of `tensors`."""
    made: dict[str, torch.Tensor] = {}  # a tied tensor serves in several places
    for item in bound:
        name = item.record.name
        if name not in made:
            made[name] = as_tensor(tensors[name], item.record, dtype)
        item.module._parameters[item.attribute] = made[name]


def as_tensor(raw: torch.Tensor, record: TensorRecord, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over the bytes `raw` without a copy, unless it is misaligned or of another dtype."""
    stored = TORCH_DTYPES[record.dtype]
    if raw.data_ptr() % stored.itemsize:
        raw = raw.clone()  # an odd header length shifts every tensor of the file
    return raw.view(stored).view(record.shape).to(dtype)


def slice_rows(value: Any, start: int, end: int, num_tokens: int) -> Any:
    """Rows start..end of whatever has one entry for each input row: [1, n, ...] or [n]."""
    if isinstance(value, tuple):
        return tuple(slice_rows(item, start, end, num_tokens) for item in value)
    if isinstance(value, torch.Tensor):
        if value.ndim >= 2 and value.shape[1] == num_tokens:
            return value[:, start:end]
        if value.ndim == 1 and value.shape[0] == num_tokens:
            return value[start:end]
    return value
