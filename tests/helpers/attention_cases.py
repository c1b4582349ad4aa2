"""Layouts, states and a float64 reference for attention tests, and passes to compare rows of."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from backends.attention.batch import BatchLayout
from backends.attention.blocked_mask import blocked_mask
from backends.attention.blocks import ProductLimits
from backends.attention.layout import CausalLayout, PassLayout
from backends.checkpoint.config import HeadShape
from backends.contract.cached_checks import CachedChecks
from backends.hf.self_test import CANDIDATES, find_limits

CPU = torch.device("cpu")


def random_tree(prefix: int, n_live: int, n_new: int, rng: np.random.Generator) -> PassLayout:
    """Return `n_new` rows behind `n_live` older nodes, each below the prefix or an older node."""
    return tree_of([int(rng.integers(-1, node)) for node in range(n_live + n_new)], prefix, n_live)


def tree_of(parents: list[int], prefix: int, n_live: int = 0) -> PassLayout:
    """Return nodes with these earlier parents; -1 is the prefix. The first n_live are cached."""
    visible = np.eye(len(parents), dtype=bool)
    depths = np.zeros(len(parents), dtype=np.int64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] |= visible[parent]
            depths[node] = depths[parent] + 1
    return PassLayout(prefix, prefix + depths, visible[n_live:])


def states(
    num_tokens: int,
    n_keys: int,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, laid out as by a projection and a cache with spare capacity.

    heads: of queries, of keys. dims: of keys, of values.
    """
    generator = torch.Generator().manual_seed(num_tokens * 1000 + n_keys)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    query = normal(1, num_tokens, heads[0], dims[0]).transpose(1, 2)
    key, value = (normal(1, heads[1], n_keys + 7, dim)[:, :, :n_keys] for dim in dims)
    return query, key, value


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: np.ndarray,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute softmax over all keys in float64, [1, rows, heads, value dim], for `BlockedMask`."""
    group = query.shape[1] // key.shape[1]
    q, k, v = (x.double() for x in (query, key, value))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias.double()[None, :, None]
    scores = scores.masked_fill(~torch.from_numpy(allowed), -torch.inf)
    if sinks is not None:  # one more key, whose value is 0
        sink = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], dim=2)
    return (scores.softmax(dim=-1) @ v).transpose(1, 2)


def keys_of(layout: PassLayout, row: int) -> torch.Tensor:
    """Return indices of the keys on the path of a new row, from position 0 to its own."""
    return torch.from_numpy(np.flatnonzero(layout.allowed(row, row + 1, None)[0]))


@cache
def limits_here(shape: HeadShape) -> ProductLimits:
    """Limits of this machine; the tests fail without any."""
    return find_limits(shape, CachedChecks("the tests", CANDIDATES)) or ProductLimits()


class Case:
    """The new rows start..end of a layout, with queries for them and keys for all of it."""

    def __init__(
        self,
        layout: PassLayout,
        rows: tuple[int, int] | None = None,
        window: int | None = None,
        *,
        softcap: float | None = None,
        has_sinks: bool = False,
        has_bias: bool = False,
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (8, 8),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.layout, self.window, self.softcap = layout, window, softcap
        self.start, self.end = rows or (0, layout.n_new)
        num_tokens, n_keys = self.end - self.start, layout.prefix + layout.first_new + self.end
        self.states = states(num_tokens, n_keys, heads=heads, dims=dims, dtype=dtype)
        self.scale = dims[0] ** -0.5
        self.limits = limits_here(HeadShape(*heads, *dims))
        self.sinks = torch.linspace(-2.0, 5.0, heads[0]) if has_sinks else None
        slopes = torch.linspace(0.01, 0.5, heads[0])
        positions = torch.from_numpy(layout.key_positions(self.end))
        self.bias = slopes[:, None] * positions if has_bias else None

    def together(self) -> torch.Tensor:
        """Attend all rows at once: [rows, heads, value dim]."""
        return self._attend(self.layout, self.start, self.end, self.states, self.bias)

    def alone(self, row: int) -> torch.Tensor:
        """Attend one row behind nothing but the keys on its path: [heads, value dim]."""
        query, key, value = self.states
        path = keys_of(self.layout, self.start + row)
        own = query[:, :, row : row + 1], key[:, :, path], value[:, :, path]
        bias = None if self.bias is None else self.bias[:, path]
        return self._attend(CausalLayout(len(path) - 1, 1), 0, 1, own, bias)[0]

    def expected(self) -> torch.Tensor:
        allowed = self.layout.allowed(self.start, self.end, self.window)
        options = self.softcap, self.sinks, self.bias
        return reference(*self.states, allowed, self.scale, *options)[0]

    def differing(self, rows: list[int]) -> list[int]:
        """Return the rows whose bits differ from those computed alone."""
        actual = self.together()
        return [row for row in rows if not torch.equal(actual[row], self.alone(row))]

    def _attend(
        self,
        layout: PassLayout,
        start: int,
        end: int,
        own: tuple[torch.Tensor, ...],
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        mask = blocked_mask(BatchLayout.of(layout), start, end, self.window, self.limits)
        options: dict[str, Any] = {"softcap": self.softcap, "sinks": self.sinks, "bias": bias}
        query, key, value = own
        return mask.attend(query, key, value, self.scale, **options)[0]
