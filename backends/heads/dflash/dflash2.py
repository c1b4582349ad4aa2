"""The parts that DFlash 2 adds to a DFlash head: convolutions over a block, and transitions between
the candidates of adjacent positions.

A convolution is wrapped around attention and around the MLP of every layer. With x(i) the input of
the position i of a block, taps t and groups g(c) of channels,

    y(i, c) = sum over t of (base(t, c) + delta(i, t, g(c))) x(i - t, c),    x(j) = 0 for j < 0,

where delta is projected from the input of the first of the two convolutions.

Of the k likeliest tokens of each position, with the logits u and the final hidden state h, token c
scores after token p of the position before it

    s(p, c) = u(c) + < A(p) * project(h), B(c) >,

and softmax over c is the probability that c follows p. The pending token is the only p of the first
masked position. References: vllm-project/vllm#52816 and llama.cpp's src/models/dflash.cpp.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from backends.heads.dflash.config import SecondVersion


def block_places(
    token_ids: torch.Tensor, positions: torch.Tensor, mask_token_id: int
) -> torch.Tensor:
    """Return the place of each token [batch, n] in its block, which begins with the token that is
    no mask, or whose position does not follow; the pending token's is 0."""
    begins = token_ids != mask_token_id
    begins[:, 0] = True
    begins[:, 1:] |= positions[:, 1:] != positions[:, :-1] + 1
    rows = torch.arange(token_ids.shape[1], device=token_ids.device)
    return rows - (rows * begins).cummax(dim=-1).values


class GroupedConv(nn.Module):
    """The two convolutions around a part of a layer."""

    def __init__(self, hidden_size: int, settings: SecondVersion) -> None:
        super().__init__()
        self._taps, self._group_size = settings.kernel_size, settings.group_size
        n_groups = hidden_size // settings.group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self._taps, hidden_size))
        width = 2 * self._taps * n_groups
        self.kernel_projection = nn.Linear(hidden_size, width, bias=False)

    def before(
        self, hidden: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input [batch, n, hidden] of the part, and what `after` needs."""
        delta = self.kernel_projection(hidden).unflatten(-1, (2, self._taps, -1))
        return self._convolved(hidden, delta[..., 0, :, :], 0, places), delta[..., 1, :, :]

    def after(
        self, hidden: torch.Tensor, delta: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        """Return the part's output, convolved."""
        return self._convolved(hidden, delta, 1, places)

    def _convolved(
        self, hidden: torch.Tensor, delta: torch.Tensor, side: int, places: torch.Tensor
    ) -> torch.Tensor:
        """delta: [batch, n, taps, groups]; places: see `block_places`."""
        kernel = self.base_kernel[side] + delta.repeat_interleave(self._group_size, dim=-1)
        result = kernel[..., 0, :] * hidden
        for tap in range(1, min(self._taps, hidden.shape[1])):
            earlier = functional.pad(hidden[:, :-tap], (0, 0, tap, 0))
            result = result + kernel[..., tap, :] * earlier * (places >= tap)[..., None]
        return result


class CandidateSelector(nn.Module):
    """Scores of transitions between the likeliest tokens of adjacent positions."""

    def __init__(self, hidden_size: int, vocab_size: int, settings: SecondVersion) -> None:
        super().__init__()
        self._top_k = settings.top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, settings.rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, settings.rank))
        self.hidden_projection = nn.Linear(hidden_size, settings.rank, bias=False)

    def forward(
        self, logits: torch.Tensor, hidden: torch.Tensor, pending: torch.Tensor
    ) -> torch.Tensor:
        """Return float32 [n, k + k * k] for all masked positions of blocks, one block after the
        other: the tokens c, and s(p, c) of each token p in turn.

        logits: [n, vocab]. hidden: [n, hidden].
        pending: int64 [n]: the pending token in the rows after it, -1 in all others.
        """
        scores, tokens = logits.topk(self._top_k, dim=-1)
        before = torch.where(pending[:, None] < 0, tokens.roll(1, dims=0), pending[:, None])
        gate = self.hidden_projection(hidden)[:, None]
        joined = self.predecessor_codebook[before] * gate
        edges = joined @ self.successor_codebook[tokens].transpose(1, 2)
        transitions = scores[:, None].float() + edges.float()
        return torch.cat([tokens.float(), transitions.flatten(1)], dim=-1)
