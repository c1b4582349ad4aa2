"""Selective state spaces: Mamba (Gu and Dao 2023, algorithm 2) and Mamba-2 (Dao and Gu 2024)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import softplus

from backends.feedforward.elementwise import by_rows
from backends.recurrent.kinds import Recurrence, Rows, State


@dataclass(frozen=True)
class Mamba2(Recurrence):
    """Mamba-2: one decay for each head.

    rows: x [tokens, heads, head dim], time steps [tokens, heads], B and C [tokens, groups, state].
    """

    n_products = 2

    a: torch.Tensor
    """[heads], negative."""
    d: torch.Tensor | None
    dt_bias: torch.Tensor | None
    limits: tuple[float, float]
    """Range of the time steps."""

    def initial(self, rows: Rows) -> State:
        x, _, b, _ = rows
        shape = (*x.shape[1:], b.shape[-1])
        return torch.zeros(shape, dtype=torch.float32, device=x.device)

    def advance(self, state: State, rows: Rows) -> tuple[State, torch.Tensor]:
        x, dt, b, c = (part.float() for part in rows)
        n_heads = x.shape[1]
        dt, decay = self.steps(dt)
        b, c = (part.repeat_interleave(n_heads // part.shape[1], dim=1) for part in (b, c))
        outputs = []
        for i in range(len(x)):
            added = (dt[i, :, None] * b[i])[:, None, :] * x[i, :, :, None]
            state = state * decay[i, :, None, None] + added
            outputs.append((state * c[i, :, None, :]).sum(-1))
        return state, self.with_skip(torch.stack(outputs), rows[0])

    def steps(self, dt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (time steps, decays) [tokens, heads]."""
        if self.dt_bias is not None:
            dt = dt + self.dt_bias.float()
        dt = by_rows(softplus)(dt).clamp(*self.limits)
        return dt, torch.exp(dt * self.a.float())

    def with_skip(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.d is not None:
            output = output + x.float() * self.d.float()[:, None]
        return output.to(x.dtype)


@dataclass(frozen=True)
class Mamba1(Recurrence):
    """Mamba: one decay for each channel and state.

    rows: x, time steps and gate [tokens, channels], B and C [tokens, state].
    """

    n_products = 2

    a: torch.Tensor
    """[channels, state], negative."""
    d: torch.Tensor | None
    dt_bias: torch.Tensor | None
    silu: Callable[[torch.Tensor], torch.Tensor] = torch.nn.functional.silu

    def initial(self, rows: Rows) -> State:
        x, _, _, b, _ = rows
        shape = (x.shape[1], b.shape[1])
        return torch.zeros(shape, dtype=torch.float32, device=x.device)

    def advance(self, state: State, rows: Rows) -> tuple[State, torch.Tensor]:
        x, dt, gate, b, c = (part.float() for part in rows)
        if self.dt_bias is not None:
            dt = dt + self.dt_bias.float()
        dt = by_rows(softplus)(dt)
        outputs = []
        for i in range(len(x)):
            decay = torch.exp(dt[i, :, None] * self.a.float())
            state = state * decay + (dt[i] * x[i])[:, None] * b[i]
            outputs.append((state * c[i]).sum(-1))
        output = torch.stack(outputs)
        if self.d is not None:
            output = output + x * self.d.float()
        return state, (output * by_rows(self.silu)(gate)).to(rows[0].dtype)
