"""Files of traces.

A folder has `traces.json` and shards, safetensors files of some megabytes. The index:

    {"format": "specdec traces", "version": 1,
     "vocab_size": 4096,          tokens that the distributions are over
     "top_k": 32,
     "hidden_layers": [-1],       layers whose hidden states are stored side by side; [] for none
     "hidden_size": 384,          width of all of them together
     "target": "...",             fingerprint of the model that computed them
     "shards": [{"file": "traces-00000.safetensors", "n_sequences": 9, "n_tokens": 4608,
                 "n_bytes": 912384}, ...]}

A shard of S sequences with N tokens, M of which the target's distribution is known after:

    lengths        int32 [S]       tokens of each sequence; their sum is N
    token_ids      int32 [N]       the sequences one after the other
    rows           int32 [M]       places in token_ids after which the distribution is known
    top_ids        int32 [M, k]    the likeliest next tokens, likeliest first
    top_logprobs   float16 [M, k]  their log-probabilities, at temperature 1
    rest_logprob   float16 [M]     log of the probability of all other tokens together
    hidden_states  bfloat16 [N, w] the target's hidden states, where the index names layers

A shard belongs to the traces once the index names it, so an interrupted program leaves whole ones.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload.errors import SpecdecError
from specdec.traces.top_k import TopK

INDEX = "traces.json"
DEFAULT_TOP_K = 32
_FORMAT, _VERSION = "specdec traces", 1


class TraceError(SpecdecError):
    """Traces cannot be read or written."""


@dataclass(frozen=True)
class TraceHeader:
    """Properties that all sequences of a folder share; see the module's docstring."""

    vocab_size: int
    target: str
    top_k: int = DEFAULT_TOP_K
    hidden_layers: tuple[int, ...] = ()
    hidden_size: int = 0


@dataclass(frozen=True)
class Shard:
    """One file of traces."""

    file: str
    n_sequences: int
    n_tokens: int
    n_bytes: int


@dataclass(frozen=True)
class TraceIndex:
    """Contents of a folder of traces."""

    header: TraceHeader
    shards: tuple[Shard, ...] = ()

    @property
    def n_sequences(self) -> int:
        return sum(shard.n_sequences for shard in self.shards)

    @property
    def n_tokens(self) -> int:
        return sum(shard.n_tokens for shard in self.shards)

    @property
    def n_bytes(self) -> int:
        return sum(shard.n_bytes for shard in self.shards)


class TracedSequence(NamedTuple):
    """One sequence, and the target's distributions and hidden states along it."""

    token_ids: NDArray[np.int32]
    """[n]"""
    rows: NDArray[np.int32]
    """[m]: tokens, counted in the sequence, after which the distribution is known."""
    top: TopK
    """[m] rows"""
    hidden_states: NDArray[np.float32] | None = None
    """[n, width], if the folder has hidden states."""

    @property
    def n_bytes(self) -> int:
        """Bytes in a shard."""
        states = 0 if self.hidden_states is None else 2 * self.hidden_states.size
        n_ids = 1 + self.token_ids.size + self.rows.size  # the length, too
        return 4 * n_ids + self.top.n_bytes + states


def bytes_per_token(hidden_size: int = 0, top_k: int = DEFAULT_TOP_K) -> int:
    """Return the bytes of a token whose distribution is known, in a shard."""
    candidate, ids, rest, state = 4 + 2, 4 + 4, 2, 2 * hidden_size
    return candidate * top_k + ids + rest + state


def write_index(folder: Path, index: TraceIndex) -> None:
    """Replace the index of a folder at once. Raises OSError."""
    values = {"format": _FORMAT, "version": _VERSION, **asdict(index.header)}
    values["shards"] = [asdict(shard) for shard in index.shards]
    partial = folder / f".{INDEX}.partial"
    partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    partial.replace(folder / INDEX)


def read_index(folder: Path) -> TraceIndex:
    """Read the index of a folder. Raises TraceError."""
    path = folder / INDEX
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return _index_of(values)
    except FileNotFoundError as error:
        raise TraceError(
            f"{folder} has no {INDEX}: name a folder that --record-traces has written"
        ) from error
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(
            f"{path} is no index of traces in version {_VERSION}: record them again"
        ) from error


def _index_of(values: dict[str, Any]) -> TraceIndex:
    if values["format"] != _FORMAT or values["version"] != _VERSION:
        raise ValueError(values["version"])
    header = TraceHeader(
        int(values["vocab_size"]),
        str(values["target"]),
        int(values["top_k"]),
        tuple(int(layer) for layer in values["hidden_layers"]),
        int(values["hidden_size"]),
    )
    shards = tuple(Shard(**shard) for shard in values["shards"])
    if any(Path(shard.file).name != shard.file for shard in shards):
        raise ValueError("a shard lies outside of the folder")
    return TraceIndex(header, shards)
