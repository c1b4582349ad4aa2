"""Tensors of a GGUF file, decoded into memory: a small model that does not run on llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from math import prod

import numpy as np
import torch
from torch import nn

from backends.checkpoint.records import TORCH_DTYPES
from backends.contract.backend import TransferStats, UnsupportedModel
from backends.hf.model import HfModel
from backends.hf.weights import FetchExperts, RawTensors
from backends.packed.decoder import Decoder
from offload.distribution import install_command
from offload.formats.gguf_header import row_bytes
from offload.formats.part import read_part
from offload.formats.tensors import CheckpointError, TensorRecord
from offload.ring.slots import Check
from offload.units import MIB

_PIECE_NUMBERS = MIB
"""Numbers that are decoded at a time, which take 4 bytes each and more within the decoder."""
_ALIGNMENT = 64


def decoded_records(
    stored: Mapping[str, TensorRecord], dtype: torch.dtype
) -> dict[str, TensorRecord]:
    """Return the tensors as if the file had them in `dtype`, one after the other.

    Raises UnsupportedModel if they cannot be decoded here.
    """
    if find_spec("gguf") is None:
        raise UnsupportedModel(f"heads in GGUF files need gguf: {install_command('gguf')}")
    (name,) = (name for name, known in TORCH_DTYPES.items() if known == dtype)
    records, offset = {}, 0
    for record in {record.dtype: record for record in stored.values()}.values():
        n_row_bytes = row_bytes(record.dtype, record.shape[-1]) if record.shape else 0
        if n_row_bytes:
            _decode(record, bytes(n_row_bytes), n_row_bytes)  # refuses what cannot be decoded
    for key, record in stored.items():
        n_bytes = prod(record.shape) * dtype.itemsize
        records[key] = replace(record, name=key, dtype=name, offset=offset, n_bytes=n_bytes)
        offset += -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
    return records


def head_dtype(records: Mapping[str, TensorRecord]) -> torch.dtype:
    """Return the number format to compute a head in beside a target on llama.cpp: processors
    multiply bfloat16 faster than float16, and a draft needs no more of its digits."""
    matrix = records.get("fc.weight")
    is_single = matrix is not None and matrix.dtype == "F32"
    return torch.float32 if is_single else torch.bfloat16


def read_numbers(record: TensorRecord) -> torch.Tensor:
    """Return a tensor in float32. Raises CheckpointError, UnsupportedModel."""
    return decoded(record, torch.float32).view(record.shape)


def decoded(record: TensorRecord, dtype: torch.dtype) -> torch.Tensor:
    """Read a stored tensor and decode it: [rows, row length].

    Raises CheckpointError if the file ends within it or cannot be read, UnsupportedModel for a
    number format that the gguf package does not decode.
    """
    n_columns = record.shape[-1]
    result = torch.empty((prod(record.shape[:-1]), n_columns), dtype=dtype)
    done = 0
    for rows in _pieces(record):
        numbers = torch.from_numpy(np.ascontiguousarray(rows))
        result[done : done + len(numbers)] = numbers
        done += len(numbers)
    return result


def decoded_rows(record: TensorRecord, rows: Sequence[int]) -> torch.Tensor:
    """Read and decode some rows of a matrix, float32 [rows, row length]. Raises as `decoded`."""
    n_bytes = row_bytes(record.dtype, record.shape[-1])
    stored = b"".join(_read(record, row * n_bytes, n_bytes) for row in rows)
    return torch.from_numpy(np.ascontiguousarray(_decode(record, stored, n_bytes)))


class StoredEmbedding(nn.Module):
    """Embedding in a GGUF file: tokens [..., n] -> [..., n, hidden].

    Attributes:
        embed_scale: factor of the rows, as transformers names it.
    """

    def __init__(self, record: TensorRecord, dtype: torch.dtype, embed_scale: float) -> None:
        super().__init__()
        self._record, self._dtype, self.embed_scale = record, dtype, embed_scale

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the table, without the factor."""
        tokens, places = torch.unique(token_ids, return_inverse=True)
        table = decoded_rows(self._record, tokens.tolist())
        return table[places].to(self._dtype)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.rows(token_ids) * self.embed_scale


class DecodedWeights:
    """Weights of a head, decoded once and all in memory; they implement TorchWeights on the CPU.

    Args:
        stored: the tensors in the file, by the names that the model's records have.
        rotary_heads: number of heads of each tensor whose rows llama.cpp has in the order of its
            RoPE: pairs of neighbours, where transformers pairs the halves of a head.
    """

    device = torch.device("cpu")
    fetch_experts: FetchExperts | None = None
    streams = False
    use = TransferStats()
    unread_bytes = 0
    pinned_bytes = 0

    def __init__(
        self,
        model: HfModel,
        stored: Mapping[str, TensorRecord],
        rotary_heads: Mapping[str, int] | None = None,
    ) -> None:
        self.decoder = Decoder((), 1)
        self._stored, self._rotary_heads, self._dtype = stored, rotary_heads or {}, model.dtype
        self._layers = [
            self._load(record for record in layer.tensors) for layer in model.layer_weights
        ]
        self._non_layer = self._load(iter(model.non_layer_records))

    def _load(self, records: Iterator[TensorRecord]) -> dict[str, torch.Tensor]:
        return {record.name: self._bytes_of(record.name) for record in records}

    def _bytes_of(self, name: str) -> torch.Tensor:
        numbers = decoded(self._stored[name], self._dtype)
        if name in self._rotary_heads:
            heads = numbers.view(self._rotary_heads[name], -1, 2, numbers.shape[-1])
            numbers = heads.transpose(1, 2).reshape(numbers.shape)
        return numbers.flatten().view(torch.uint8)

    @property
    def non_layer(self) -> RawTensors:
        return self._non_layer

    @contextmanager
    def layer(self, index: int, check: Check | None = None) -> Iterator[RawTensors]:
        yield self._layers[index]

    def stays(self, index: int) -> bool:
        return True

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def on_host(self, logits: torch.Tensor) -> np.ndarray:
        return logits.float().numpy()

    def restart(self) -> None:
        """Do nothing: no layer is read ahead."""

    def set_pinned_bytes(self, n_bytes: int) -> None:
        """Do nothing: no layer streams."""

    def stop(self) -> bool:
        return True

    def close(self) -> None:
        self._layers, self._non_layer = [], {}
        self.decoder.close()


def _pieces(record: TensorRecord) -> Iterator[np.ndarray]:
    """Yield some rows of a tensor at a time, in float32."""
    n_columns, num_rows = record.shape[-1], prod(record.shape[:-1])
    n_bytes, step = row_bytes(record.dtype, n_columns), max(1, _PIECE_NUMBERS // n_columns)
    for start in range(0, num_rows, step):
        end = min(start + step, num_rows)
        stored = _read(record, start * n_bytes, (end - start) * n_bytes)
        yield _decode(record, stored, n_bytes)


def _read(record: TensorRecord, start: int, n_bytes: int) -> bytes:
    try:
        stored = read_part(record.path, record.offset + start, n_bytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {record.path}: {error.strerror or error}") from error
    if len(stored) < n_bytes:
        raise CheckpointError(f"{record.path} ends within {record.name}: download it again")
    return stored


def _decode(record: TensorRecord, stored: bytes, n_row_bytes: int) -> np.ndarray:
    """Return rows in float32."""
    import gguf

    raw = np.frombuffer(bytearray(stored), dtype=np.uint8).reshape(-1, n_row_bytes)
    try:
        return gguf.dequantize(raw, gguf.GGMLQuantizationType[record.dtype])
    except (NotImplementedError, KeyError) as error:
        raise UnsupportedModel(
            f"{record.path} has {record.name} in {record.dtype}, which the gguf package does not "
            "decode: take it in another quantisation, or a head's safetensors"
        ) from error
