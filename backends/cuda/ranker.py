"""Ranking on the device that has the logits; see backends/contract/ranking.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from backends.contract.ranking import (
    HEAD_TOKENS,
    MAX_NOISE_POSITIONS,
    RANKED_TOGETHER,
    Ranked,
    Ranking,
    TokenFilters,
    log_chances,
)
from backends.contract.rows import LogitRows
from backends.cuda.rows import Computing, DeviceRows


class DeviceRanker:
    """See RowRanker. All is computed in float32.

    Args:
        device: of the rows.
        computing: around all that is done there; see TorchWeights.computing.
    """

    def __init__(self, ranking: Ranking, device: torch.device, computing: Computing) -> None:
        self._ranking, self._device, self._computing = ranking, device, computing
        self._noise = (
            None if ranking.noise is None else _DeviceNoise(ranking.noise, ranking.n_tokens, device)
        )

    def rank(self, rows: LogitRows, positions: Sequence[int], width: int) -> Ranked:
        with self._computing(), torch.inference_mode():
            logits = self._on_device(rows)[:, : self._ranking.n_tokens]
            width = min(width, logits.shape[1])
            parts = [
                self._likeliest(logits[i : i + RANKED_TOGETHER], positions[i:], width)
                for i in range(0, max(1, len(rows)), RANKED_TOGETHER)
            ]
            found = [torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True)]
        token_ids, scores, sums = found
        return Ranked(token_ids, log_chances(scores, sums))

    def forget(self) -> None:
        if self._noise is not None:
            self._noise.forget()

    def _on_device(self, rows: LogitRows) -> torch.Tensor:
        if isinstance(rows, DeviceRows):
            return rows.on_device
        return torch.from_numpy(np.asarray(rows)).to(self._device)

    def _likeliest(
        self, logits: torch.Tensor, positions: Sequence[int], width: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens and their scores [n, width], and the sums of `log_chances` [n, 1]."""
        scores = logits.to(torch.float32, copy=True)
        if self._noise is not None:
            filters = self._ranking.filters
            if filters is not None:
                scores.masked_fill_(scores < lowest_kept(scores, filters), -torch.inf)
            scores += self._noise.at(positions[: len(scores)])
        scores /= self._ranking.sharpness
        values, token_ids = torch.topk(scores, width, dim=1)
        sums = scores.sub_(values[:, :1]).exp_().sum(dim=1, keepdim=True)
        return token_ids, values, sums


class _DeviceNoise:
    """The noise of the positions that were asked for last, in one buffer."""

    def __init__(
        self, noise: Callable[[int], NDArray[np.float32]], n_tokens: int, device: torch.device
    ) -> None:
        self._noise, self._shape, self._device = noise, (MAX_NOISE_POSITIONS, n_tokens), device
        self._buffer: torch.Tensor | None = None
        self._slots: dict[int, int] = {}  # by position, that of the longest ago first

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        """[len(positions), n_tokens], a copy; at most MAX_NOISE_POSITIONS positions."""
        if self._buffer is None:
            self._buffer = torch.empty(self._shape, dtype=torch.float32, device=self._device)
        slots = [self._slot(self._buffer, position) for position in positions]
        return self._buffer[torch.tensor(slots, dtype=torch.long, device=self._device)]

    def forget(self) -> None:
        self._buffer, self._slots = None, {}

    def _slot(self, buffer: torch.Tensor, position: int) -> int:
        slot = self._slots.pop(position, None)
        if slot is None:
            if len(self._slots) == MAX_NOISE_POSITIONS:
                del self._slots[next(iter(self._slots))]
            slot = min(set(range(MAX_NOISE_POSITIONS)) - set(self._slots.values()))
            buffer[slot].copy_(torch.from_numpy(self._noise(position)))
        self._slots[position] = slot
        return slot


def lowest_kept(scores: torch.Tensor, filters: TokenFilters) -> torch.Tensor:
    """The score [n, 1] below which a token of each row [n, n_tokens] is ruled out.

    As specdec.drafters.candidates.lowest_kept has it, which says why it is one threshold.
    """
    temperature, n_head = filters.temperature, min(HEAD_TOKENS, scores.shape[1])
    peak = scores.amax(dim=1, keepdim=True)
    floor = torch.full_like(peak, -torch.inf)
    if filters.min_p > 0.0:
        floor = (peak.double() + temperature * float(np.log(filters.min_p))).float()
    if filters.top_k == 0 and filters.top_p >= 1.0:
        return floor
    head, rest = torch.topk(scores, n_head, dim=1).values, scores
    if 0 < filters.top_k <= n_head:
        rest = head = head[:, : filters.top_k].contiguous()
        floor = torch.maximum(floor, head[:, -1:])
    if filters.top_p < 1.0:
        mass = _masses(head, peak, temperature).cumsum(dim=1, dtype=torch.float64)
        total = _masses(rest, peak, temperature).sum(dim=1, keepdim=True).double()
        n_below = torch.searchsorted(mass, filters.top_p * total)
        last = head.gather(1, n_below.clamp(max=head.shape[1] - 1))
        is_found = n_below < head.shape[1]
        floor = torch.where(is_found, torch.maximum(floor, last), floor)
    return floor


def _masses(scores: torch.Tensor, peak: torch.Tensor, temperature: float) -> torch.Tensor:
    return (scores - peak).div_(temperature).exp_()
