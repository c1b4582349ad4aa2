"""Training data: windows of traced sequences, split and batched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open

from specdec.traces.reader import Traces
from specdec.traces.top_k import TopK
from specdec.training.loss import TopKTargets
from specdec.training.options import TrainError

HELD_OUT_SHARE = 0.1
_MAX_HELD_OUT_TOKENS = 16_384
"""Maximum size of the held-out part: an agreement is then known to 1 %."""


class Window(NamedTuple):
    """Part of a sequence: tokens from `start` to before `end`."""

    sequence: int
    start: int
    end: int


@dataclass(frozen=True)
class Batch:
    """Windows side by side, padded at the right.

    Positions i are those after which the target's distribution of the next token is known.
    """

    token_ids: torch.Tensor
    """int64 [batch_size, length]"""
    windows: torch.Tensor
    """int64 [m]: window of each distribution."""
    positions: torch.Tensor
    """int64 [m]: token, counted in the window, after which each is."""
    targets: TopKTargets
    """[m] rows"""
    hidden_states: torch.Tensor | None
    """[batch_size, length, width], bf16, where the traces have them."""

    def to(self, device: torch.device) -> Batch:
        states = self.hidden_states
        return Batch(
            self.token_ids.to(device),
            self.windows.to(device),
            self.positions.to(device),
            TopKTargets(*(column.to(device) for column in self.targets)),
            None if states is None else states.to(device),
        )


class TrainingData:
    """Windows of a folder of traces; those at the end are held out.

    Sequences of the end are of other documents than the first ones, or of later requests.

    Args:
        length: maximum tokens of a window.

    Raises TrainError where one of both parts would be empty.
    """

    def __init__(self, traces: Traces, length: int, batch_size: int) -> None:
        self._traces, self._length, self._batch_size = traces, length, batch_size
        self._files: dict[Path, Any] = {}
        windows = [list(self._windows(number)) for number in range(len(traces))]
        n_sequences = len(traces)
        n_tokens, limit = 0, min(_MAX_HELD_OUT_TOKENS, HELD_OUT_SHARE * traces.n_tokens)
        first_held_out = n_sequences
        while first_held_out > 0 and n_tokens < limit:
            first_held_out -= 1
            n_tokens += len(traces.token_ids(first_held_out))
        self.training = [w for part in windows[:first_held_out] for w in part]
        self.held_out = [w for part in windows[first_held_out:] for w in part]
        if not self.training or not self.held_out:
            raise TrainError(
                f"{n_sequences} sequences of {traces.n_tokens} tokens are too few to train with "
                "and to measure with: give more text"
            )

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.training) // self._batch_size)

    def training_batch(self, step: int, seed: int) -> Batch:
        """Return the batch of a step; each window comes once in an epoch, in a seeded order."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng((seed, epoch)).permutation(len(self.training))
        chosen = order[index * self._batch_size : (index + 1) * self._batch_size]
        return self.batch([self.training[i] for i in chosen])

    def held_out_batches(self) -> Iterator[Batch]:
        for start in range(0, len(self.held_out), self._batch_size):
            yield self.batch(self.held_out[start : start + self._batch_size])

    def batch(self, windows: Sequence[Window]) -> Batch:
        longest = max(window.end - window.start for window in windows)
        token_ids = torch.zeros((len(windows), longest), dtype=torch.int64)
        places, positions, tops, states = [], [], [], []
        for number, window in enumerate(windows):
            ids = self._traces.token_ids(window.sequence)[window.start : window.end]
            token_ids[number, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
            first, last = self._known_rows(window)
            rows = self._traces.rows(window.sequence)[first:last] - window.start
            positions.append(rows)
            places.append(np.full(len(rows), number))
            tops.append(self._traces.top(window.sequence).part(slice(first, last)))
            states.append(self._hidden_states(window, longest))
        top = TopK.joined(tops, self._traces.header.top_k)
        targets = TopKTargets(
            torch.from_numpy(top.ids.astype(np.int64)),
            torch.from_numpy(top.logprobs.astype(np.float32)),
            torch.from_numpy(top.rest.astype(np.float32)),
        )
        return Batch(
            token_ids,
            torch.from_numpy(np.concatenate(places).astype(np.int64)),
            torch.from_numpy(np.concatenate(positions).astype(np.int64)),
            targets,
            torch.stack(states) if self._traces.header.hidden_layers else None,
        )

    def _windows(self, number: int) -> Iterator[Window]:
        """Yield the windows of a sequence, counted from its end; none without a distribution."""
        end = len(self._traces.token_ids(number))
        while end > 0:
            window = Window(number, max(0, end - self._length), end)
            first, last = self._known_rows(window)
            if last > first:
                yield window
            end = window.start

    def _known_rows(self, window: Window) -> tuple[int, int]:
        rows = self._traces.rows(window.sequence)
        first, last = np.searchsorted(rows, [window.start, window.end])
        return int(first), int(last)

    def _hidden_states(self, window: Window, length: int) -> torch.Tensor:
        """Return the hidden states [length, width] of a window, padded with zeros."""
        header = self._traces.header
        states = torch.zeros((length, header.hidden_size), dtype=torch.bfloat16)
        if header.hidden_layers:
            path, part = self._traces.location(window.sequence)
            if path not in self._files:
                self._files[path] = safe_open(path, framework="pt")
            start, end = part.start + window.start, part.start + window.end
            stored = self._files[path].get_slice("hidden_states")[start:end]
            states[: end - start] = stored
        return states
