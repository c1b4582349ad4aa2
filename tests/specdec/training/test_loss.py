"""The loss over the k likeliest tokens against that over the whole vocabulary."""

from __future__ import annotations

import pytest
import torch

from specdec.traces.top_k import TopK
from specdec.training.loss import TopKTargets, soft_loss, top_k_loss

VOCAB = 40


def targets(logits: torch.Tensor, k: int) -> TopKTargets:
    top = TopK.of(logits.numpy(), k)
    ids, logprobs, rest = (torch.from_numpy(column) for column in top)
    return TopKTargets(ids.long(), logprobs.float(), rest.float())


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    target, draft = torch.randn(2, 30, VOCAB, generator=generator) * 3
    return target, draft


def test_all_tokens_give_the_whole_loss(pair) -> None:
    target, draft = pair
    expected = soft_loss(target[None], draft[None], 0.3)
    torch.testing.assert_close(
        top_k_loss(targets(target, VOCAB), draft, 0.3), expected, rtol=0.002, atol=0
    )


@pytest.mark.parametrize("k", [1, 8, VOCAB])
def test_it_is_least_for_the_target_itself(pair, k) -> None:
    target, _ = pair
    logits = target.clone().requires_grad_()
    loss = top_k_loss(targets(target, k), logits, 0.0)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.abs().max() < 1e-4
    assert loss < top_k_loss(targets(target, k), pair[1], 0.0)
