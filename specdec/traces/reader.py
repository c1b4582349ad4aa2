"""Traces: the sequences of a folder, read where they are needed."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from specdec.traces.format import Shard, TraceError, TraceHeader, read_index
from specdec.traces.top_k import TopK


class _Place(NamedTuple):
    """Position of a sequence in its shard."""

    shard: int
    tokens: tuple[int, int]
    """First token, and the one after the last."""
    rows: tuple[int, int]


class Traces:
    """Sequences of a folder. Their tokens are in memory, the distributions in mapped files.

    Raises TraceError for files that contradict the index.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = read_index(folder)
        self.header: TraceHeader = index.header
        self.n_tokens = index.n_tokens
        self._files: list[Any] = []
        self._token_ids: list[NDArray[np.int32]] = []
        self._rows: list[NDArray[np.int32]] = []
        self._places: list[_Place] = []
        for number, shard in enumerate(index.shards):
            self._open(number, shard)

    def _open(self, number: int, shard: Shard) -> None:
        path = self.folder / shard.file
        try:
            file = safe_open(path, framework="numpy")
            lengths, token_ids = file.get_tensor("lengths"), file.get_tensor("token_ids")
            rows = file.get_tensor("rows")
            shapes = [tuple(file.get_slice(name).get_shape()) for name in _COLUMNS]
        except Exception as error:  # safetensors raises its own for a broken file
            reason = " ".join(str(error).split())
            raise TraceError(f"cannot read {path}: {reason}: record the traces again") from error
        k, m, limit = self.header.top_k, len(rows), self.header.vocab_size
        is_sound = (
            lengths.sum() == len(token_ids) == shard.n_tokens
            and shapes == [(m, k), (m, k), (m,)]
            and (np.diff(rows) > 0).all()
            and (not m or 0 <= rows[0] <= rows[-1] < len(token_ids))
            and (not len(token_ids) or 0 <= token_ids.min() <= token_ids.max() < limit)
        )
        if not is_sound:
            raise TraceError(f"{path} is damaged: record the traces again")
        self._files.append(file)
        self._token_ids.append(token_ids)
        self._rows.append(rows)
        ends = list(accumulate(map(int, lengths)))
        for start, end in zip([0, *ends], ends, strict=False):
            first, last = np.searchsorted(rows, [start, end])
            self._places.append(_Place(number, (start, end), (int(first), int(last))))

    def __len__(self) -> int:
        return len(self._places)

    def token_ids(self, number: int) -> NDArray[np.int32]:
        """Return the tokens [n] of a sequence."""
        place = self._places[number]
        return self._token_ids[place.shard][slice(*place.tokens)]

    def rows(self, number: int) -> NDArray[np.int32]:
        """Return the places [m] in a sequence after which the distribution is known."""
        place = self._places[number]
        return self._rows[place.shard][slice(*place.rows)] - place.tokens[0]

    def top(self, number: int) -> TopK:
        """Return the distributions [m] of a sequence."""
        place = self._places[number]
        file = self._files[place.shard]
        return TopK(*(file.get_slice(name)[slice(*place.rows)] for name in _COLUMNS))

    def location(self, number: int) -> tuple[Path, slice]:
        """Return the shard of a sequence and its part of the shard's tokens, to read hidden states:
        numpy has no bfloat16."""
        place = self._places[number]
        shard = self.folder / f"traces-{place.shard:05d}.safetensors"
        return shard, slice(*place.tokens)


_COLUMNS = ("top_ids", "top_logprobs", "rest_logprob")
